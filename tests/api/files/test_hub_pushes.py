"""Models pushed to the customer's own repository on a hub, with a token that is used once and then erased."""

import datetime
import hashlib
import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
from huggingface_hub.utils import _http

from apps.accounts.models import Organization
from apps.accounts.roles import SCOPES
from apps.adapters.operations import delete_version
from apps.catalog import hub_uploads
from apps.core.database.clock import db_now
from apps.core.errors import Unavailable
from apps.core.models import AuditEntry, OutboxMessage
from apps.core.objects.store import store
from apps.finetuning.models import HubPush, HubPushToken
from apps.finetuning.results import hub_pushes
from tests.factories.accounts import make_key, make_member
from tests.factories.finetuning import adapter_files
from tests.twins.hub import Fault, Hub, serve_hub

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # the library's own call
TOKEN, REPOSITORY = "hf_token-of-a-customer", "acme/support"


@pytest.fixture
def hub(settings, monkeypatch) -> Iterator[Hub]:
    monkeypatch.setattr(_http.time, "sleep", lambda _: None)  # the library waits for seconds before it repeats
    with serve_hub() as running:
        running.commits.writers = {TOKEN: {"acme"}}
        settings.HUB_URL, settings.HUB_PUSHES = running.url, True
        settings.HUB_BLOB_HOSTS = (running.blob_url.removeprefix("http://"),)
        yield running


@pytest.fixture
def push(api_client, key, version):
    """Return a function that requests a push."""

    def make(**given):
        body = {"repository": REPOSITORY, "token": TOKEN} | given
        return api_client(key).post(f"/api/v1/models/{version.model_name}/pushes", body, format="json")

    return make


def latest() -> HubPush:
    return HubPush.objects.latest("created_at")


def kept() -> bool:
    """Return whether any token is stored."""
    return HubPushToken.objects.exists()


@pytest.mark.slow
def test_a_model_is_pushed_with_its_card_and_the_token_is_erased(hub, push, version, floor, api_client, key, caplog):
    caplog.set_level(logging.DEBUG)
    accepted = push()

    assert accepted.status_code == 200 and TOKEN not in accepted.text, accepted.text
    assert push().json()["id"] == accepted.json()["id"], "it is pushed once"
    assert TOKEN.encode() not in bytes(HubPushToken.objects.get().token_sealed)
    message = OutboxMessage.objects.get(topic="hub.push")
    assert message.lane == "hub-uploads" and TOKEN not in str(message.payload)
    hub_pushes.send(push_id=latest().pk)

    sent = hub.repositories[REPOSITORY].files
    expected = {name: hashlib.sha256(content).hexdigest() for name, content in adapter_files(floor.base_model).items()}
    assert {name: hashlib.sha256(sent[name]).hexdigest() for name in expected} == expected
    assert {"README.md", "reproducibility.json"} <= set(sent) and hub.commits.private == {REPOSITORY}
    listed = api_client(key).get(f"/api/v1/models/{version.model_name}/pushes?limit=1").json()["data"]
    assert [(each["status"], each["commit"]) for each in listed] == [
        ("succeeded", hub.repositories[REPOSITORY].head)
    ]  # fmt: skip
    assert not kept() and hub.blob_bearers == set(), "the token goes to the hub alone"
    assert TOKEN not in caplog.text
    assert TOKEN not in str(list(AuditEntry.objects.values())) + str(list(OutboxMessage.objects.values()))
    puts = [each for each in hub.requests if each.startswith("PUT")]
    push()
    hub_pushes.send(push_id=latest().pk)
    assert latest().status == "succeeded" and [each for each in hub.requests if each.startswith("PUT")] == puts
    hub_pushes.send(push_id=latest().pk)


@pytest.mark.slow
def test_what_a_killed_process_left_on_the_disk_is_deleted_by_a_later_push(hub, push, monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left, others = (tmp_path / f"anneal-push-{name}" for name in ("killed", "sending"))
    for folder in (left, others):
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"weights")
    os.utime(left, (0, 0))

    push()
    hub_pushes.send(push_id=latest().pk)

    assert latest().status == "succeeded" and list(tmp_path.iterdir()) == [others]


@pytest.mark.slow
def test_a_large_push_waits_in_a_queue_of_its_own(hub, push, settings, monkeypatch):
    monkeypatch.setattr(hub_pushes, "SMALL_BYTES", 10)
    push()

    message = OutboxMessage.objects.get(topic="hub.push_large")
    assert message.lane == "hub-large"
    assert settings.OUTBOX_MOST_AT_ONCE[message.lane] == 2, "of the three places of its workers"
    hub_pushes.send(**message.payload)
    assert latest().status == "succeeded"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (Fault("refused", "/api/repos/create", times=9), "does not accept this token"),
        (Fault("refused", "/commit/main"), "does not accept this token"),
        (Fault("forbidden", "/preupload/"), "may not write to acme/support"),
        (Fault("forbidden", "/objects/batch"), "may not write to acme/support"),
    ],
)
def test_a_token_that_may_not_write_ends_the_push(fault, words, hub, push):
    hub.faults = [fault]
    push()

    hub_pushes.send(push_id=latest().pk)

    assert latest().status == "failed" and words in latest().problem and not kept()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (Fault("conflict", "/commit/main"), "changed while the files were sent"),
        (Fault("limited", "/preupload/"), "limits our requests"),
        (Fault("down", "/uploads/", times=6), "did not take the files"),
        (Fault("forbidden", "/uploads/"), ""),
    ],
)
def test_what_may_pass_is_tried_again_and_sends_only_what_is_missing(fault, words, hub, push):
    hub.faults = [fault]
    push()
    if not words:  # the store refuses one file: to us it is like a token that may not write
        hub_pushes.send(push_id=latest().pk)
        assert latest().status == "failed"
        return

    with pytest.raises(Unavailable, match=words):
        hub_pushes.send(push_id=latest().pk)
    assert (latest().status, words in latest().problem) == ("waiting", True) and kept()
    hub_pushes.send(push_id=latest().pk)

    assert (latest().status, latest().attempts, latest().problem) == ("succeeded", 2, "")


