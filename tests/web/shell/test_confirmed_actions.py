"""Actions on several rows: the page says what will happen, the name is typed, and each refusal has its reason."""

import re
from urllib.parse import urlencode

import pytest

from apps.accounts.models import ApiKey, Membership, WebhookEndpoint
from apps.accounts.notices.endpoints import create_endpoint
from apps.core.database.clock import db_now
from apps.core.http.confirmation import MAX_ROWS
from apps.datasets.models import Dataset, DatasetVersion
from apps.finetuning.models import FineTuningJob
from apps.playground.conversations import keep_conversation
from apps.playground.models import Preset, SavedConversation
from apps.playground.presets import save_preset
from apps.playground.transcripts import PlaySettings, PlayTurn, Transcript
from apps.serving.aliases import point_alias
from tests.factories.accounts import make_key
from tests.factories.datasets import make_ready_version
from tests.factories.serving import load, make_adapter, make_replica
from tests.support.pages import text

pytestmark = pytest.mark.django_db


@pytest.mark.slow
def test_pausing_a_webhook_is_undone_to_the_state_before_it(organization, client_for, alice) -> None:
    types = ["fine_tuning.job.failed"]
    endpoint, _ = create_endpoint(
        organization=organization, url="https://hooks.example.com/in", event_types=types, format="standard", by=alice.pk
    )
    address, browser = f"/organization/webhooks/{endpoint.pk}/pause", client_for(alice)

    for fields, is_paused in (({}, True), ({}, True), ({"off": "1"}, False), ({"off": "1"}, False)):
        page = browser.post(address, fields, follow=True).content.decode()
        endpoint.refresh_from_db()
        assert (endpoint.paused_at is not None, "Undo" in page) == (is_paused, True)

    WebhookEndpoint.objects.filter(pk=endpoint.pk).update(disabled_because="Gone")
    assert "Undo" not in browser.post(address, {"off": "1"}, follow=True).content.decode()


@pytest.mark.slow
def test_what_ends_a_canary_or_rolls_an_alias_back_is_undone(version, floor, client_for, alice) -> None:
    replica, browser = make_replica(floor.base_model, "unix:///nowhere"), client_for(alice)
    load(version, replica)
    newer = make_adapter(version.organization, floor.base_model)
    newer.adapter, newer.number = version.adapter, 2
    newer.save()
    for each, percent in ((version, 0), (newer, 20)):
        alias = point_alias(version=each, name="live", canary_percent=percent, by=alice.pk, now=db_now())

    def roll_back() -> tuple[str, str | None, int]:
        """Roll the alias back, and undo it; return what stands after the undo."""
        page = browser.post(f"/aliases/{alias.pk}/rollback", follow=True).content.decode()
        form = page[: page.rindex("Undo</button>")].rpartition("<form")[2]
        undo = re.search(r'action="([^"]+)"', form)[1]
        browser.post(undo, dict(re.findall(r'name="(name|canary_percent)"\s+value="([^"]*)"', form)))
        alias.refresh_from_db()
        return alias.version_id, alias.canary_version_id, alias.canary_percent

    assert roll_back() == (version.pk, newer.pk, 20)
    point_alias(version=newer, name="live", by=alice.pk, now=db_now())
    assert roll_back() == (newer.pk, None, 0)


def test_a_conversation_is_deleted_after_a_question_and_a_preset_after_its_name(floor, organization, client_for, bob):
    browser, membership = client_for(bob), Membership.objects.get(user=bob)
    transcript = Transcript(columns=[[PlayTurn(role="user", content="My card is lost")]])
    kept = keep_conversation(membership=membership, transcript=transcript, now=db_now())
    preset = save_preset(membership=membership, name="Terse", is_shared=True, settings=PlaySettings(), now=db_now())
    page = text(browser.get("/playground/saved"))
    actions = {f"/playground/saved/delete?conversation={kept.pk}": "Delete My card is lost?",
               f"/playground/presets/delete?preset={preset.pk}": "All members of Acme lose it."}  # fmt: skip
    for address, words in actions.items():
        assert f'href="{address}"' in page and words in text(browser.get(address))
    assert "to confirm" not in text(browser.get(next(iter(actions))))

    browser.post("/playground/saved/delete", {"conversation": kept.pk})
    assert browser.post("/playground/presets/delete", {"preset": preset.pk}).status_code == 422
    assert not SavedConversation.objects.exists() and Preset.objects.exists()


