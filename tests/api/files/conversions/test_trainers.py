"""Trainers make conversions when they are idle: under a lease, in turn, and for nothing if nothing comes of it."""

import datetime
import hashlib
import itertools

import msgspec
import pytest
from django.db.models import F

from apps.accounts.models import Organization, OrganizationEvent
from apps.adapters.models import AdapterVersion
from apps.billing.queries import get_balance, get_ledger_sum_nano
from apps.contracts.worker_api import ConversionClaim, ConversionReport, UploadRequest
from apps.core.database.clock import db_now
from apps.core.models import OutboxMessage
from apps.finetuning.conversions import demand, leases
from apps.finetuning.conversions.leases import release_overdue
from apps.finetuning.conversions.leases import take as take_as
from apps.finetuning.models import Conversion, Worker
from apps.finetuning.quotes.delivery import CONVERTER
from tests.factories.accounts import make_organization
from tests.factories.finetuning import make_worker, manifest_of, model_files
from tests.support.api.conversions import finish, stored, take


@pytest.mark.slow
def test_what_makes_nothing_costs_nothing(shop, call, version, organization):
    before = get_balance(organization=organization)
    shop("gguf")
    broken = model_files() | {"model.safetensors": b"no tensors"}
    outcomes = []
    for files, leave_out in ((model_files(), "config.json"), (broken, "")):
        taken = take(call)
        digest = stored(call, taken, files, leave_out=leave_out)
        outcomes.append(finish(call, taken, manifest_sha256=digest))
        if leave_out:  # the worker learns that its files are not there, and says so
            outcomes.append(finish(call, taken, problem="The trainer could not store what it made."))
            assert shop()["gguf"]["status"] == "waiting"

    assert outcomes == [400, 204, 204]
    failed = shop()["gguf"]
    assert failed["status"] == "failed" and "no safetensors file" in failed["problem"]
    assert get_balance(organization=organization) == before and AdapterVersion.objects.get().exports == []
    assert OutboxMessage.objects.filter(topic="objects.delete").count() == 2, "each attempt's files are deleted"
    assert OrganizationEvent.objects.filter(type="adapter.not_converted").count() == 1
    assert shop("gguf").json()["status"] == "waiting", "it can be ordered again"
    other = take(call)
    assert finish(call, other, manifest_sha256=stored(call, other, model_files())) == 204
    assert "no .gguf file" in shop()["gguf"]["problem"], "a merged model is no GGUF file"
    lasting = take(call)
    finish(call, lasting, problem="It could not be made: the tokenizer is unknown.", is_lasting=True)
    assert shop()["gguf"]["status"] == "failed"


@pytest.mark.slow
def test_a_lease_that_is_lost_opens_nothing_more(shop, call, floor, version):
    shop("merged_16bit")
    taken = take(call)
    assert call(f"/conversions/{taken.id}/heartbeat").status_code == 204
    assert release_overdue(now=db_now() + datetime.timedelta(minutes=4)) == 0
    assert release_overdue(now=db_now() + datetime.timedelta(minutes=6)) == 1
    assert call(f"/conversions/{taken.id}/heartbeat").status_code == 409
    other = make_worker(floor.pool, credential="annw_other")
    assert take_as(worker=other, claim=ConversionClaim()) is not None
    before = Conversion.objects.values().get()
    manifest = manifest_of("model", "run_1", 1, 10, model_files())
    wanted = UploadRequest(manifest=manifest, manifest_sha256=hashlib.sha256(msgspec.json.encode(manifest)).hexdigest())
    calls = (("heartbeat", None), ("uploads", wanted), ("finish", ConversionReport(problem="forged")))
    for path, body in calls:
        foreign, unknown = (call(f"/conversions/{each}/{path}", body) for each in (taken.id, "conv_unknown"))
        assert (foreign.status_code, foreign.content) == (409, unknown.content)
    assert Conversion.objects.values().get() == before
    large = msgspec.structs.replace(
        manifest, files=(msgspec.structs.replace(manifest.files[0], bytes=2**40), *manifest.files[1:])
    )
    digest = hashlib.sha256(msgspec.json.encode(large)).hexdigest()
    sent = UploadRequest(manifest=large, manifest_sha256=digest)
    assert call(f"/conversions/{taken.id}/uploads", sent, credential="annw_other").status_code == 400


