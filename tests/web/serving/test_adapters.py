"""The adapter pages: who sees them, files, serving, deletion."""

import io
import json
import zipfile
from urllib.parse import urlencode

import pytest
from asgiref.sync import async_to_sync
from django.conf import settings
from django.test import AsyncClient

from apps.adapters.models import AdapterVersion
from apps.billing.operations import settle_hold
from apps.billing.queries import get_balance
from apps.catalog.models import BaseModel
from apps.catalog.operations import set_price
from apps.contracts.runs import Export
from apps.core.database.clock import db_now
from apps.core.models import AuditEntry
from apps.datasets.models import DatasetVersion
from apps.finetuning.conversions.orders import list_offers
from apps.finetuning.models import Conversion, FineTuningJob
from apps.serving.models import Alias, Deployment, LoadedAdapter, Replica
from apps.serving.operations import deploy, undeploy
from apps.serving.queries import list_routes
from tests.factories.finetuning import model_files
from tests.factories.serving import dedicate, load, make_replica, make_version, make_whole_model
from tests.support.attempts import REPORT
from tests.support.pages import text


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/adapters", "/adapters/{id}", "/adapters/{id}/download"])
def test_members_see_adapters_and_nobody_else_does(path, version, client_for, alice, bob, vera, charlie, rival):
    url = path.format(id=version.pk)

    assert [client_for(person).get(url).status_code for person in (alice, bob, vera)] == [200, 200, 200]
    assert client_for(charlie).get(url).status_code == (200 if path == "/adapters" else 404)
    assert client_for(None).get(url).status_code == 302


@pytest.mark.slow
def test_the_list_shows_lineage_and_state(version, client_for, vera, charlie, rival):
    page = text(client_for(vera).get("/adapters"))
    undeploy(version=version, by="system", now=db_now())

    assert version.model_name in page
    assert "Waiting to load" in page
    assert "Not serving" in text(client_for(vera).get("/adapters"))
    assert version.model_name not in text(client_for(charlie).get("/adapters"))


@pytest.mark.slow
@pytest.mark.parametrize(("state", "words"), [("loaded", "Warm"), ("loading", "Loading"), ("failed", "Failed")])
def test_the_state_is_what_a_replica_says(state, words, version, organization, floor, client_for, vera):
    waiting = text(client_for(vera).get(f"/adapters/{version.pk}"))
    replica = make_replica(floor.base_model, "unix:///x")
    load(version, replica)
    LoadedAdapter.objects.update(state=state, reason="said the engine")

    page = text(client_for(vera).get(f"/adapters/{version.pk}"))

    assert "Waiting to load" in waiting
    assert f"{words}</span>" in page
    assert "said the engine" in page


@pytest.mark.slow
def test_what_was_trained_further_names_both_ends(version, floor, claim, client_for, vera):
    job = floor.job(suffix="triage-more")
    claim().start().succeed(floor.base_model)
    job.refresh_from_db()
    job.requested |= {"start_from": {"version": version.pk, "model": version.model_name}}
    job.save(update_fields=["requested"])

    later = text(client_for(vera).get(f"/adapters/{job.adapter_version_id}"))
    earlier = text(client_for(vera).get(f"/adapters/{version.pk}"))

    assert f'href="/datasets/{job.training_file_id}"' in later
    DatasetVersion.objects.filter(pk=job.training_file_id).update(status="deleted", deleted_at=db_now())
    deleted = text(client_for(vera).get(f"/adapters/{job.adapter_version_id}"))
    assert f'href="/datasets/{job.training_file_id}"' not in deleted and "(deleted)" in deleted
    assert f'Started from</dt><dd class="trunc"><a class="link" href="/adapters/{version.pk}">' in later
    assert f'Trained further in</dt><dd class="trunc"><a class="link" href="/jobs/{job.pk}">triage-more' in earlier


