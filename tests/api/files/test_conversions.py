"""Finished models in other forms: offered at a price, ordered once, made by an idle trainer, charged when delivered."""

import datetime
import hashlib
import itertools

import msgspec
import pytest
from django.db.models import F

from apps.accounts.models import Organization, OrganizationEvent
from apps.accounts.roles import SCOPES
from apps.adapters.models import AdapterVersion
from apps.adapters.operations import delete_version
from apps.billing.models import Hold
from apps.billing.queries import get_balance, get_ledger_sum_nano
from apps.billing.usage.spending import list_spending
from apps.catalog.models import BaseModel
from apps.catalog.operations import set_price
from apps.contracts.worker_api import (
    ConversionClaim,
    ConversionReport,
    ConversionRequest,
    UploadRequest,
    UploadResponse,
)
from apps.core import audit
from apps.core.database.clock import db_now
from apps.core.errors import InvalidState, RateLimited
from apps.core.models import AuditEntry, OutboxMessage
from apps.core.objects.store import store
from apps.finetuning.conversions import leases, orders
from apps.finetuning.conversions.leases import release_overdue
from apps.finetuning.conversions.leases import take as take_as
from apps.finetuning.models import Conversion, Worker
from apps.finetuning.quotes.delivery import CONVERTER, whole_model_bytes
from apps.finetuning.runs import uploads
from apps.finetuning.usage import storage
from tests.factories.accounts import make_key, make_member, make_organization
from tests.factories.finetuning import make_worker, manifest_of, model_files
from tests.support.waiting import join_readings

PER_GB_NANO = 2 * 10**10


@pytest.fixture
def version(floor, claim) -> AdapterVersion:
    job = floor.job(suffix="triage")
    claim().start().succeed(floor.base_model)
    job.refresh_from_db()
    set_price(sku="conversion:bytes", unit="bytes", price_nano=PER_GB_NANO, per=10**9, by="user_1", now=db_now())
    Worker.objects.update(software={CONVERTER: "0.1.1"})
    return job.adapter_version


@pytest.fixture
def shop(api_client, key, version):
    """Return a function that lists the offers by kind, or orders one at a price."""
    url, client = f"/api/v1/models/{version.model_name}/conversions", api_client(key)

    def go(kind: str = "", usd: str = "5"):
        if not kind:
            return {each["kind"]: each for each in client.get(url).json()["data"]}
        return client.post(url, {"kind": kind, "quoted_max_usd": usd}, format="json")

    return go


def take(call) -> ConversionRequest:
    return msgspec.json.decode(call("/conversions/next", ConversionClaim()).content, type=ConversionRequest)


def stored(call, taken: ConversionRequest, files: dict[str, bytes], *, leave_out: str = "") -> str:
    """Store the files as the worker does; return the manifest's hash."""
    manifest = manifest_of("model", "run_1", 1, 10, files)
    body = msgspec.json.encode(manifest)
    digest = hashlib.sha256(body).hexdigest()
    answer = call(f"/conversions/{taken.id}/uploads", UploadRequest(manifest=manifest, manifest_sha256=digest))
    places = msgspec.json.decode(answer.content, type=UploadResponse)
    assert set(places.files) == {*files, "manifest.json"}
    prefix = Conversion.objects.get(pk=taken.id).object_prefix
    for name, content in [*files.items(), ("manifest.json", body)]:
        if name != leave_out:
            store().put_stream(f"{prefix}/{name}", [content])
    return digest


def finish(call, taken: ConversionRequest, **report) -> int:
    return call(f"/conversions/{taken.id}/finish", ConversionReport(**report)).status_code