@pytest.mark.slow
def test_jobs_are_cancelled_together_and_the_ones_that_ended_are_refused(floor, claim, client_for, bob, vera) -> None:
    done = floor.job(suffix="triage")
    claim().succeed(floor.base_model)
    queued = floor.job(suffix="refunds")
    client, jobs = client_for(bob), [done.pk, queued.pk]
    page = text(client.get("/jobs/cancel", {"job": jobs}))

    assert "Cancel 2 fine-tunes?" in page
    assert "It already ended (Succeeded). Nothing changes." in page and "It leaves the queue. You pay nothing" in page
    assert client_for(vera).post("/jobs/cancel", {"job": jobs, "confirm": "2 fine-tunes"}).status_code == 403
    assert client.post("/jobs/cancel", {"job": jobs, "confirm": "yes"}).status_code == 422
    assert FineTuningJob.objects.get(pk=queued.pk).status == "queued"

    answer = client.post("/jobs/cancel", {"job": jobs, "confirm": "2 fine-tunes"})

    assert answer.headers["Location"] == f"/jobs/cancel?job={done.pk}"  # to reload it repeats nothing
    after = text(client.get(answer.headers["Location"]))
    assert "Cancelling refunds." in after and "it has ended as succeeded" in after
    assert "to confirm" not in after
    assert FineTuningJob.objects.get(pk=queued.pk).status == "cancelled"


@pytest.mark.slow
def test_datasets_are_deleted_with_all_their_versions_or_stay_whole(floor, organization, client_for, bob) -> None:
    used = floor.job().training_file
    make_ready_version(organization, dataset_name=used.dataset.name)
    free = make_ready_version(organization, dataset_name="cards")
    make_ready_version(organization, dataset_name="cards")
    client, datasets = client_for(bob), [used.dataset_id, free.dataset_id]
    assert "Its 2 versions are deleted" in text(client.get("/datasets/delete", {"dataset": datasets}))

    after = client.post("/datasets/delete", {"dataset": datasets, "confirm": "2 datasets"}, follow=True)

    assert "still uses this file" in text(after)
    assert list(Dataset.objects.filter(deleted_at=None)) == [used.dataset]
    assert DatasetVersion.objects.filter(dataset=used.dataset, deleted_at=None).count() == 2


def test_a_member_revokes_their_own_keys_and_reads_why_others_stay(organization, client_for, alice, bob) -> None:
    mine, other = make_key(organization, bob, scopes=frozenset({"view"})).key, make_key(organization, alice).key

    after = client_for(bob).post("/keys/revoke", {"key": [mine.pk, other.pk], "confirm": "2 API keys"}, follow=True)

    assert "Only an owner or admin may revoke" in text(after)
    assert list(ApiKey.objects.filter(revoked_at=None)) == [other]


def test_at_most_a_hundred_rows_are_taken_and_at_least_one(organization, client_for, bob) -> None:
    client = client_for(bob)

    for keys in ([], [f"key_{number}" for number in range(MAX_ROWS + 1)]):
        answer = client.get(f"/keys/revoke?{urlencode({'key': keys}, doseq=True)}", follow=True)
        assert answer.redirect_chain == [("/keys", 302)]
        assert "Choose between 1 and 100 API keys" in text(answer)
    assert client.get("/keys/revoke?key=key_1").status_code == 404


def test_a_member_is_removed_after_the_name_and_only_by_a_role_that_may(organization, client_for, alice, bob) -> None:
    owner = Membership.objects.get(user=alice)
    member = Membership.objects.get(user=bob)

    refused = client_for(bob).post("/members/remove", {"member": owner.pk, "confirm": str(alice)}, follow=True)
    assert "does not allow managing members" in text(refused)
    assert client_for(alice).post("/members/remove", {"member": member.pk}).status_code == 422
    client_for(alice).post("/members/remove", {"member": member.pk, "confirm": str(bob)})
    assert list(Membership.objects.filter(organization=organization)) == [owner]