@pytest.mark.slow
def test_versions_tell_how_they_are_served_and_stand_beside_each_other(version, client_for, vera):
    alone = text(client_for(vera).get(f"/adapters/{version.pk}"))
    other = make_version(version.organization, version.adapter.base_model)
    AdapterVersion.objects.filter(pk=other.pk).update(adapter=version.adapter, number=2)
    deploy(version=AdapterVersion.objects.get(pk=other.pk), by="system")

    page = text(client_for(vera).get(f"/adapters/{version.pk}"))

    asked = urlencode([("model", version.model_name), ("model", other.model_name)])
    assert "Compare in the playground" not in alone
    assert f'href="/playground?{asked}"' in page
    assert page.split("Versions</h2>")[1].count("Waiting to load") == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lost", "words"),
    [({"is_ready": False}, "Loading"), ({"observed_at": "2000-01-01T00:00Z"}, "Waiting to load")],
)
def test_what_a_closed_or_lost_replica_has_loaded_is_not_called_warm(lost, words, version, floor, client_for, vera):
    replica = make_replica(floor.base_model, "unix:///x")
    load(version, replica)
    Replica.objects.update(**lost)

    page = text(client_for(vera).get(f"/adapters/{version.pk}"))

    assert f"{words}</span>" in page and "Warm</span>" not in page and "0 replicas" in page


@pytest.mark.slow
def test_the_page_names_what_was_promised_and_is_not_there(version, client_for, vera):
    whole = text(client_for(vera).get(f"/adapters/{version.pk}"))
    AdapterVersion.objects.filter(pk=version.pk).update(
        missing=[{"kind": "merged_16bit", "cause": "the disk was full"}]
    )

    page = text(client_for(vera).get(f"/adapters/{version.pk}"))

    assert "could not be delivered" not in whole
    assert "The merged model could not be delivered: the disk was full. Order it on the adapter" in page


def test_the_page_shows_where_it_came_from_and_how_to_use_it(version, client_for, vera):
    page = text(client_for(vera).get(f"/adapters/{version.pk}"))

    assert f'"model": "{version.model_name}"' in page
    assert "client.chat.completions.create" in page
    assert "/jobs/ftjob-" in page
    assert "adapter_model.safetensors" in page


@pytest.fixture
def evaluated(floor, claim) -> AdapterVersion:
    """A version with a report and a merged model."""
    job = floor.job(suffix="evaluated", exports=["merged_16bit"])
    attempt = claim().start()
    merged = attempt.upload("model", 10, model_files())
    export = Export(kind="merged_16bit", upload_id=merged.pk, manifest_sha256=merged.manifest_sha256)
    attempt.succeed(floor.base_model, report=REPORT, exports=(export,))
    job.refresh_from_db()
    return job.adapter_version


@pytest.mark.slow
def test_base_and_tuned_stand_side_by_side_on_both_pages(evaluated, client_for, vera):
    job = FineTuningJob.objects.get(adapter_version=evaluated)
    for url in (f"/adapters/{evaluated.pk}", f"/jobs/{job.pk}"):
        raw = client_for(vera).get(url).content.decode()

        assert "Exact match" in raw and "0.800" in raw and "better" in raw
        assert "1 row got worse" in raw and "Where is &lt;b&gt;it&lt;/b&gt;?" in raw
        assert "Verifying" in raw


@pytest.mark.slow
def test_a_merged_model_may_be_served_once_it_has_a_replica_of_its_own(organization, floor, client_for, bob):
    version = make_whole_model(organization, floor.base_model)
    url = f"/adapters/{version.pk}"
    client = client_for(bob)

    before = text(client.get(url))
    replica = dedicate(version, "unix:///own")
    serving = text(client.get(url))
    stopped = text(client.post("/adapters/stop", {"version": version.pk, "confirm": version.adapter.name}, follow=True))

    assert "Serve it" not in before and 'id="aliases"' not in before
    assert "any OpenAI client" not in before and "any OpenAI client" in serving
    assert "Files only</span>" in before and "Files only" not in serving and "Warm</span>" in serving
    assert "Stop serving" in serving and "Keep warm" not in serving and 'id="warm"' not in serving
    assert "Serve it" in stopped
    client.post(f"{url}/deploy")
    assert version.model_name in {route.model_name for route in list_routes() if route.upstreams}
    assert replica.whole_model == version


