"""`anneal models`: uploading, downloading, converting and serving adapters; and estimates."""

from collections.abc import Iterator

import httpx
import pytest
from anneal.output import dollars

from apps.adapters.models import AdapterVersion
from apps.catalog.operations import set_price
from apps.core.database.clock import db_now
from apps.finetuning.models import Conversion
from tests.factories.finetuning import adapter_files
from tests.factories.serving import load, make_adapter, make_replica

WEIGHTS = "adapter_model.safetensors"


def test_an_adapter_is_pushed_from_its_folder(anneal, floor, tmp_path) -> None:
    missing = anneal("models", "push", str(tmp_path), "--name", "mine")
    for name, content in adapter_files(floor.base_model).items():
        (tmp_path / name).write_bytes(content)

    pushed = anneal("models", "push", str(tmp_path), "--name", "mine", "--json")

    assert missing.exit_code == 7 and "adapter_model.safetensors" in missing.errors
    assert pushed.exit_code == 0, pushed.errors
    assert pushed.json["model"] == AdapterVersion.objects.get().model_name


def test_a_model_is_pulled_from_where_a_download_stopped(anneal, model, floor, network, tmp_path) -> None:
    whole, folder = adapter_files(floor.base_model)[WEIGHTS], tmp_path / "model"
    folder.mkdir()
    (folder / f"{WEIGHTS}.part").write_bytes(whole[:1000])

    pulled = anneal("models", "pull", model, "--to", str(folder), "--json")
    ranges = {call.url.path.rpartition("/")[2]: call.headers.get("Range") for call in network.calls}
    network.calls = []
    again = anneal("models", "pull", model, "--to", str(folder))

    assert pulled.exit_code == 0, pulled.errors
    assert (folder / WEIGHTS).read_bytes() == whole and ranges[WEIGHTS] == "bytes=1000-"
    assert {file["name"] for file in pulled.json["files"]} >= {WEIGHTS, "README.md", "adapter_config.json"}
    assert list(folder.glob("*.part")) == []
    assert len(network.calls) == 1 and "0 downloaded" in again.output


def test_a_download_that_breaks_goes_on_at_once(anneal, model, floor, network, tmp_path) -> None:
    whole, inner = adapter_files(floor.base_model)[WEIGHTS], network.inner

    class Breaking(httpx.SyncByteStream):
        def __iter__(self) -> Iterator[bytes]:
            yield whole[:500]
            raise httpx.ReadError("connection reset")

    class Once(httpx.BaseTransport):
        def handle_request(self, request: httpx.Request) -> httpx.Response:
            if request.url.path.endswith(WEIGHTS):
                network.inner = inner
                return httpx.Response(200, stream=Breaking())
            return inner.handle_request(request)

    network.inner = Once()

    assert anneal("models", "pull", model, "--to", str(tmp_path / "model")).exit_code == 0
    assert (tmp_path / "model" / WEIGHTS).read_bytes() == whole
    assert [call.headers.get("Range") for call in network.calls if call.url.path.endswith(WEIGHTS)] == [
        None, "bytes=500-",
    ]  # fmt: skip


@pytest.mark.slow
def test_a_model_is_converted_for_a_price_that_is_confirmed(anneal, model) -> None:
    set_price(sku="conversion:bytes", unit="bytes", price_nano=10**10, per=10**9, by="user_1", now=db_now())

    unknown = anneal("models", "convert", model, "--to", "ggml", "--yes")
    declined = anneal("models", "convert", model, "--to", "merged_16bit", answer="n\n")
    refused = anneal("models", "convert", model, "--to", "gguf", "--yes")
    ordered = anneal("models", "convert", model, "--to", "merged_16bit", "--yes", "--json")
    again = anneal("models", "convert", model, "--to", "merged_16bit")

    assert (unknown.exit_code, declined.exit_code, refused.exit_code) == (2, 1, 5)
    assert "At most $" in declined.errors and "GGUF" in refused.errors
    assert ordered.exit_code == 0 and ordered.json["status"] == "waiting", ordered.errors
    assert again.exit_code == 0 and "waits for an idle trainer" in again.output
    assert anneal("models", "convert", model, "--to", "gguf", "--cancel").exit_code == 5, "it was not ordered"
    stopped = anneal("models", "convert", model, "--to", "merged_16bit", "--cancel")
    assert stopped.exit_code == 0 and stopped.output.strip() == "The order is cancelled. You pay nothing."
    assert anneal("models", "convert", model, "--to", "merged_16bit", "--yes", "--json").json["status"] == "waiting"
    Conversion.objects.exclude(status="cancelled").update(status="running")
    assert anneal("models", "convert", model, "--to", "merged_16bit", "--cancel").exit_code == 5
    assert "is making it" in anneal("models", "convert", model, "--to", "merged_16bit").output
    Conversion.objects.exclude(status="cancelled").update(status="succeeded")
    assert "anneal models pull" in anneal("models", "convert", model, "--to", "merged_16bit").output


@pytest.mark.slow
def test_a_model_is_pushed_to_the_hub_with_a_token_that_is_never_shown(anneal, model, monkeypatch, settings) -> None:
    off = anneal("models", "publish", model, "--to", "acme/support", answer="hf_a-token\n")
    settings.HUB_PUSHES = True
    asked = anneal("models", "publish", model, "--to", "acme/support", answer="hf_a-token\n")
    monkeypatch.setenv("HF_TOKEN", "hf_a-token")
    given = anneal("models", "publish", model, "--to", "acme/other", "--json")
    listed = anneal("models", "publications", model)
    last = anneal("models", "publications", model, "--limit", "1", "--json")

    assert off.exit_code == 5 and "hf upload" in off.errors
    assert asked.exit_code == 0, asked.errors
    assert (given.exit_code, given.json["status"], listed.exit_code) == (0, "waiting", 0), given.errors
    assert all(name in listed.output for name in ("acme/support", "acme/other"))
    assert [push["repository"] for push in last.json["data"]] == ["acme/other"]
    assert "hf_a-token" not in "".join(f"{each.output}{each.errors}" for each in (off, asked, given, listed))


