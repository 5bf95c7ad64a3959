"""What the spool confirmed is on disk and comes back whole after kill -9; what it did not confirm may be torn."""

import asyncio
import datetime
import json
import os
import signal
import subprocess
import sys
import textwrap
from itertools import count
from pathlib import Path

import msgspec
import pytest

from apps.billing.usage import UsageRecord
from apps.gateway import spool as spooling
from apps.gateway.spool import End, Spool, Start, adopt_orphans, encode, read_entries

ROOT = Path(__file__).resolve().parents[3]
_numbers = count(1)


def make_record(**fields) -> UsageRecord:
    values = {
        "id": f"use_{next(_numbers)}",
        "organization_id": "org_1",
        "key_id": "key_1",
        "model_name": "tiny",
        "adapter_version_id": "",
        "slice_id": "hold_1",
        "input_price_id": "price_1",
        "output_price_id": "price_2",
        "input_tokens": 3,
        "cached_input_tokens": 0,
        "output_tokens": 4,
        "finish": "stop",
        "latency_ms": 1,
        "first_token_ms": None,
        "occurred_at": datetime.datetime(2026, 11, 3, tzinfo=datetime.UTC),
    }
    return UsageRecord(**(values | fields))


def make_start(record: UsageRecord) -> Start:
    return Start(
        id=record.id, organization_id="org_1", key_id="key_1", model_name="tiny", slice_id="hold_1",
        worst_case_nano=9, at=1_762_000_000.0,
    )  # fmt: skip


async def write(spool: Spool, records: list[UsageRecord]) -> None:
    for record in records:
        spool.start(make_start(record))
    await asyncio.gather(*(spool.end(record) for record in records))


def segments(root: Path) -> list[Path]:
    return sorted(root.glob("*/*.[os]*"))


def test_a_confirmed_record_can_be_read_by_another_process(tmp_path):
    record = make_record()

    async def scenario() -> list:
        spool = Spool(tmp_path, name="one")
        spool.open()
        await write(spool, [record])
        read = list(read_entries(segments(tmp_path)[0]))
        spool.close()
        return read

    assert asyncio.run(scenario()) == [make_start(record), End(record)]


def test_a_torn_tail_is_ignored_and_what_stands_before_it_is_kept(tmp_path):
    whole, torn = encode(End(make_record())), encode(End(make_record()))
    damaged = bytearray(torn)
    damaged[20] ^= 0xFF
    for tail in (torn[:3], torn[:-1], bytes(damaged), b"\xff" * 12):
        path = tmp_path / "segment"
        path.write_bytes(whole + tail)

        assert len(list(read_entries(path))) == 1


def test_a_folder_goes_when_everything_in_it_is_recorded(tmp_path):
    async def scenario() -> None:
        spool = Spool(tmp_path, name="one")
        spool.open()
        record = make_record()
        await write(spool, [record])
        spool.forget([record.id])
        spool.close()

    asyncio.run(scenario())

    assert list(tmp_path.iterdir()) == []


def test_a_segment_stays_until_every_request_in_it_is_recorded(tmp_path, monkeypatch):
    monkeypatch.setattr(spooling, "SEGMENT_BYTES", 1)  # each batch fills one
    first, second = make_record(), make_record()

    async def scenario() -> list[str]:
        spool = Spool(tmp_path, name="one")
        spool.open()
        await write(spool, [first])
        await write(spool, [second])
        spool.forget([first.id])
        spool.close()
        return [entry.id for path in segments(tmp_path) for entry in read_entries(path)]

    assert set(asyncio.run(scenario())) == {second.id}


def test_the_folder_of_a_living_process_is_left_alone(tmp_path):
    async def scenario() -> None:
        spool = Spool(tmp_path, name="one")
        spool.open()
        await write(spool, [make_record()])
        assert list(adopt_orphans(tmp_path)) == []
        spool.close()

    asyncio.run(scenario())

    (orphan,) = adopt_orphans(tmp_path)
    assert len(orphan.ends) == 1
    orphan.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_cannot_be_written_stops_admission_until_it_can(tmp_path, monkeypatch):
    write_all = spooling._write_all

    def fail(descriptor: int, content: bytes) -> None:
        raise OSError(28, "No space left on device")

    async def scenario() -> None:
        spool = Spool(tmp_path, name="one")
        spool.open()
        monkeypatch.setattr(spooling, "_write_all", fail)
        monkeypatch.setattr(spooling.Spool, "_probe", lambda self: None)
        with pytest.raises(OSError, match="No space"):
            await spool.end(make_record())
        assert not spool.has_room()
        monkeypatch.undo()
        monkeypatch.setattr(spooling, "_write_all", write_all)
        while not spool.has_room():
            await asyncio.sleep(0.01)
        await spool.end(make_record())
        spool.close()

    asyncio.run(scenario())


WRITER = textwrap.dedent(
    """
    import asyncio, sys, pathlib
    sys.path.insert(0, sys.argv[2])
    from tests.unit.gateway.test_spool import Spool, make_record, make_start

    async def one(spool, lane):
        for number in range(100_000):
            record = make_record(id=f"use_{lane}_{number}")
            spool.start(make_start(record))
            await spool.end(record)
            sys.stdout.write(record.id + "\\n")
            sys.stdout.flush()

    async def main():
        spool = Spool(pathlib.Path(sys.argv[1]), name="doomed")
        spool.open()
        await asyncio.gather(*(one(spool, lane) for lane in range(8)))

    asyncio.run(main())
    """
)


def test_nothing_confirmed_is_lost_by_kill_9(tmp_path):
    environ = os.environ | {"DJANGO_SETTINGS_MODULE": "apps.config.settings.test"}
    script = "import django; django.setup()\n" + WRITER
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path), str(ROOT)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environ,
    ) as writer:
        confirmed = {writer.stdout.readline().strip() for _ in range(500)}
        writer.send_signal(signal.SIGKILL)
        confirmed |= {line.strip() for line in writer.stdout if line.endswith("\n")}

    (orphan,) = adopt_orphans(tmp_path)

    assert confirmed <= {record.id for record in orphan.ends}
    assert len(orphan.starts) <= 8
    orphan.leave()


def test_a_record_is_small_and_plain_json(tmp_path):
    content = encode(End(make_record()))

    assert len(content) < 600
    assert json.loads(content[8:])["record"]["output_tokens"] == 4
    assert msgspec.json.decode(content[8:], type=End).record.finish == "stop"
