"""What is written to the spool comes back whole; what was not confirmed may be torn."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from apps.billing.usage.metering import UsageRecord
from apps.interfaces.gateway.metering import spool as spooling
from apps.interfaces.gateway.metering.spool import End, Segments, adopt_orphans, claim_folder, encode, read_entries
from tests.factories.usage import make_record, make_start


def write(segments: Segments, *records: UsageRecord) -> None:
    for record in records:
        for entry in (make_start(record), End(record)):
            segments.append(encode(entry), is_synced=isinstance(entry, End))
            segments.keep([entry.id])


def paths(root: Path) -> list[Path]:
    return sorted(root.glob("*/*.[os]*"))


@pytest.fixture
def folder(tmp_path) -> Iterator[Path]:
    lock = claim_folder(tmp_path, "one")
    yield tmp_path / "one"
    os.close(lock)


def test_a_written_record_can_be_read_by_another_process(folder):
    record = make_record()
    segments = Segments(folder)
    write(segments, record)

    (path,) = paths(folder.parent)
    assert list(read_entries(path)) == [make_start(record), End(record)]
    segments.close()


def test_what_is_prepared_and_not_yet_written_is_the_end_and_no_damage(folder, caplog, monkeypatch):
    monkeypatch.setattr(spooling, "_PREPARED_BYTES", 1000)
    records = [make_record() for _ in range(5)]  # more than one preparation
    segments = Segments(folder)
    write(segments, *records)

    (path,) = paths(folder.parent)
    assert [entry.id for entry in read_entries(path) if isinstance(entry, End)] == [record.id for record in records]
    assert path.stat().st_size > sum(len(encode(End(record))) for record in records)
    assert not caplog.records
    segments.close()


def test_a_torn_tail_is_ignored_and_what_stands_before_it_is_kept(tmp_path):
    whole, torn = encode(End(make_record())), encode(End(make_record()))
    damaged = bytearray(torn)
    damaged[20] ^= 0xFF
    for tail in (torn[:3], torn[:-1], bytes(damaged), b"\xff" * 12):
        path = tmp_path / "segment"
        path.write_bytes(whole + tail)

        assert len(list(read_entries(path))) == 1


def test_a_folder_goes_when_everything_in_it_is_recorded(folder):
    record = make_record()
    segments = Segments(folder)
    write(segments, record)
    segments.forget([record.id])
    segments.close()

    assert not folder.exists()


def test_a_segment_stays_until_every_request_in_it_is_recorded(folder, monkeypatch):
    monkeypatch.setattr(spooling, "SEGMENT_BYTES", 1)  # each record fills one
    first, second = make_record(), make_record()
    segments = Segments(folder)
    for record in (first, second):
        write(segments, record)
        segments.rotate()
    segments.forget([first.id])
    segments.rotate()
    segments.close()

    assert {entry.id for path in paths(folder.parent) for entry in read_entries(path)} == {second.id}


def test_the_folder_of_a_living_process_is_left_alone(tmp_path):
    lock = claim_folder(tmp_path, "one")
    segments = Segments(tmp_path / "one")
    write(segments, make_record())
    assert list(adopt_orphans(tmp_path)) == []
    segments.close()
    os.close(lock)

    (orphan,) = adopt_orphans(tmp_path)
    assert len(orphan.ends) == 1
    orphan.remove()
    assert list(tmp_path.iterdir()) == []


def test_an_end_under_the_charged_id_ends_its_start(tmp_path):
    lock = claim_folder(tmp_path, "one")
    segments = Segments(tmp_path / "one")
    answered, lost = (msgspec.structs.replace(make_start(make_record()), charged_id=id) for id in ("useb_1", "useb_2"))
    for entry in (answered, lost, End(make_record(id="useb_1"))):
        segments.append(encode(entry), is_synced=True)
    segments.keep(["useb_1"])
    segments.close()
    os.close(lock)

    (orphan,) = adopt_orphans(tmp_path)

    assert [start.id for start in orphan.starts] == [lost.id]
    orphan.leave()


def test_after_a_failure_a_segment_is_written_no_more(folder, monkeypatch):
    first, torn, later = make_record(), make_record(), make_record()
    segments = Segments(folder)
    write(segments, first)
    with monkeypatch.context() as patch:
        patch.setattr(spooling, "_write_all", _no_space)
        with pytest.raises(OSError, match="No space"):
            write(segments, torn)
    write(segments, later)

    assert [[entry.id for entry in read_entries(path)] for path in paths(folder.parent)] == [
        [first.id, first.id],
        [later.id, later.id],
    ]
    segments.close()


def _no_space(descriptor: int, content: bytes, *, at: int) -> None:
    raise OSError(28, "No space left on device")


def test_a_record_is_small_and_plain_json(tmp_path):
    content = encode(End(make_record()))

    assert len(content) < 600
    assert json.loads(content[8:])["record"]["output_tokens"] == 4
    assert msgspec.json.decode(content[8:], type=End).record.finish == "stop"
