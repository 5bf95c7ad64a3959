"""Usage travels in few large transactions, however fast it comes, and refused requests in few records."""

import asyncio
import datetime
import functools
import os
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from django.db import OperationalError

from apps.billing.operations import InsufficientBalance
from apps.billing.usage.traffic import Refusal, refusal_of
from apps.catalog.queries import ModelNotFound
from apps.core.errors import InvalidValue, RateLimited, Unavailable
from apps.core.http.asgi import TooLarge
from apps.interfaces.gateway.errors import RequestFailed
from apps.interfaces.gateway.metering import shipper as shipping
from apps.interfaces.gateway.metering.refused import RefusedRequests
from apps.interfaces.gateway.metering.shipper import Shipper, recover_orphans
from apps.interfaces.gateway.metering.spool import Completion, End, Segments, claim_folder, encode
from tests.factories.usage import make_completion, make_record, make_start


class Database:
    """Notes what it is sent."""

    def __init__(self) -> None:
        self.batches: list[int] = []
        self.is_away = False

    def store(self, records) -> list[str]:
        return self.record(records)

    def record(self, records) -> list[str]:
        if self.is_away:
            raise OperationalError("away")
        self.batches.append(len(records))
        return [record.id for record in records]


@pytest.fixture
def database(monkeypatch) -> Database:
    database = Database()
    monkeypatch.setattr(shipping, "record", database.record)
    monkeypatch.setattr(shipping, "store", database.store)
    return database


def test_what_ends_while_usage_is_recorded_waits_for_the_next_time(database):
    shipper = Shipper(lambda batch, ids: shipper.add([make_record()]))
    shipper.add(make_record() for _ in range(3))
    for _ in range(3):
        shipper.ship()

    assert database.batches == [3, 1, 1]


def test_many_are_sent_in_batches_and_in_order(database, monkeypatch):
    monkeypatch.setattr(shipping, "BATCH", 4)
    records, told = [make_record() for _ in range(10)], []
    shipper = Shipper(lambda batch, ids: told.extend(ids))
    shipper.add(records)
    shipper.ship()

    assert database.batches == [4, 4, 2]
    assert told == [record.id for record in records]


def test_what_the_database_did_not_take_is_sent_again_and_told_once(database):
    records, told = [make_record() for _ in range(3)], []
    shipper = Shipper(lambda batch, ids: told.extend(ids))
    shipper.add(records)
    database.is_away = True
    with pytest.raises(OperationalError):
        shipper.ship()
    assert told == []

    database.is_away = False
    shipper.add([make_record(id="use_later")])
    shipper.ship()

    assert told == [*(record.id for record in records), "use_later"]


class Threads:
    """Calls in place, except that to record anything of one organization is a bug."""

    def __init__(self) -> None:
        self.stored: list[str] = []

    async def call(self, function, *arguments):
        if function is shipping.store:
            self.stored += [each.id for each in arguments[0]]
            return [each.id for each in arguments[0]]
        if function is shipping.record and any(each.organization_id == "org_bad" for each in arguments[0]):
            raise KeyError("org_bad")
        return [each.id for each in arguments[0]] if function is shipping.record else function(*arguments)


def test_usage_of_a_dead_gateway_that_cannot_be_read_keeps_no_other_from_being_recorded(tmp_path, monkeypatch):
    monkeypatch.setattr(shipping, "_close_slice", lambda slice_id: None)
    monkeypatch.setattr(shipping, "_lost_records", lambda starts: [])
    for name, organization_id in (("gateway_1", "org_bad"), ("gateway_2", "org_good")):
        lock = claim_folder(tmp_path, name)
        segments = Segments(tmp_path / name)
        record = make_record(organization_id=organization_id)
        completion = Completion(make_completion(id=f"chatcmpl-{name}"))
        segments.append(encode(End(record)) + encode(completion), is_synced=True)
        segments.keep([record.id])
        segments.close()
        os.close(lock)

    threads = Threads()
    asyncio.run(recover_orphans(threads, tmp_path))

    assert threads.stored == ["chatcmpl-gateway_2"]
    assert [folder.name for folder in tmp_path.iterdir()] == ["gateway_1"]


def test_the_record_of_a_lost_request_leaves_the_charged_id_to_the_repeated_one(monkeypatch):
    starts = [msgspec.structs.replace(make_start(make_record()), charged_id=id) for id in ("useb_1", "useb_2")]
    monkeypatch.setattr(shipping, "list_recorded_ids", lambda *, ids: frozenset({"useb_1"}) & set(ids))

    assert [lost.id for lost in shipping._lost_records(starts)] == [starts[1].id]


# --- Refused requests -------------------------------------------------------------------------------------------------

NOW = datetime.datetime(2026, 11, 3, tzinfo=datetime.UTC)
CALLER = SimpleNamespace(organization_id="org_1", key_id="key_1")


class Platform:
    """Routes, metering and recorder in one; it knows one model."""

    def __init__(self) -> None:
        self.records = []
        self.is_roomy = True

    def known(self, name, *, caller):
        return SimpleNamespace(model_name="ft:v1", adapter_version_id="adpv_1") if name == "ft:production" else None

    def has_room(self) -> bool:
        return self.is_roomy

    def now(self) -> datetime.datetime:
        return NOW

    def end(self, record) -> None:
        self.records.append(record)


@pytest.fixture
def platform() -> Platform:
    return Platform()


def test_many_refusals_make_few_records_and_invented_names_make_none(platform):
    refused = RefusedRequests(platform, platform, platform)

    for number in range(50):
        refused.count(CALLER, f"invented-{number}", Refusal.NOT_FOUND)
    refused.count(CALLER, "ft:production", Refusal.RATE_LIMIT)
    refused.record()
    refused.record()

    found = [(each.model_name, each.adapter_version_id, each.finish, each.request_count) for each in platform.records]
    assert found == [("", "", "not_found", 50), ("ft:v1", "adpv_1", "rate_limit", 1)]


def test_counts_wait_while_nothing_can_be_recorded(platform):
    refused = RefusedRequests(platform, platform, platform)
    platform.is_roomy = False

    refused.count(CALLER, "", Refusal.QUOTA)
    refused.record()
    platform.is_roomy = True
    refused.count(CALLER, "", Refusal.QUOTA)
    refused.record()

    assert [each.request_count for each in platform.records] == [2]


@pytest.mark.parametrize(
    ("error", "refusal"),
    [
        (RateLimited(""), "rate_limit"),
        (InsufficientBalance(""), "quota"),
        (ModelNotFound(""), "not_found"),
        (InvalidValue(""), "invalid"),
        (TooLarge(""), "invalid"),
        (RequestFailed(), "invalid"),
        (Unavailable(""), "error"),
    ],
)
def test_an_error_counts_under_its_class(error, refusal):
    assert refusal_of(error) == refusal


async def test_after_a_fault_of_the_database_all_dead_gateways_are_left_to_others(monkeypatch):
    left: list[int] = []
    orphans = [SimpleNamespace(leave=functools.partial(left.append, number)) for number in (1, 2)]

    class Near:
        async def call(self, function, *arguments):
            return function(*arguments)

    async def away(*_: object) -> bool:
        raise OperationalError("away")

    monkeypatch.setattr(shipping, "adopt_orphans", lambda _: iter(orphans))
    monkeypatch.setattr(shipping, "_ship_orphan", away)

    with pytest.raises(OperationalError):
        await recover_orphans(Near(), Path())

    assert left == [1, 2]