@pytest.mark.slow
def test_files_of_a_suspended_organization_are_not_sent(hub, push, organization):
    push()
    Organization.objects.filter(pk=organization.pk).update(suspended_at=db_now())

    hub_pushes.send(push_id=latest().pk)

    assert (latest().status, kept(), hub.repositories.get(REPOSITORY)) == ("failed", False, None)
    assert latest().problem == "Your organization is suspended."


@pytest.mark.slow
@pytest.mark.parametrize("is_refused", [False, True])
def test_a_push_that_ends_as_overdue_while_its_files_are_sent_stays_ended(is_refused, hub, push, monkeypatch):
    def slow(**_: object) -> str:
        assert hub_pushes.end_overdue(now=db_now() + datetime.timedelta(days=2)) == 1
        if is_refused:
            raise Unavailable("The hub is down.")
        return "0" * 40

    monkeypatch.setattr(hub_uploads, "push_folder", slow)
    push()

    with pytest.raises(Unavailable) if is_refused else nullcontext():
        hub_pushes.send(push_id=latest().pk)

    assert (latest().status, latest().commit, kept()) == ("failed", "", False) and "within a day" in latest().problem
    assert AuditEntry.objects.filter(action__startswith="adapter.push_", target=latest().version_id).count() == 2


@pytest.mark.slow
def test_a_hub_that_stays_down_or_a_killed_process_ends_the_push(hub, push):
    hub.is_down = True
    push()
    for _ in range(2):
        with pytest.raises(Unavailable):
            hub_pushes.send(push_id=latest().pk)
    hub_pushes.send(push_id=latest().pk)
    assert latest().status == "failed" and not kept()

    hub.is_down = False
    push()
    HubPush.objects.filter(pk=latest().pk).update(status="running", attempts=hub_pushes.MAX_ATTEMPTS)
    hub_pushes.send(push_id=latest().pk)
    assert "interrupted" in latest().problem
    push()
    assert hub_pushes.end_overdue(now=db_now() + datetime.timedelta(hours=23)) == 0
    assert hub_pushes.end_overdue(now=db_now() + datetime.timedelta(hours=25)) == 1
    assert not kept()


@pytest.mark.slow
def test_files_and_tokens_go_to_known_hosts_only(hub, push, settings, version):
    settings.HUB_BLOB_HOSTS = ()
    push()
    with pytest.raises(Unavailable, match="HF_BLOB_HOSTS"):
        hub_pushes.send(push_id=latest().pk)
    assert not any(each.startswith("PUT") for each in hub.requests)
    delete_version(version=version, by="user_1", now=db_now())
    hub_pushes.send(push_id=latest().pk)
    assert "deleted" in latest().problem


@pytest.mark.slow
def test_a_damaged_or_missing_file_is_not_pushed(hub, push, version):
    push()
    key = f"{version.object_prefix}/adapter_config.json"
    store().delete(key)
    hub_pushes.send(push_id=latest().pk)
    assert latest().status == "failed" and "cannot be read" in latest().problem
    store().put_stream(key, [b"{}"])
    push()
    with pytest.raises(Unavailable, match="cannot be read"):
        hub_pushes.send(push_id=latest().pk)
    assert REPOSITORY not in hub.repositories


@pytest.mark.slow
def test_what_cannot_be_pushed_is_refused(hub, push, settings, monkeypatch):
    def refusal(**given) -> tuple[int, str, str | None]:
        answer = push(**given)
        assert TOKEN not in answer.text
        return answer.status_code, answer.json()["error"]["code"], answer.json()["error"]["param"]

    assert refusal(repository="support") == (400, "invalid_value", "repository")
    assert refusal(repository="http://elsewhere/x") == (400, "invalid_value", "repository")
    assert refusal(token="with a space") == (400, "invalid_value", "token")
    assert refusal(export="gguf") == (400, "invalid_value", "export")
    monkeypatch.setattr(hub_pushes, "MAX_BYTES", 10)
    assert refusal() == (429, "insufficient_quota", "export")
    monkeypatch.undo()
    monkeypatch.setattr(hub_pushes, "MAX_OPEN", 1)
    assert push().status_code == 200
    assert refusal(repository="acme/other")[:2] == (429, "rate_limit_exceeded")
    monkeypatch.setattr(hub_pushes, "MAX_A_DAY", 1)
    assert refusal(repository="acme/other")[:2] == (429, "rate_limit_exceeded")
    settings.HUB_PUSHES = False
    assert refusal()[:2] == (400, "push_unavailable")


@pytest.mark.slow
def test_who_may_push(hub, api_client, key, version, organization, rival, charlie):
    url = f"/api/v1/models/{version.model_name}/pushes"
    member = make_key(organization, make_member(organization, "member"), scopes=frozenset({"view", "adapter.write"}))
    viewer = make_key(organization, make_member(organization, "viewer"), scopes=frozenset({"view"}))
    outsider = make_key(rival, charlie, scopes=frozenset(SCOPES))
    body = {"repository": REPOSITORY, "token": TOKEN}

    def both(client) -> tuple[int, int]:
        return client.get(url).status_code, client.post(url, body, format="json").status_code

    assert both(api_client(outsider)) == (404, 404)
    assert both(api_client(viewer)) == (200, 403)
    assert both(api_client(None)) == (401, 401)
    assert not HubPush.objects.exists()
    assert both(api_client(member)) == both(api_client(key)) == (200, 200)
