"""The worker of batches with a gateway that is scripted: limits, fairness, and errors of one batch."""

import datetime
import io
import json
import os
import socket
import threading
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import pytest
from botocore.response import StreamingBody

from apps.accounts.login.key_operations import issue_key
from apps.accounts.members.projects import create_project
from apps.accounts.models import Organization, default_project_id
from apps.accounts.queries import find_key
from apps.batches import files, gateway, operations, validation, worker
from apps.batches.gateway import GatewayReply
from apps.batches.models import Batch, BatchFile, BatchRequest
from apps.batches.operations import create_batch
from apps.core.database.clock import db_now
from apps.core.errors import QuotaExceeded
from apps.core.objects.store import DirectoryStore, object_key, read_object, store
from tests.factories.accounts import make_organization

pytestmark = pytest.mark.django_db
CHAT = "/v1/chat/completions"
_SECRET_OF = worker._Worker._secret_of
DONE = GatewayReply(status=200, body=b'{"usage":{"prompt_tokens":1,"completion_tokens":1}}')


@pytest.fixture(autouse=True)
def replies(monkeypatch: pytest.MonkeyPatch) -> dict[str, GatewayReply | Exception]:
    """The gateway's replies by organization; DONE unless set."""
    replies: dict[str, GatewayReply | Exception] = {}

    def ask(*, request: BatchRequest, **_: object) -> GatewayReply:
        reply = replies.get(request.organization_id, DONE)
        if isinstance(reply, Exception):
            raise reply
        return reply

    monkeypatch.setattr(worker, "ask", ask)
    monkeypatch.setattr(worker._Worker, "_secret_of", lambda self, batch: "secret")
    return replies


def make_batch(
    organization: Organization, lines: int = 1, content: bytes | None = None, *, by: str = "user_x"
) -> Batch:
    body = {"model": "m", "messages": []}
    rows = [{"custom_id": f"r{number}", "method": "POST", "url": CHAT, "body": body} for number in range(lines)]
    chunks = [content if content is not None else b"".join(json.dumps(row).encode() + b"\n" for row in rows)]
    made = {"organization": organization, "by": by, "now": db_now()}
    file = files.create_file(filename="asks.jsonl", chunks=chunks, **made)
    return create_batch(input_file_id=file.pk, endpoint=CHAT, **made)


def work(batch: Batch) -> Batch:
    worker.work(seconds=20)
    batch.refresh_from_db()
    return batch


def errors_of(batch: Batch) -> set[str]:
    assert batch.error_file is not None
    return {json.loads(row)["error"]["code"] for row in read_object(batch.error_file.object_key).splitlines()}


def test_a_file_in_a_bucket_is_read_in_large_pieces(organization, monkeypatch):
    class Raw(io.RawIOBase):
        reads = 0

        def readable(self) -> bool:
            return True

        def readinto(self, into) -> int:
            self.reads += 1
            return content.readinto(into)

    batch = make_batch(organization, lines=500)
    content = io.BytesIO(read_object(batch.input_file.object_key))
    raw = Raw()
    body = StreamingBody(raw, batch.input_file.bytes)
    monkeypatch.setattr(validation, "store", lambda: SimpleNamespace(open_stream=lambda key: body))

    validation.validate(batch=batch, now=db_now())

    assert (batch.status, batch.total) == ("in_progress", 500)
    assert raw.reads < 5


def test_blank_lines_are_bounded_too(organization, monkeypatch):
    monkeypatch.setattr(validation, "MAX_LINES", 10)
    batch = work(make_batch(organization, content=b"\n" * 1000))

    assert [(error["line"], error["code"]) for error in batch.errors] == [(11, "too_many_requests")]


def test_a_batch_that_expired_is_not_validated(organization):
    batch = make_batch(organization, content=b"{")
    Batch.objects.update(expires_at=db_now())

    assert work(batch).status == "expired"


def test_one_file_is_validated_in_each_turn(organization, monkeypatch):
    batches = [make_batch(organization), make_batch(make_organization("Other"))]
    turns: list[str] = []
    current, validate = worker._Worker._current_batches, worker.validate
    monkeypatch.setattr(worker._Worker, "_current_batches", lambda self: turns.append("turn") or current(self))
    monkeypatch.setattr(worker, "validate", lambda **named: turns.append("validate") or validate(**named))

    assert [work(batch).status for batch in batches] == ["completed", "completed"]
    assert turns[:4] == ["turn", "validate", "turn", "validate"]


