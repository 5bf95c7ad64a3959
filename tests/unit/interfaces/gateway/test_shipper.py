"""Usage travels in few large transactions, however fast it comes, and again when the database was away."""

import asyncio
import os

import pytest
from django.db import OperationalError

from apps.interfaces.gateway.metering import shipper as shipping
from apps.interfaces.gateway.metering.shipper import Shipper, recover_orphans
from apps.interfaces.gateway.metering.spool import End, Segments, claim_folder, encode
from tests.factories.usage import make_record


class Database:
    """Notes what it is sent."""

    def __init__(self) -> None:
        self.batches: list[int] = []
        self.is_away = False

    def record(self, records) -> list[str]:
        if self.is_away:
            raise OperationalError("away")
        self.batches.append(len(records))
        return [record.id for record in records]


@pytest.fixture
def database(monkeypatch) -> Database:
    database = Database()
    monkeypatch.setattr(shipping, "record", database.record)
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

    async def call(self, function, *arguments):
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
        segments.append(encode(End(record)), is_synced=True)
        segments.keep([record.id])
        segments.close()
        os.close(lock)

    asyncio.run(recover_orphans(Threads(), tmp_path))

    assert [folder.name for folder in tmp_path.iterdir()] == ["gateway_1"]
