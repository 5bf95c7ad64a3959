"""The pages of batches: what they show, the files they offer, and who may cancel."""

import pytest

from apps.accounts.models import OrganizationEvent
from apps.batches.endings import finish
from apps.batches.lifecycle import BatchStatus, RequestStatus
from apps.batches.models import Batch, BatchRequest
from apps.batches.validation import validate
from apps.core.database.clock import db_now
from tests.factories.batches import make_batch, make_line
from tests.support.pages import text


@pytest.mark.slow
def test_a_batch_is_followed_to_its_files_and_its_end_is_one_event(
    organization, alice, vera, charlie, rival, client_for
):
    batch = make_batch(organization, alice, [make_line("a"), make_line("b")])
    client = client_for(vera)
    validate(batch=batch, now=db_now())
    page = client.get(f"/batches/{batch.pk}").content.decode()
    assert f'hx-get="/batches/{batch.pk}"' in page and "/batches/cancel" not in page
    assert "<html" not in client.get(f"/batches/{batch.pk}", HTTP_HX_REQUEST="true").content.decode()
    BatchRequest.objects.filter(line=1).update(status=RequestStatus.COMPLETED, result="{}")
    Batch.objects.update(status=BatchStatus.FINALIZING, completed=1, failed=1, input_tokens=7)
    batch.refresh_from_db()

    finish(batch=batch, to=BatchStatus.COMPLETED, now=db_now())
    finish(batch=Batch.objects.get(), to=BatchStatus.COMPLETED, now=db_now())

    event = OrganizationEvent.objects.get()
    assert (event.type, event.subject, event.path) == ("batch.completed", batch.pk, f"/batches/{batch.pk}")
    batch = Batch.objects.get()
    ended = client.get(event.path).content.decode()
    assert "hx-get" not in ended.partition('id="batch-state"')[2].partition(">")[0] and "triage" in ended
    for file in (batch.input_file, batch.output_file, batch.error_file):
        assert f"/batches/files/{file.pk}" in ended
        saved = client.get(client.get(f"/batches/files/{file.pk}").url)
        assert len(b"".join(saved.streaming_content)) == file.bytes
        assert client_for(charlie).get(f"/batches/files/{file.pk}").status_code == 404
    listed = text(client.get("/batches?status=completed&q=asks"))
    assert "asks.jsonl" in listed and "1 of 2" in listed
    assert "asks.jsonl" not in text(client.get("/batches?status=failed"))
    assert b"".join(client.get("/batches/export")).splitlines()[1].startswith(batch.pk.encode())
    assert "asks.jsonl" not in text(client_for(charlie).get("/batches"))


def test_bad_lines_are_named_and_their_batch_has_failed_once(organization, alice, vera, client_for):
    batch = make_batch(organization, alice, [make_line("a"), make_line("b", method="GET")])
    for _ in range(2):
        validate(batch=batch, now=db_now())

    page = text(client_for(vera).get(f"/batches/{batch.pk}"))

    assert "The method must be POST." in page and "Line 2" in page
    assert OrganizationEvent.objects.get().type == "batch.failed"


@pytest.mark.slow
def test_a_member_cancels_a_batch_after_its_name_was_typed(organization, alice, bob, vera, client_for):
    batch, sent = make_batch(organization, alice, [make_line("a")]), {"confirm": "asks.jsonl"}
    assert client_for(vera).post("/batches/cancel", sent | {"batch": batch.pk}).status_code == 403
    client = client_for(bob)
    assert f"/batches/cancel?batch={batch.pk}" in text(client.get(f"/batches/{batch.pk}"))
    assert client.post("/batches/cancel", {"batch": batch.pk}).status_code == 422

    assert client.post("/batches/cancel", sent | {"batch": batch.pk}).url == f"/batches/{batch.pk}"

    assert Batch.objects.get().status == BatchStatus.CANCELLING
    assert "/batches/cancel?batch" not in text(client.get(f"/batches/{batch.pk}"))


def test_the_list_shows_members_how_to_begin(organization, bob, vera, client_for):
    page = text(client_for(bob).get("/batches"))
    assert "client.batches.create(" in page and "purpose=batch" in page
    assert "client.batches.create(" not in text(client_for(vera).get("/batches"))