@pytest.mark.slow
def test_a_batch_that_is_cancelled_or_has_a_bad_line_does_not_wait_for_the_batch_before_it(organization, replies):
    first, cancelled, bad = make_batch(organization), make_batch(organization), make_batch(organization, content=b"{")
    operations.cancel_batch(batch=cancelled, by="user_x", now=db_now())
    replies[organization.pk] = GatewayReply(status=0, body=b"")  # the first one's request waits

    worker.work(seconds=0.5)

    for batch in (first, cancelled, bad):
        batch.refresh_from_db()
    assert [first.status, cancelled.status, bad.status] == ["in_progress", "cancelled", "failed"]
    assert [error["line"] for error in bad.errors] == [1]


def test_organizations_that_share_their_limits_take_turns_as_one(organization, charlie, monkeypatch):
    shared = [make_organization(f"Shared {number}", owner=charlie) for number in range(3)]
    batches = [make_batch(each, lines=6) for each in (*shared, organization)]
    one = worker._Worker(0)

    assert {batch.pk for batch in one._current_batches()} == {batches[0].pk, batches[3].pk}
    for each in shared[:2]:
        for _ in range(2):
            one._open[Future()] = BatchRequest(organization_id=each.pk)
    one._holders |= {each.pk: charlie.pk for each in shared}
    assert (one._room_of(shared[2].pk), one._room_of(organization.pk)) == (0, worker.MAX_IN_FLIGHT_OF_ORGANIZATION)


def test_errors_of_one_batch_leave_the_others_alone_and_end_it_at_last(organization, replies):
    faulty, other = make_batch(organization, lines=6), make_batch(make_organization("Other"), lines=6)
    replies[organization.pk] = RuntimeError("boom")

    assert (work(other).status, other.completed) == ("completed", 6)
    faulty.refresh_from_db()
    assert (faulty.status, faulty.faults) == ("in_progress", 1)
    assert faulty.retry_at > db_now()

    Batch.objects.update(retry_at=None, faults=worker.MAX_FAULTS - 1)
    assert work(faulty).status == "completed"
    assert errors_of(faulty) == {"internal_error"}


def test_a_batch_that_cannot_end_fails(organization, monkeypatch):
    def fail(**_: object) -> None:
        raise OSError("no room on the disk")

    batch = make_batch(organization)
    monkeypatch.setattr(worker, "finish", fail)
    assert (work(batch).status, batch.faults) == ("finalizing", 1)

    Batch.objects.update(retry_at=None, faults=worker.MAX_FAULTS - 1)
    assert (work(batch).status, batch.errors[0]["code"]) == ("failed", "internal_error")
    assert not BatchRequest.objects.exists()


def test_requests_are_sent_in_the_project_of_the_batchs_key(organization, alice):
    project = create_project(organization=organization, name="Search", is_private=True, by=alice, now=db_now())
    made = issue_key(
        organization=organization, name="k", scopes=frozenset({"inference"}), by=alice, expires_at=None, now=db_now(),
        project_id=project.pk,
    )  # fmt: skip
    found = []
    for creator in (made.key.pk, alice.pk):
        batch = make_batch(organization, by=creator)
        identity = find_key(secret=str(_SECRET_OF(worker._Worker(0), batch)))
        assert identity is not None
        found.append(identity.project_id)
    assert found == [project.pk, default_project_id(organization)]


def test_an_answer_that_takes_too_long_is_not_asked_for_again(organization, replies):
    body = b'{"error": {"code": "%b", "message": "It took too long."}}' % gateway.TOO_SLOW_CODE.encode()
    replies[organization.pk] = GatewayReply(status=504, body=body)

    batch = work(make_batch(organization))

    assert batch.status == "completed" and batch.error_file is not None
    rows = read_object(batch.error_file.object_key).splitlines()
    assert {json.loads(row)["response"]["body"]["error"]["code"] for row in rows} == {gateway.TOO_SLOW_CODE}


@pytest.mark.slow
def test_an_expired_batch_that_cannot_end_fails_too(organization, replies, monkeypatch):
    def fail(**_: object) -> None:
        raise OSError("no room on the disk")

    batch = make_batch(organization)
    replies[organization.pk] = GatewayReply(status=0, body=b"")
    worker.work(seconds=0.5)  # the batch is in progress, and its request waits
    Batch.objects.update(expires_at=db_now() - datetime.timedelta(seconds=1), faults=worker.MAX_FAULTS - 1)
    monkeypatch.setattr(worker, "finish", fail)
    assert work(batch).status == "finalizing"

    Batch.objects.update(retry_at=None, faults=worker.MAX_FAULTS - 1)
    assert work(batch).status == "failed"