@pytest.mark.slow
def test_the_merged_model_is_an_archive_of_its_own(evaluated, client_for, vera, charlie, rival):
    url = f"/adapters/{evaluated.pk}/download?export=merged_16bit"

    archive = zipfile.ZipFile(io.BytesIO(b"".join(client_for(vera).get(url).streaming_content)))

    names = {name.split("/")[-1]: name for name in archive.namelist()}
    assert {"model.safetensors", "config.json", "README.md", "reproducibility.json"} <= set(names)
    card = archive.read(names["README.md"]).decode()
    assert "library_name: transformers" in card and "with its adapter merged in." in card
    assert client_for(vera).get(f"/adapters/{evaluated.pk}/download?export=gguf").status_code == 404
    assert client_for(charlie).get(url).status_code == 404


@pytest.mark.slow
def test_card_and_reproducibility_file_say_where_it_comes_from(evaluated, client_for, vera):
    address = f"/adapters/{evaluated.pk}/download?file="
    job = FineTuningJob.objects.get(adapter_version=evaluated)

    card = client_for(vera).get(address + "README.md").content.decode()
    bundle = json.loads(client_for(vera).get(address + "reproducibility.json").content)

    assert card.startswith("---\nlibrary_name: peft") and "Exact match | 0.1000 [0.0400, 0.2300] | 0.8000" in card
    assert bundle["training_file"]["sha256"] == job.training_file.sha256
    assert (bundle["seed"], bundle["recipe"], bundle["cost_usd"]) == (job.seed, job.hyperparameters, "0.02")
    assert bundle["evaluation"]["worse_rows"] == 1 and "worse" not in bundle["evaluation"], "the file goes to hubs"
    assert bundle["energy"]["kwh"] is None and "not known" in bundle["energy"]["method"]


@pytest.mark.parametrize(
    ("named", "written"),
    [
        ('Apache-2.0 ("All our models are", README)', ["license: apache-2.0"]),
        ("Llama 3.1 Community License", ["license: other", 'license_name: "Llama 3.1 Community License"']),
        ("", []),
    ],
)
def test_the_card_names_the_licence_as_the_hub_takes_it(named, written, evaluated, client_for, vera):
    BaseModel.objects.filter(pk=evaluated.adapter.base_model_id).update(licence=named, repo="owner/base")

    card = client_for(vera).get(f"/adapters/{evaluated.pk}/download?file=README.md").content.decode()

    head = card.split("---")[1].splitlines()
    assert {'base_model: "owner/base"', "library_name: peft", "base_model_relation: adapter"} <= set(head)
    assert [line for line in head if line.startswith(("license:", "license_name:"))] == written


def test_the_card_says_how_to_load_the_adapter_and_names_no_hub_model_that_is_none(evaluated, client_for, vera):
    card = client_for(vera).get(f"/adapters/{evaluated.pk}/download?file=README.md").content.decode()

    assert "base_model:" not in card
    assert f'from_pretrained("/path/to/{evaluated.adapter.base_model.name}")' in card


def test_the_card_of_a_fully_trained_model_names_no_adapter(evaluated, client_for, vera):
    recipe = FineTuningJob.objects.get(adapter_version=evaluated).hyperparameters
    FineTuningJob.objects.filter(adapter_version=evaluated).update(hyperparameters=recipe | {"method": "full"})

    card = client_for(vera).get(f"/adapters/{evaluated.pk}/download?file=README.md").content.decode()

    assert "with every weight trained" in card and "library_name: transformers" in card
    assert "rank" not in card and "lora" not in card


def test_one_file_is_a_signed_link_under_its_own_name(version, client_for, vera):
    response = client_for(vera).get(f"/adapters/{version.pk}/download?file=adapter_config.json")

    assert response.status_code == 302
    assert response["Location"].startswith(f"{settings.PUBLIC_URL}/objects/{version.object_prefix}/adapter_config.json")
    assert "filename=adapter_config.json" in response["Location"]
    assert AuditEntry.objects.filter(action="adapter.downloaded", target=version.pk).exists()