@pytest.mark.slow
def test_what_was_given_back_while_silent_is_given_back_once(shop, call):
    shop("merged_16bit")
    taken = take(call)
    finish(call, taken, is_interrupted=True)

    assert leases._release(taken.id, db_now() + datetime.timedelta(minutes=6)) is False

    row = Conversion.objects.get()
    assert (row.status, row.failures) == ("waiting", 0)


@pytest.mark.slow
def test_what_busy_trainers_give_back_waits_for_an_idle_one_and_ends_after_a_day(shop, call, floor, organization):
    before = get_balance(organization=organization)
    shop("merged_16bit")
    other = make_worker(floor.pool, credential="annw_other")
    busy = itertools.cycle([(floor.worker, other), (other, floor.worker)])
    interrupted, begun, passed = ConversionReport(is_interrupted=True), 0, datetime.timedelta()
    while passed < leases._PATIENCE:
        assert shop()["merged_16bit"]["status"] == "waiting"
        last, following = next(busy)
        leases.finish(worker=last, conversion_id=take_as(worker=last, claim=ConversionClaim()).id, report=interrupted)
        assert take_as(worker=last, claim=ConversionClaim()) is None, "it is another trainer's turn"
        wait = demand._APART * begun
        if wait:
            assert take_as(worker=following, claim=ConversionClaim()) is None, "it was given back too often"
        Conversion.objects.update(leased_at=F("leased_at") - wait, created_at=F("created_at") - wait)
        begun, passed = begun + 1, passed + wait
    assert 10 < begun < 30 and Conversion.objects.get().failures == 0

    assert release_overdue(now=db_now()) == 1
    ended = shop()["merged_16bit"]
    assert (ended["status"], "other work" in ended["problem"]) == ("failed", True)
    assert get_balance(organization=organization) == before and get_ledger_sum_nano() == 0


@pytest.mark.slow
def test_an_order_of_a_suspended_organization_waits(shop, call, organization):
    shop("merged_16bit")
    Organization.objects.filter(pk=organization.pk).update(suspended_at=db_now())
    assert call("/conversions/next", ConversionClaim()).status_code == 204
    Organization.objects.filter(pk=organization.pk).update(suspended_at=None)
    assert take(call).kind == "merged_16bit"


@pytest.mark.slow
def test_organizations_take_turns_and_a_converter_is_needed(shop, call, floor, version, rival):
    shop("gguf"), shop("merged_16bit")
    mine = Conversion.objects.order_by("created_at").first()
    row = {"version": version, "kind": "another", "created_by": "key_1", "bytes": 1, "price_nano": 0}
    theirs = Conversion.objects.create(organization=rival, created_at=db_now(), **row)
    with_converter = make_worker(floor.pool, credential="annw_1")
    Worker.objects.filter(pk=with_converter.pk).update(software={CONVERTER: "0.1.1"})
    with_converter.refresh_from_db()
    without = make_worker(floor.pool, credential="annw_2")

    assert take_as(worker=without, claim=ConversionClaim()).kind == "merged_16bit", "it has no converter"
    assert take_as(worker=with_converter, claim=ConversionClaim()).id == theirs.pk, (
        "each organization has one trainer at a time"
    )
    assert take_as(worker=floor.worker, claim=ConversionClaim()) is None
    assert Conversion.objects.get(pk=mine.pk).status == "waiting"
    Conversion.objects.filter(status="running").delete()
    claim = ConversionClaim(base_models=("bm_another",))
    assert take_as(worker=with_converter, claim=claim) is None, "its machine has other base models"
    assert take_as(worker=with_converter, claim=ConversionClaim(base_models=(floor.base_model.pk,))).id == mine.pk


def test_organizations_that_share_their_limits_take_turns_as_one(floor, version, rival, charlie):
    row = {"version": version, "created_by": "key_1", "created_at": db_now(), "bytes": 1, "price_nano": 0}
    for number, each in enumerate((rival, make_organization("Second", owner=charlie))):
        Conversion.objects.create(organization=each, kind=f"form_{number}", **row)
    other = make_worker(floor.pool, credential="annw_1")

    assert take_as(worker=floor.worker, claim=ConversionClaim()) is not None
    assert take_as(worker=other, claim=ConversionClaim()) is None