def test_a_folder_that_cannot_be_written_is_named(anneal, model, tmp_path) -> None:
    (tmp_path / "file").touch()

    failed = anneal("models", "pull", model, "--to", str(tmp_path / "file"))

    assert failed.exit_code == 7 and str(tmp_path / "file") in failed.errors


def test_a_part_of_another_file_is_replaced(anneal, model, floor, tmp_path) -> None:
    whole, folder = adapter_files(floor.base_model)[WEIGHTS], tmp_path / "model"
    folder.mkdir()
    (folder / f"{WEIGHTS}.part").write_bytes(b"x" * 1000)

    assert anneal("models", "pull", model, "--to", str(folder)).exit_code == 0
    assert (folder / WEIGHTS).read_bytes() == whole


def test_models_are_listed_and_unknown_ones_are_not_found(anneal, model) -> None:
    assert model in anneal("models", "list").output
    assert anneal("models", "pull", "ft:anneal-demo:acme:no:1").exit_code == 4
    assert anneal("models", "pull", model, "--export", "gguf").exit_code == 4


@pytest.mark.parametrize(
    "words",
    [
        ("pull",),
        ("deploy",),
        ("convert", "--to", "gguf"),
        ("publish", "--to", "acme/support", "--token", "hf_x"),
        ("publications",),
    ],
)
def test_what_needs_a_fine_tuned_model_says_so_of_a_base_model(anneal, model, words) -> None:
    refused = anneal("models", *words, "anneal-demo")

    assert refused.exit_code == 4
    assert "'anneal-demo' is a base model: send requests to it as it is, or fine-tune it." in refused.errors


@pytest.mark.slow
def test_a_model_is_deployed_stopped_and_named_by_an_alias(anneal, model, floor) -> None:
    stopped = anneal("models", "deploy", model, "--stop", "--json")
    deployed = anneal("models", "deploy", model)
    early = anneal("models", "alias", "production", model)
    load(AdapterVersion.objects.get(model_name=model), make_replica(floor.base_model, "http://127.0.0.1:1"))
    named = anneal("models", "alias", "production", model)

    assert (stopped.exit_code, stopped.json["model"]) == (0, model)
    assert deployed.exit_code == 0 and f"{model} is " in deployed.output
    assert early.exit_code == 5 and "No replica has loaded this version yet" in early.errors
    assert named.exit_code == 0 and f"now points to {model}." in named.output


@pytest.mark.slow
def test_an_alias_is_rolled_back_by_its_short_or_whole_name(anneal, model, floor) -> None:
    old = AdapterVersion.objects.get(model_name=model)
    replica, new = make_replica(floor.base_model, "unix:///nowhere"), make_adapter(floor.organization, floor.base_model)
    AdapterVersion.objects.filter(pk=new.pk).update(adapter=old.adapter, number=2)
    load(old, replica)
    moved = [anneal("models", "alias", "production", each, "--json") for each in (model, new.model_name)]
    whole = moved[1].json["model"]

    back, forth = anneal("models", "rollback", "production"), anneal("models", "rollback", whole, "--json")
    unknown = anneal("models", "rollback", "prod")

    assert (back.exit_code, back.output) == (0, f"{whole} points to {model}.\n"), back.errors
    assert (forth.exit_code, forth.json["version"]) == (0, new.model_name)
    assert unknown.exit_code == 4 and "There is no alias prod." in unknown.errors
    other = make_adapter(floor.organization, floor.base_model)
    assert anneal("models", "alias", "production", other.model_name).exit_code == 0
    several = anneal("models", "rollback", "production")
    assert several.exit_code == 2 and whole in several.errors
    assert anneal("models", "rollback", "production", key=None).exit_code == 3


@pytest.mark.slow
def test_a_model_is_deleted_once_that_is_confirmed(anneal, model) -> None:
    silent, base = anneal("models", "delete", model), anneal("models", "delete", "anneal-demo", "--yes")
    left = AdapterVersion.objects.filter(model_name=model, deleted_at=None).exists()
    deleted = anneal("models", "delete", model, answer="y\n")

    assert (silent.exit_code, base.exit_code, left) == (1, 3, True), base.errors
    assert "Nothing was deleted. Pass --yes to delete it without a question." in silent.errors
    assert deleted.exit_code == 0 and f"{model} is deleted." in deleted.output
    assert anneal("models", "delete", model, "--yes").exit_code == 4


def test_an_estimate_is_asked_of_the_server_or_made_offline(anneal, file_id, network) -> None:
    served = anneal("estimate", "--model", "anneal-demo", "--file", file_id)
    network.calls = []
    offline = anneal("estimate", "--model", "Llama-3.1-8B", "--gpu", "h100", "--tokens", "10e6", "--json", key=None)

    assert served.exit_code == 0 and "local-cpu" in served.output and "recommended" in served.output
    assert offline.exit_code == 0 and offline.json["model"] == "Llama-3.1-8B" and network.calls == []
    assert anneal("estimate", "--model", "Llama-3.1-8B").exit_code == 2


def test_a_limit_is_never_shown_lower_than_it_is() -> None:
    shown = [dollars(usd, is_limit=True) for usd in ("0.121", "0.0000521", "3", "1234.5601", "0")]

    assert shown == ["$0.13", "$0.000053", "$3.00", "$1,234.57", "$0.00"]
    assert [dollars("0.121"), dollars("-12.5")] == ["$0.12", "-$12.50"]