def test_a_file_outside_of_the_manifest_is_unknown(version, client_for, vera):
    assert client_for(vera).get(f"/adapters/{version.pk}/download?file=../../secret").status_code == 404
    assert client_for(vera).get(f"/adapters/{version.pk}/download?file=manifest.json").status_code == 404


@pytest.mark.slow
def test_the_whole_adapter_is_one_archive(version, client_for, vera):
    response = client_for(vera).get(f"/adapters/{version.pk}/download")
    archive = zipfile.ZipFile(io.BytesIO(b"".join(response.streaming_content)))

    assert 'filename="triage-1.zip"' in response["Content-Disposition"]
    assert archive.testzip() is None
    names = ["README.md", "adapter_config.json", "adapter_model.safetensors", "reproducibility.json"]
    assert sorted(archive.namelist()) == [f"triage-1/{name}" for name in names]
    assert json.loads(archive.read("triage-1/adapter_config.json"))["r"] == 16


@pytest.mark.django_db(transaction=True)
def test_the_archive_streams_under_asgi(version, vera):
    async def fetch() -> bytes:
        client = AsyncClient()
        await client.aforce_login(vera, backend=settings.AUTHENTICATION_BACKENDS[0])
        response = await client.get(f"/adapters/{version.pk}/download")
        return b"".join([chunk async for chunk in response.streaming_content])

    assert zipfile.ZipFile(io.BytesIO(async_to_sync(fetch)())).testzip() is None


@pytest.mark.slow
def test_members_serve_and_stop_and_viewers_do_not(version, client_for, bob, vera):
    stopping = {"version": version.pk, "confirm": "triage"}
    assert client_for(vera).post(f"/adapters/{version.pk}/deploy").status_code == 403
    assert client_for(vera).post("/adapters/stop", stopping).status_code == 403

    client_for(bob).post(f"/adapters/{version.pk}/deploy")
    client_for(bob).post(f"/adapters/{version.pk}/deploy")
    assert Deployment.objects.filter(removed_at=None).count() == 1

    assert client_for(bob).post("/adapters/stop", stopping | {"confirm": ""}).status_code == 422
    assert Deployment.objects.filter(removed_at=None).exists()
    client_for(bob).post("/adapters/stop", stopping)
    assert not Deployment.objects.filter(removed_at=None).exists()


@pytest.mark.slow
def test_deleting_takes_the_name_typed_and_the_right_role(version, client_for, ann, bob):
    url = f"/adapters/{version.pk}/delete"

    assert client_for(bob).post(url, {"confirm": "triage"}).status_code == 403
    assert client_for(ann).post(url, {"confirm": "something else"}).status_code == 422
    assert client_for(ann).post(url, {"confirm": "triage"}).status_code == 302
    assert AdapterVersion.objects.get(pk=version.pk).deleted_at is not None
    assert not Deployment.objects.filter(removed_at=None).exists()
    assert client_for(ann).get(f"/adapters/{version.pk}").status_code == 404


@pytest.mark.slow
def test_moving_an_alias_is_undone_by_pointing_it_back(organization, floor, client_for, bob):
    """However often the button is pressed, the alias stands for the version before."""
    first = make_version(organization, floor.base_model)
    second = AdapterVersion.objects.get(pk=first.pk)
    second.pk, second.number, second._state.adding = "adpv_second", 2, True
    second.lora_name, second.model_name = "a-second", first.model_name[:-8] + "01234567"
    second.save(force_insert=True)
    replica = make_replica(floor.base_model, "unix:///one")
    for each in (first, second):
        Deployment.objects.create(organization=organization, adapter_version=each)
        load(each, replica)
    browser = client_for(bob)
    browser.post(f"/adapters/{first.pk}/alias", {"name": "production"})

    page = text(browser.post(f"/adapters/{second.pk}/alias", {"name": "production"}, follow=True))

    back = f"/adapters/{first.pk}/alias"
    assert f'action="{back}"' in page and "Undo" in page
    for _ in range(2):
        browser.post(back, {"name": "production"})
    assert Alias.objects.get().version_id == first.pk