def test_a_form_is_quoted_ordered_made_and_paid_once(shop, call, version, organization, api_client, key, monkeypatch):
    before = get_balance(organization=organization)
    offers = shop()
    quoted = whole_model_bytes(base_model=version.adapter.base_model) * PER_GB_NANO // 10**9
    merged = offers["merged_16bit"]
    assert [offer["status"] for offer in offers.values()] == ["offered", "offered"]
    assert float(merged["price_usd"]) == quoted / 10**9 > 0

    ordered, again = shop("merged_16bit", merged["price_usd"]), shop("merged_16bit", "0")
    assert ordered.status_code == 200 and ordered.json() == again.json(), "an order is made once"
    assert (ordered.json()["status"], get_balance(organization=organization).held_nano) == ("waiting", quoted)
    taken = take(call)
    assert (taken.kind, taken.base_model.name) == ("merged_16bit", version.adapter.base_model.name)
    assert "adapter_model.safetensors" in {file.name for file in taken.adapter.files}
    assert shop()["merged_16bit"]["status"] == "running"
    digest = stored(call, taken, model_files())
    monkeypatch.setattr(uploads, "READ_AT_ONCE_FILES", 0)
    assert finish(call, taken, manifest_sha256=digest) == 503, "large files are read while the worker repeats the call"
    join_readings()
    assert [finish(call, taken, manifest_sha256=digest) for _ in range(2)] == [204, 204], "a repeat changes nothing"

    made = sum(map(len, model_files().values()))
    cost = made * PER_GB_NANO // 10**9
    after = get_balance(organization=organization)
    assert (before.available_nano - after.available_nano, after.held_nano) == (cost, 0) and get_ledger_sum_nano() == 0
    day = db_now().date()
    lines = [
        line for line in list_spending(organization=organization, first=day, last=day) if line.kind == "conversion"
    ]
    assert [(line.unit, line.quantity, line.cost_nano) for line in lines] == [("bytes", made, cost)]
    listed = api_client(key).get(f"/api/v1/models/{version.model_name}/files").json()["data"]
    assert {file["name"] for file in listed if file["export"] == "merged_16bit"} >= set(model_files())
    assert (shop()["merged_16bit"]["status"], shop("merged_16bit").json()["error"]["code"]) == (
        "succeeded", "already_converted",
    )  # fmt: skip
    assert OrganizationEvent.objects.filter(type="adapter.converted", subject=version.pk).count() == 1
    assert AuditEntry.objects.filter(action="adapter.converted", target=version.pk).count() == 1


def test_a_price_is_confirmed_and_what_cannot_be_made_is_refused(shop, version, organization, monkeypatch):
    price = shop()["gguf"]["price_usd"]
    raised = shop("gguf", "0.000001").json()["error"]
    assert (raised["code"], raised["param"], raised["price_usd"]) == ("price_raised", "quoted_max_usd", price)
    for kind, usd, param in (("ggml", price, "kind"), ("gguf", "a lot", "quoted_max_usd"), ("gguf", "-1", None)):
        refused = shop(kind, usd)
        assert refused.status_code == 400 and refused.json()["error"]["param"] in (param, "quoted_max_usd")

    def code(kind: str = "gguf") -> tuple[int, str]:
        answer = shop(kind, price)
        return answer.status_code, answer.json()["error"]["code"]

    monkeypatch.setattr(orders, "left_bytes", lambda **_: 1000)
    assert code() == (429, "insufficient_quota")
    monkeypatch.setattr(orders, "left_bytes", storage.left_bytes)
    monkeypatch.setattr(orders, "MAX_A_DAY", 0)
    assert code() == (429, "rate_limit_exceeded")
    monkeypatch.setattr(orders, "MAX_A_DAY", 50)
    monkeypatch.setattr(orders, "MAX_OPEN", 0)
    assert code() == (429, "rate_limit_exceeded")
    monkeypatch.undo()
    Worker.objects.update(software={})
    assert code() == (400, "conversion_unavailable") and shop()["gguf"]["status"] == "refused"
    BaseModel.objects.update(is_installed=False)
    assert code("merged_16bit") == (400, "base_model_gone")
    BaseModel.objects.update(is_installed=True)
    AdapterVersion.objects.update(method="full")
    assert code("merged_16bit") == (400, "already_converted")
    delete_version(version=version, by="user_1", now=db_now())
    assert code("merged_16bit") == (404, "model_not_found")
    assert not Conversion.objects.exists() and get_balance(organization=organization).held_nano == 0