@pytest.mark.parametrize("left", [None, 150])
def test_a_batch_stops_when_its_answers_are_too_large(organization, monkeypatch, left):
    monkeypatch.setattr(worker, "MAX_RESULT_BYTES", 150 if left is None else 1024)
    monkeypatch.setattr(worker, "storage_left", lambda organization: left)
    batch = work(make_batch(organization, lines=30))

    assert (batch.status, errors_of(batch)) == ("completed", {"output_too_large"})
    assert 1 <= batch.completed < 10


def test_slow_organizations_leave_places_for_newcomers():
    one = worker._Worker(0)
    for number in range(40):
        name = f"org{number % 3 if number < 12 else number}"
        if one._room_of(name) > 0:
            one._open[Future()] = BatchRequest(organization_id=name)
        if number == 11:
            assert (len(one._open), one._room_of("org0"), one._room_of("new")) == (12, 0, 1)
    assert len(one._open) == worker.MAX_IN_FLIGHT


@pytest.mark.parametrize(("sent", "status"), [(b"", 504), (b"HTTP/1.1 200 OK\r\n\r\n" + b"1" * 99, 400), (None, 0)])
def test_a_slow_gateway_a_long_answer_and_no_gateway_are_told_apart(
    organization, monkeypatch, settings, tmp_path: Path, sent, status
):
    settings.GATEWAY_URL = f"unix://{tmp_path}/gateway.sock"
    monkeypatch.setattr(gateway, "ANSWER_SECONDS", 0.2 if sent == b"" else 20.0)
    monkeypatch.setattr(gateway, "_MAX_ANSWER_BYTES", 50)
    batch = make_batch(organization)
    validation.validate(batch=batch, now=db_now())
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    ended = threading.Event()

    def answer() -> None:
        connection, _ = listener.accept()
        connection.recv(65536)
        connection.sendall(sent)
        ended.wait(5)
        connection.close()

    if sent is not None:
        listener.bind(f"{tmp_path}/gateway.sock")
        listener.listen()
        threading.Thread(target=answer, daemon=True).start()

    request = BatchRequest.objects.get()
    with listener:
        key = batch.input_file.object_key
        reply = gateway.ask(request=request, endpoint=CHAT, input_key=key, secret="secret", key_id="")
        ended.set()

    assert reply.status == status


@pytest.mark.slow
def test_batches_are_bounded_in_an_hour_and_need_storage(organization, monkeypatch):
    monkeypatch.setattr(operations, "MAX_IN_AN_HOUR", 2)
    for _ in range(2):
        operations.cancel_batch(batch=make_batch(organization), by="user_x", now=db_now())
    with pytest.raises(QuotaExceeded, match="2 batches within an hour"):
        make_batch(organization)
    Batch.objects.update(created_at=db_now() - datetime.timedelta(hours=1))
    make_batch(organization)
    monkeypatch.setattr(operations, "storage_left", lambda organization: 0)
    with pytest.raises(QuotaExceeded, match="storage is full"):
        make_batch(organization)


def test_organizations_that_share_begin_as_many_batches_as_one(organization, charlie, monkeypatch):
    monkeypatch.setattr(operations, "MAX_ACTIVE", 2)
    shared = [make_organization(f"Shared {number}", owner=charlie) for number in range(3)]
    for each in (*shared[:2], organization):
        make_batch(each)

    with pytest.raises(QuotaExceeded, match="2 batches that have not ended"):
        make_batch(shared[2])


def test_files_without_a_row_are_deleted_after_a_day(organization, settings, tmp_path):
    settings.OBJECT_STORE = f"file://{tmp_path}/objects"
    directory = store()
    assert isinstance(directory, DirectoryStore)
    ended, active = work(make_batch(organization)), make_batch(organization)
    orphans = [object_key(organization.pk, "batches", name, "lines.jsonl") for name in ("file-gone", "batch_gone")]
    written = object_key(organization.pk, "batches", active.pk, "output.jsonl")
    for key in (*orphans, written):
        directory.put_stream(key, [b"x"])
    assert files.sweep_orphans(now=db_now()) == 0

    for path in (directory.root / "org" / organization.pk).rglob("*"):
        os.utime(path, (1, 1))
    assert files.sweep_orphans(now=db_now()) == 2

    left = {key for key, _ in directory.list_objects(f"org/{organization.pk}")}
    kept = BatchFile.objects.filter(pk__in=[ended.input_file_id, ended.output_file_id, active.input_file_id])
    assert left == {written, *kept.values_list("object_key", flat=True)}