@pytest.mark.slow
@pytest.mark.parametrize("share", ["100", "9" * 5000])
def test_a_canary_of_everything_or_of_endless_digits_is_refused(share, version, client_for, bob):
    sent = {"name": "night shift", "canary_percent": share}

    page = text(client_for(bob).post(f"/adapters/{version.pk}/alias", sent, follow=True))

    assert "A canary gets 1 to 99 percent" in page and not Alias.objects.exists()
    assert 'value="night shift"' in page and f'value="{share[:3]}' in page, "what was entered stays"


@pytest.mark.slow
def test_another_form_is_ordered_at_the_price_on_its_button(
    version, organization, client_for, alice, bob, vera, charlie, rival
):
    url, address = f"/adapters/{version.pk}", f"/adapters/{version.pk}/convert"
    set_price(sku="conversion:bytes", unit="bytes", price_nano=10**10, per=10**9, by="user_1", now=db_now())
    offer = next(each for each in list_offers(version=version) if each.kind == "merged_16bit")
    form = {"kind": "merged_16bit", "price_nano": offer.price_nano}

    assert 'name="price_nano"' not in text(client_for(vera).get(url))
    assert f'value="{offer.price_nano}"' in text(client_for(bob).get(url)), "GGUF has no converter, and no button"
    assert [client_for(person).post(address, form).status_code for person in (vera, charlie, None)] == [403, 404, 302]
    member = client_for(bob)
    member.post(address, form | {"price_nano": offer.price_nano - 1})
    assert "price is now" in text(member.get(url)) and not Conversion.objects.exists()
    assert member.post(address, form).status_code == 302
    assert "Waiting for an idle trainer" in text(client_for(alice).get(url))
    conversion = Conversion.objects.get()
    assert (conversion.created_by, conversion.price_nano) == (bob.pk, offer.price_nano)
    held = text(client_for(alice).get("/invoices"))
    assert conversion.pk in held and f"/jobs/{conversion.pk}" not in held
    stop = f"/adapters/{version.pk}/conversions/{conversion.pk}/cancel"
    assert stop not in text(client_for(vera).get(url)) and stop in text(member.get(url))
    assert [client_for(person).post(stop).status_code for person in (vera, charlie, None)] == [403, 404, 302]
    assert client_for(alice).post(f"/adapters/{version.pk}/conversions/conv_unknown/cancel").status_code == 404
    Conversion.objects.update(status="running")
    page = text(client_for(alice).get(url))
    assert "Creating…" in page and stop not in page
    assert "Only a waiting conversion can be cancelled" in text(member.post(stop, follow=True))
    settle_hold(hold_id=conversion.hold_id, capture_nano=conversion.price_nano, by="system", reason="merged_16bit")
    why = text(client_for(alice).get(f"/why/{conversion.hold_id}"))
    assert "per GB (1e9 bytes)" in why and "1 model converted" in text(client_for(alice).get("/usage"))


@pytest.mark.slow
def test_an_order_is_cancelled_on_the_page_of_its_model(version, organization, client_for, bob):
    set_price(sku="conversion:bytes", unit="bytes", price_nano=10**10, per=10**9, by="user_1", now=db_now())
    offer = next(each for each in list_offers(version=version) if each.kind == "merged_16bit")
    browser, before = client_for(bob), get_balance(organization=organization)
    browser.post(f"/adapters/{version.pk}/convert", {"kind": "merged_16bit", "price_nano": offer.price_nano})

    stop = f"/adapters/{version.pk}/conversions/{Conversion.objects.get().pk}/cancel"
    pages = [text(browser.post(stop, follow=True)) for _ in range(2)]

    assert all("The order is cancelled. You pay nothing." in page for page in pages)
    assert 'name="price_nano"' in pages[0], "it can be ordered again"
    assert get_balance(organization=organization) == before