def test_without_credit_nothing_is_ordered(shop, version, organization):
    set_price(sku="conversion:bytes", unit="bytes", price_nano=10**18, per=10**9, by="user_1", now=db_now())

    refused = shop("gguf", "1000000000").json()["error"]

    assert refused["code"] == "insufficient_quota" and "cap" not in refused["message"]
    assert not Conversion.objects.exists()


def test_who_may_order(api_client, key, version, organization, alice, rival, charlie, call):
    url = f"/api/v1/models/{version.model_name}/conversions"
    member = make_key(organization, make_member(organization, "member"), scopes=frozenset({"view", "adapter.write"}))
    viewer = make_key(organization, make_member(organization, "viewer"), scopes=frozenset({"view"}))
    outsider = make_key(rival, charlie, scopes=frozenset(SCOPES))
    body = {"kind": "gguf", "quoted_max_usd": "5"}

    def both(client) -> tuple[int, int]:
        return client.get(url).status_code, client.post(url, body, format="json").status_code

    assert both(api_client(outsider)) == (404, 404)
    assert both(api_client(viewer)) == (200, 403)
    assert both(api_client(None)) == (401, 401)
    assert not Conversion.objects.exists()
    theirs = Conversion.objects.create(
        organization=organization, version=version, kind="gguf", created_by="key_1", created_at=db_now(), bytes=1,
        price_nano=0,
    )  # fmt: skip
    stop = f"{url}/{theirs.pk}/cancel"
    people = (outsider, viewer, None, member)
    assert [api_client(each).post(stop).status_code for each in people] == [404, 403, 401, 200]
    theirs.delete()
    assert both(api_client(member)) == both(api_client(key)) == (200, 200)
    assert Conversion.objects.get().created_by == member.key.pk
    for path in ("next", "conv_1/heartbeat", "conv_1/uploads", "conv_1/finish"):
        assert call(f"/conversions/{path}", credential="annw_wrong").status_code in (400, 401)
    Worker.objects.update(kind="replica")
    assert call("/conversions/next", ConversionClaim()).status_code == 204


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


def test_an_order_ends_when_nobody_makes_it_or_the_model_is_deleted(shop, call, version, organization):
    shop("merged_16bit"), shop("gguf")
    taken = take(call)
    assert finish(call, taken, is_interrupted=True) == 204, "a run went first: it is no failure"
    assert Conversion.objects.get(pk=taken.id).failures == 0
    Conversion.objects.filter(kind="gguf").update(created_at=F("created_at") - datetime.timedelta(hours=25))
    assert release_overdue(now=db_now()) == 1
    assert "idle" in shop()["gguf"]["problem"]
    Conversion.objects.update(leased_at=F("leased_at") - leases._APART)
    taken = take(call)
    delete_version(version=version, by="user_1", now=db_now())
    assert call(f"/conversions/{taken.id}/heartbeat").status_code == 409
    assert release_overdue(now=db_now()) == 1 and not Conversion.objects.exclude(status="failed").exists()
    assert get_balance(organization=organization).held_nano == 0


