"""`anneal import openai`: jobs of a service with OpenAI's shapes become jobs here, and its model names answer."""

import json
from collections.abc import Iterator

import httpx
import pytest
from anneal.commands import imports
from anneal.migration.importing import Memory, convert_and_check
from anneal.migration.openai_jobs import plan_of
from anneal.migration.plans import Plan

from apps.datasets.models import DatasetVersion
from apps.finetuning.models import FineTuningJob
from apps.serving.models import Alias, Deployment
from tests.factories.datasets import jsonl, jsonl_of
from tests.factories.serving import load, make_replica
from tests.twins.openai_jobs import KEY, OpenAiTwin, serve_openai

ASKED = {"messages": [{"role": "user", "content": "What is 6 x 7?"}]}


@pytest.fixture
def openai(checking_server, monkeypatch) -> Iterator[OpenAiTwin]:
    """OpenAI's twin, with its key in the environment."""
    monkeypatch.setattr(imports, "_SECONDS", 0.0)
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with serve_openai() as twin:
        yield twin


@pytest.mark.slow
def test_jobs_are_imported_once_and_their_old_names_answer(
    anneal, openai, floor, claim, network, tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first = openai.add_job(1, jsonl(), validation_file="file-gone")
    openai.add_job(2, jsonl_of(*[ASKED | {"reference_answer": "42"}] * 12))
    openai.add_job(3, jsonl(), model="gpt-3.5-turbo-0125", fine_tuned_model="ft:gpt-3.5-turbo-0125:acme::9aBcD3")
    openai.add_job(4, jsonl_of(ASKED), method={"type": "reinforcement", "reinforcement": {"hyperparameters": {}}})
    openai.add_job(5, jsonl(), status="failed", fine_tuned_model=None)
    words = (
        "import",
        "openai",
        "--openai-url",
        openai.url,
        "--map",
        "gpt-4o-mini=anneal-demo",
        "--map",
        "gpt-3.5-turbo=anneal-demo",
    )

    shown = anneal(*words, "--dry-run")
    assert shown.exit_code == 0 and "learning_rate_multiplier 1.8: ignored." in shown.output
    assert "checkpoints: ignored. Only the final model's name" in shown.output
    assert "Reinforcement fine-tuning is not offered" in shown.output and "It is failed at OpenAI" in shown.output
    assert network.paths("POST") == [] and not DatasetVersion.objects.exclude(created_by="system").exists()

    declined = anneal(*words, answer="y\nn\n")
    assert declined.exit_code == 1 and "Start 3 jobs?" in declined.errors, declined.output
    assert not FineTuningJob.objects.exists()

    done = anneal(*words, "--yes", "--json")
    again = anneal(*words, "--yes", "--json")

    assert (done.exit_code, again.exit_code) == (0, 0), done.errors
    assert "12 got the ideal answer" in declined.errors
    jobs = {job.metadata["imported_from"]: job for job in FineTuningJob.objects.all()}
    assert set(jobs) == {f"openai:ftjob-{number:024}:anneal-demo" for number in (1, 2, 3)}
    (gone,) = (each for each in done.json["data"][-1]["settings"] if each["name"] == "validation_file")
    assert gone["outcome"] == "ignored" and "No such File object: file-gone" in gone["reason"]
    assert {each["job"] for each in again.json["data"]} == {job.pk for job in jobs.values()} | {None}
    made = jobs[f"openai:{first['id']}:anneal-demo"]
    assert (made.hyperparameters["epochs"], made.hyperparameters["batch_size"]) == (3, 1)
    assert (made.seed, made.suffix, made.metadata["imported_model"]) == (42, "faq-bot", first["fine_tuned_model"])
    assert DatasetVersion.objects.count() == 2, "two jobs have the same rows"
    assert len([line for line in openai.requests if "/file-0" in line]) == 3, "each is downloaded once"
    kept = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    sent = b"".join(call.read() + str(call.headers).encode() for call in network.calls)
    assert KEY.encode() not in kept + sent

    claim().start().succeed(floor.base_model)
    ended = FineTuningJob.objects.get(status="succeeded")
    old_name, version = ended.metadata["imported_model"], ended.adapter_version
    cold = anneal("import", "finish")
    assert Deployment.objects.get(adapter_version=version).last_requested_at is not None, "the refusal is not all"
    load(version, make_replica(floor.base_model, "http://127.0.0.1:1"))
    assert cold.exit_code == 1 and "No replica has loaded" in cold.errors
    partly = anneal("import", "finish", "--json")
    assert partly.exit_code == 1, "two jobs still run"
    assert Alias.objects.get().model_name == old_name
    assert version.model_name in anneal("import", "status").output


@pytest.mark.slow
def test_an_import_of_which_no_job_can_be_made_says_why_and_exits_with_5(anneal, openai, floor, tmp_path) -> None:
    job = openai.add_job(1, jsonl())
    words = ("import", "openai", "--openai-url", openai.url, "--folder", str(tmp_path / "import"))

    rehearsed, begun = anneal(*words, "--dry-run"), anneal(*words, "--yes")
    unknown = anneal(*words, "--job", "ftjob-unknown", "--dry-run")

    for shown in (rehearsed, begun):
        assert shown.exit_code == 5 and "choose one with --map gpt-4o-mini" in shown.output, shown.errors
        assert "No job can be imported." in shown.output
    assert unknown.exit_code == 2 and "ftjob-unknown: there is no such job" in " ".join(unknown.errors.split())
    for command in ("status", "finish"):
        empty = anneal("import", command, "--folder", str(tmp_path / "import"))
        assert empty.exit_code == 2 and "has no jobs of an import" in empty.errors
    assert anneal(*words, "--job", job["id"], "--map", "gpt-4o-mini=anneal-demo", "--dry-run").exit_code == 0


@pytest.mark.slow
def test_a_key_that_openai_refuses_is_told_and_nothing_happens(anneal, openai, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-wrong")

    words = ("import", "openai", "--folder", str(tmp_path / "import"), "--openai-url")
    refused = anneal(*words, openai.url)
    misdirected = anneal(*words, "http://testserver/v1")

    assert misdirected.exit_code == 2 and "must not get the key" in misdirected.errors
    assert refused.exit_code == 3 and "Check OPENAI_API_KEY" in refused.errors and "anneal login" not in refused.errors


def test_a_missing_key_is_named_where_there_is_no_terminal(anneal, openai, monkeypatch, recwarn) -> None:
    monkeypatch.delenv("OPENAI_API_KEY")

    refused = anneal("import", "openai", "--openai-url", openai.url, answer="")

    assert refused.exit_code == 3 and "Set OPENAI_API_KEY." in refused.errors
    assert len(recwarn) == 0 and openai.requests == []


@pytest.mark.parametrize(("status", "text"), [({"status": "failed"}, "It is failed at"), ({}, "It has no status at")])
def test_a_job_without_success_is_not_imported(status, text) -> None:
    plan = plan_of({"id": "ftjob-1", "model": "gpt-4o"} | status, catalogue=[], chosen={})

    assert plan.obstacle == f"{text} OpenAI; only succeeded jobs are imported."


def test_an_error_in_yaml_names_the_file_and_the_line(anneal, floor, tmp_path) -> None:
    (tmp_path / "tune.yaml").write_text("model: x\nrows: [1,\n")

    refused = anneal("import", "together", str(tmp_path / "tune.yaml"))

    assert refused.exit_code == 2 and f'in "{tmp_path}/tune.yaml", line 3, column 1' in refused.errors


@pytest.mark.slow
def test_an_export_needs_no_key(anneal, openai, tmp_path) -> None:
    job = openai.add_job(1, jsonl())
    export = tmp_path / "export"
    export.mkdir()
    (export / "jobs.json").write_text(json.dumps({"object": "list", "data": [job], "has_more": True}))
    words = ("import", "openai", "--export", str(export), "--folder", str(tmp_path / "import"), "--yes", "--json")

    unmapped = anneal(*words)
    incomplete = anneal(*words, "--map", "gpt-4o-mini=anneal-demo")
    (export / f"{job['training_file']}.jsonl").write_bytes(jsonl())
    done = anneal(*words, "--map", "gpt-4o-mini=anneal-demo", "--set", "learning_rate=0.001")

    assert "older jobs are missing" in unmapped.errors
    assert "--map gpt-4o-mini-2024-07-18=MODEL" in unmapped.json["data"][0]["obstacle"]
    assert incomplete.exit_code == 5 and "has no file-" in incomplete.json["data"][0]["obstacle"]
    assert done.exit_code == 0, done.errors
    assert FineTuningJob.objects.get().hyperparameters["learning_rate"] == 0.001
    assert openai.requests == []

    again, other = (
        anneal(*words, "--map", "gpt-4o-mini=anneal-demo", "--set", f"learning_rate={rate}")
        for rate in ("1e-3", "0.002")
    )
    rates = {each.pk: each.hyperparameters["learning_rate"] for each in FineTuningJob.objects.all()}
    assert (again.exit_code, other.exit_code) == (0, 0) and again.json["data"][0]["job"] == done.json["data"][0]["job"]
    assert sorted(rates.values()) == [0.001, 0.002], "another setting makes another job"
    standing = anneal("import", "status", "--folder", str(tmp_path / "import"), "--json").json["data"]
    assert [rates[each["job"]] for each in standing] == [0.002], "the last one gets the old name"


@pytest.mark.slow
def test_a_job_that_an_export_has_twice_is_imported_once(anneal, openai, tmp_path) -> None:
    job, nameless = openai.add_job(1, jsonl()), openai.add_job(2, jsonl(), id=None)
    export = tmp_path / "export"
    export.mkdir()
    (export / f"{job['training_file']}.jsonl").write_bytes(jsonl())
    rows = [job | {"status": "running"}, job, nameless, nameless, job]
    (export / "jobs.json").write_text(json.dumps(rows))
    words = ("import", "openai", "--export", str(export), "--folder", str(tmp_path / "import"), "--yes", "--json")

    done = anneal(*words, "--map", "gpt-4o-mini=anneal-demo")

    made = FineTuningJob.objects.get()
    assert done.exit_code == 0, done.errors
    assert made.metadata["imported_from"] == f"openai:{job['id']}:anneal-demo"
    assert [each["job"] for each in done.json["data"]] == [made.pk, None, None]
    assert all("It has no id" in each["obstacle"] for each in done.json["data"][1:])


@pytest.mark.slow
def test_two_imports_at_a_time_start_a_job_once_and_again_after_it_failed(anneal, openai, network, tmp_path) -> None:
    openai.add_job(1, jsonl())
    words = ("import", "openai", "--openai-url", openai.url, "--map", "gpt-4o-mini=anneal-demo", "--yes", "--json")

    listed, empty = network.inner, {"object": "list", "data": [], "has_more": False}

    def answer(call: httpx.Request) -> httpx.Response:
        is_search = (call.method, call.url.path) == ("GET", "/v1/fine_tuning/jobs")
        return httpx.Response(200, json=empty) if is_search else listed.handle_request(call)

    first = anneal(*words, "--folder", str(tmp_path / "one"))
    network.inner = httpx.MockTransport(answer)  # the second import has searched before the first one started its job
    second = anneal(*words, "--folder", str(tmp_path / "two"))
    network.inner = listed

    assert (first.exit_code, second.exit_code, FineTuningJob.objects.count()) == (0, 5, 1), second.errors
    assert "idempotency_key_reused" in second.errors
    anneal("jobs", "cancel", FineTuningJob.objects.get().pk)
    again = anneal(*words, "--folder", str(tmp_path / "one"))
    assert again.exit_code == 0 and FineTuningJob.objects.count() == 2, again.errors


AXOLOTL = """
base_model: NousResearch/anneal-demo
datasets: [{path: rows.json, type: alpaca, roles_to_train: [assistant]}]
adapter: qlora
lora_r: 12
lora_alpha: 24
micro_batch_size: 2
gradient_accumulation_steps: 4
num_epochs: 1.5
learning_rate: 2e-4
lr_scheduler: cosine
flash_attention: true
wandb_api_key: hush
hub_token: hush
neat_trick: 1
"""
LLAMA_FACTORY = """
model_name_or_path: demo/anneal-demo
stage: sft
finetuning_type: lora
lora_target: all
dataset: mine
template: llama3
num_train_epochs: 2.0
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
"""
TOGETHER = {
    "model": "anneal-demo", "training_file": "rows.json", "n_epochs": 2, "batch_size": "max", "learning_rate": 1e-4,
    "training_type": {"type": "Lora", "lora_r": 16, "lora_alpha": 32}, "train_on_inputs": False, "suffix": "My Bot",
}  # fmt: skip
FIREWORKS = {
    "baseModel": "accounts/fireworks/models/anneal-demo", "dataset": "accounts/a/datasets/rows", "loraRank": 8,
    "epochs": 2, "learningRate": 0.0001, "batchSize": 65536, "wandbConfig": {"enabled": True, "apiKey": "hush"},
}  # fmt: skip
PAIRS = [{"instruction": f"Say {n}", "output": str(n)} for n in range(12)]


@pytest.mark.slow
def test_configurations_of_other_tools_become_jobs(anneal, openai, tmp_path) -> None:
    (tmp_path / "data").mkdir()
    for place in ("rows.json", "data/rows.json"):
        (tmp_path / place).write_text(json.dumps(PAIRS))
    registered = {"mine": {"file_name": "rows.json", "columns": {"prompt": "instruction", "response": "output"}}}
    (tmp_path / "data/dataset_info.json").write_text(json.dumps(registered))
    texts = {
        "axolotl": AXOLOTL, "llama-factory": LLAMA_FACTORY, "together": json.dumps(TOGETHER),
        "fireworks": json.dumps(FIREWORKS),
    }  # fmt: skip

    done = {}
    for tool, text in texts.items():
        (tmp_path / f"{tool}.yaml").write_text(text)
        words = ["import", tool, str(tmp_path / f"{tool}.yaml"), "--folder", str(tmp_path / "import"), "--yes"]
        if tool == "fireworks":
            assert "Download it and give it by --data" in anneal(*words).output
            words += ["--data", str(tmp_path / "rows.json")]
        ran = anneal(*words, "--json")
        assert ran.exit_code == 0, (tool, ran.errors, ran.output)
        assert "hush" not in ran.output
        done[tool] = ran.json["data"][0]

    recipes = {job.metadata["imported_from"].split(":")[0]: job for job in FineTuningJob.objects.all()}
    axolotl = recipes["axolotl"].hyperparameters
    assert (axolotl["lora_rank"], axolotl["lora_alpha"]) == (16, 32), "the scale is still 2"
    assert (axolotl["batch_size"], axolotl["epochs"]) == (8, 2)
    assert (axolotl["learning_rate"], recipes["axolotl"].method) == (0.0002, "qlora")
    outcomes = {line["name"]: line["outcome"] for line in done["axolotl"]["settings"]}
    assert {f"{name}:" for name in outcomes if "." not in name} <= set(AXOLOTL.split()), "each key has its line"
    assert (outcomes["flash_attention"], outcomes["neat_trick"]) == ("ignored", "unsupported")
    assert (outcomes["datasets.type"], outcomes["datasets.roles_to_train"]) == ("ignored", "unsupported")
    assert recipes["llama-factory"].hyperparameters["batch_size"] == 8
    assert (recipes["together"].suffix, recipes["together"].hyperparameters["lora_alpha"]) == ("my-bot", 32)
    assert recipes["fireworks"].hyperparameters["lora_rank"] == 8
    assert DatasetVersion.objects.count() == 2, "the same rows are sent once for each meaning of their columns"


def test_files_of_one_name_have_conversions_of_their_own(tmp_path) -> None:
    plan = Plan("axolotl:x", "anneal-demo")
    for member, count in (("training_file", 12), ("validation_file", 10)):
        path = tmp_path / member / "rows.jsonl"
        path.parent.mkdir()
        path.write_bytes(jsonl_of(*[ASKED | {"reference_answer": "42"}] * count))
        plan.files[member] = path

    convert_and_check(plan, Memory(tmp_path / "import", "http://testserver"))

    assert [len(path.read_text().splitlines()) for path in plan.files.values()] == [12, 10]


@pytest.mark.parametrize("name", ["file-1.jsonl", "file-1"])
def test_half_a_character_leaves_out_its_row_alone(tmp_path, name, capsys) -> None:
    halved = {"messages": [{"role": "user", "content": "\ud83d"}], "reference_answer": "42"}
    rows = [ASKED | {"reference_answer": "42"}] * 12 + [halved]
    path = tmp_path / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    plan = Plan("openai:x", "anneal-demo", files={"training_file": path})

    convert_and_check(plan, Memory(tmp_path / "import", "http://testserver"))

    assert plan.obstacle is None
    assert len(plan.files["training_file"].read_text().splitlines()) == 12
    assert r"line 13 is left out: \ud83d is half of a character" in capsys.readouterr().err
    assert list(tmp_path.rglob("*.part")) == []
