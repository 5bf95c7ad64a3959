"""Finished models in other forms: offered at a price, ordered once, charged when delivered."""

import datetime

import pytest
from django.db.models import F

from apps.accounts.models import OrganizationEvent
from apps.accounts.roles import SCOPES
from apps.adapters.models import AdapterVersion
from apps.adapters.operations import delete_version
from apps.billing.models import Hold
from apps.billing.queries import get_balance, get_ledger_sum_nano
from apps.catalog.models import BaseModel
from apps.catalog.operations import set_price
from apps.contracts.worker_api import ConversionClaim
from apps.core import audit
from apps.core.database.clock import db_now
from apps.core.errors import InvalidState, RateLimited
from apps.core.models import AuditEntry
from apps.finetuning.conversions import demand, orders
from apps.finetuning.conversions.leases import release_overdue
from apps.finetuning.models import Conversion, Worker
from apps.finetuning.quotes.delivery import whole_model_bytes
from apps.finetuning.runs import uploads
from apps.finetuning.usage import storage
from tests.factories.accounts import make_key, make_member
from tests.factories.finetuning import model_files
from tests.factories.usage import list_spending
from tests.support.api.conversions import PER_GB_NANO, finish, stored, take
from tests.support.waiting import join_readings


@pytest.mark.slow
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
    day = Hold.objects.get(source=Conversion.objects.get().pk).closed_at.date()
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


@pytest.mark.slow
def test_a_price_is_confirmed_and_what_cannot_be_made_is_refused(shop, version, organization, monkeypatch):
    price = shop()["gguf"]["price_usd"]
    raised = shop("gguf", "0.000001").json()["error"]
    assert (raised["code"], raised["param"], raised["price_usd"]) == ("price_raised", "quoted_max_usd", price)
    for kind, usd, param in (
        ("ggml", price, "kind"), ("gguf", "a lot", "quoted_max_usd"), ("gguf", "-1", "quoted_max_usd"),
    ):  # fmt: skip
        refused = shop(kind, usd)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)

    def code(kind: str = "gguf") -> tuple[int, str]:
        answer = shop(kind, price)
        return answer.status_code, answer.json()["error"]["code"]

    monkeypatch.setattr(orders, "left_of_member", lambda **_: 1000)
    assert "allows the member who made the model" in shop("gguf", price).json()["error"]["message"]
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


def test_forms_that_are_not_made_yet_take_room_of_the_member_who_made_the_model(shop, version, monkeypatch):
    size = whole_model_bytes(base_model=version.adapter.base_model)
    monkeypatch.setattr(orders, "left_of_member", lambda **_: size + 1000)
    assert shop("merged_16bit").status_code == 200

    refused = shop("gguf").json()["error"]
    assert refused["code"] == "insufficient_quota" and "made the model, 1,000 are left" in refused["message"]


def test_without_credit_nothing_is_ordered(shop, version, organization):
    set_price(sku="conversion:bytes", unit="bytes", price_nano=10**18, per=10**9, by="user_1", now=db_now())

    refused = shop("gguf", "1000000000").json()["error"]

    assert refused["code"] == "insufficient_quota" and "cap" not in refused["message"]
    assert not Conversion.objects.exists()


@pytest.mark.slow
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


@pytest.mark.slow
def test_an_order_ends_when_nobody_makes_it_or_the_model_is_deleted(shop, call, version, organization):
    shop("merged_16bit"), shop("gguf")
    taken = take(call)
    assert finish(call, taken, is_interrupted=True) == 204, "a run went first: it is no failure"
    assert Conversion.objects.get(pk=taken.id).failures == 0
    Conversion.objects.filter(kind="gguf").update(created_at=F("created_at") - datetime.timedelta(hours=25))
    assert release_overdue(now=db_now()) == 1
    assert "idle" in shop()["gguf"]["problem"]
    Conversion.objects.update(leased_at=F("leased_at") - demand._APART)
    taken = take(call)
    delete_version(version=version, by="user_1", now=db_now())
    assert call(f"/conversions/{taken.id}/heartbeat").status_code == 409
    assert release_overdue(now=db_now()) == 1 and not Conversion.objects.exclude(status="failed").exists()
    assert get_balance(organization=organization).held_nano == 0


@pytest.mark.slow
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


@pytest.mark.slow
def test_of_a_cancellation_and_a_trainer_one_wins(shop, call, version):
    shop("merged_16bit")
    read_before = Conversion.objects.get()
    take(call)

    with pytest.raises(InvalidState):
        orders.cancel(conversion=read_before, by="user_1")

    assert Conversion.objects.get().status == "running"
    assert not Hold.objects.exclude(status="open").filter(source=read_before.pk).exists()