def test_a_waiting_order_is_cancelled_and_its_hold_returns_once(shop, call, version, organization, api_client, key):
    before, client = get_balance(organization=organization), api_client(key)
    first, url = shop("merged_16bit").json(), f"/api/v1/models/{version.model_name}/conversions"
    row = Conversion.objects.get(pk=first["id"])
    assert get_balance(organization=organization).held_nano == row.price_nano > 0

    def cancel(id: str):
        return client.post(f"{url}/{id}/cancel")

    answers = [cancel(first["id"]) for _ in range(2)]
    assert [(each.status_code, each.json()["status"]) for each in answers] == [(200, "cancelled")] * 2
    assert get_balance(organization=organization) == before and get_ledger_sum_nano() == 0
    assert AuditEntry.objects.filter(action="conversion.cancelled", target=version.pk).count() == 1
    assert not OrganizationEvent.objects.filter(type="adapter.not_converted").exists(), "its customer knows"
    assert call("/conversions/next", ConversionClaim()).status_code == 204 and release_overdue(now=db_now()) == 0

    again = shop("merged_16bit").json()
    assert (again["status"], again["id"] != first["id"]) == ("waiting", True), "it can be ordered again"
    assert cancel(first["id"]).json()["status"] == "cancelled"
    assert Conversion.objects.get(pk=again["id"]).status == "waiting"
    taken = take(call)
    running = cancel(taken.id)
    assert (running.status_code, running.json()["error"]["param"]) == (400, "conversion_id")
    finish(call, taken, manifest_sha256=stored(call, taken, model_files()))
    assert cancel(taken.id).json()["error"]["code"] == "invalid_state"
    assert [cancel(id).status_code for id in ("conv_unknown", "x" * 300)] == [404, 404]
    assert get_balance(organization=organization).held_nano == 0


def test_a_full_audit_log_keeps_no_order_from_being_cancelled(shop, version, monkeypatch):
    def full(organization_id: str) -> None:
        raise RateLimited(organization_id)

    shop("merged_16bit")
    monkeypatch.setattr(audit, "_require_room", full)

    assert orders.cancel(conversion=Conversion.objects.get(), by="user_1").status == "cancelled"


def test_of_many_orders_the_latest_of_each_form_is_read(shop, version, organization, monkeypatch):
    now = db_now()
    for minutes in range(5):
        Conversion.objects.create(
            organization=organization, version=version, kind="gguf", status="failed", created_by="key_1", bytes=1,
            price_nano=0, created_at=now - datetime.timedelta(minutes=minutes), problem=f"{minutes} minutes ago",
        )  # fmt: skip
    read, original = [], Conversion.from_db
    monkeypatch.setattr(Conversion, "from_db", lambda *given: read.append(1) or original(*given))

    assert shop()["gguf"]["problem"] == "0 minutes ago" and len(read) == 1


def test_of_a_cancellation_and_a_trainer_one_wins(shop, call, version):
    shop("merged_16bit")
    read_before = Conversion.objects.get()
    take(call)

    with pytest.raises(InvalidState):
        orders.cancel(conversion=read_before, by="user_1")

    assert Conversion.objects.get().status == "running"
    assert not Hold.objects.exclude(status="open").filter(source=read_before.pk).exists()


def test_what_was_given_back_while_silent_is_given_back_once(shop, call):
    shop("merged_16bit")
    taken = take(call)
    finish(call, taken, is_interrupted=True)

    assert leases._release(taken.id, db_now() + datetime.timedelta(minutes=6)) is False

    row = Conversion.objects.get()
    assert (row.status, row.failures) == ("waiting", 0)


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
        wait = leases._APART * begun
        if wait:
            assert take_as(worker=following, claim=ConversionClaim()) is None, "it was given back too often"
        Conversion.objects.update(leased_at=F("leased_at") - wait, created_at=F("created_at") - wait)
        begun, passed = begun + 1, passed + wait
    assert 10 < begun < 30 and Conversion.objects.get().failures == 0

    assert release_overdue(now=db_now()) == 1
    ended = shop()["merged_16bit"]
    assert (ended["status"], "other work" in ended["problem"]) == ("failed", True)
    assert get_balance(organization=organization) == before and get_ledger_sum_nano() == 0


def test_an_order_of_a_suspended_organization_waits(shop, call, organization):
    shop("merged_16bit")
    Organization.objects.filter(pk=organization.pk).update(suspended_at=db_now())
    assert call("/conversions/next", ConversionClaim()).status_code == 204
    Organization.objects.filter(pk=organization.pk).update(suspended_at=None)
    assert take(call).kind == "merged_16bit"


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
