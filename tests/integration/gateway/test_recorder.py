"""What the recorder confirmed is on the disk, even if a process dies. If it cannot write, it admits nothing new."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from apps.interfaces.gateway.engines.meter import Meter
from apps.interfaces.gateway.metering import recorder as recording
from apps.interfaces.gateway.metering.recorder import Recorder
from apps.interfaces.gateway.metering.spending_slices import SliceShare
from apps.interfaces.gateway.metering.spool import Orphan, adopt_orphans
from apps.interfaces.gateway.metering.tickets import Metering, Ticket
from apps.interfaces.gateway.surfaces.inference import AnswerEnding
from apps.interfaces.gateway.surfaces.stored_answers import CompletionTooLarge
from tests.factories.usage import make_completion, make_record, make_start

ROOT = Path(__file__).resolve().parents[3]

# The recorder with a disk and a database that do as a file beside its folder says.
PROGRAM = textwrap.dedent(
    """
    import os, sys, time
    from pathlib import Path
    from apps.interfaces.gateway.metering import recorder_process, shipper, spool

    weather = Path(sys.argv[1]).parent / "weather"
    write_all, sync = spool._write_all, os.fdatasync

    def is_now(what):
        try:
            return weather.read_text() == what
        except FileNotFoundError:
            return False

    def write(descriptor, content, *, at):
        if is_now("full"):
            raise OSError(28, "No space left on device")
        write_all(descriptor, content, at=at)

    def fdatasync(descriptor):
        if is_now("full"):
            raise OSError(28, "No space left on device")
        while is_now("slow"):
            time.sleep(0.01)
        sync(descriptor)

    spool._write_all, spool.os.fdatasync = write, fdatasync
    shipper.record_usage = shipper.record_completions = lambda *, records: None
    recorder_process.main(sys.argv[1:])
    """
)


@pytest.fixture
def weather(tmp_path, monkeypatch) -> Path:
    """A file whose text says what is wrong with the disk."""
    monkeypatch.setattr(recording, "_COMMAND", (sys.executable, "-c", PROGRAM))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return tmp_path / "weather"


class Settled(dict[str, int]):
    """Counts what is settled of each slice."""

    def note(self, slice_id: str, count: int) -> None:
        self[slice_id] = self.get(slice_id, 0) + count


async def until(is_so) -> None:
    async with asyncio.timeout(30):
        while not is_so():
            await asyncio.sleep(0.01)


@pytest.mark.slow
async def test_what_is_written_is_shipped_and_the_folder_goes(tmp_path, weather):
    settled = Settled()

    recorder = Recorder(tmp_path, name="one", settled=settled.note)
    await recorder.open()
    records = [make_record(slice_id=f"hold_{number % 2}") for number in range(10)]
    for record in records:
        recorder.start(make_start(record))
    assert await asyncio.gather(*(recorder.end(record) for record in records)) == [True] * 10
    await recorder.flush()
    assert recorder.waiting == 0
    await recorder.close()

    assert settled == {"hold_0": 5, "hold_1": 5}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
async def test_a_completion_is_written_with_its_end_and_told_when_it_is_stored(tmp_path, weather):
    stored = Settled()
    recorder = Recorder(tmp_path, name="one", settled=Settled().note, stored=stored.note)
    await recorder.open()
    completion = make_completion(id="chatcmpl-1")
    assert await recorder.end(make_record(), completion=completion)
    await recorder.flush()
    weather.write_text("full")
    assert await recorder.end(make_record(), completion=make_completion(organization_id="org_2")) is False
    weather.unlink()
    await recorder.close()

    assert (stored, recorder.keeping) == ({"org_1": completion.bytes, "org_2": completion.bytes}, 0)


@pytest.mark.slow
async def test_the_start_of_a_request_that_is_charged_under_another_id_is_kept_no_longer_than_its_end(
    tmp_path, weather
):
    recorder = Recorder(tmp_path, name="one", settled=Settled().note)
    await recorder.open()
    record = make_record(id="useb_charged")
    recorder.start(msgspec.structs.replace(make_start(record), id="use_start", charged_id=record.id))
    await asyncio.sleep(4 * recording._START_SECONDS)  # the start is written by itself
    assert await recorder.end(record, start_id="use_start")
    await recorder.flush()
    await recorder.close()

    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
async def test_a_disk_that_cannot_be_written_stops_admission_until_it_can(tmp_path, weather):
    settled = Settled()

    recorder = Recorder(tmp_path, name="one", settled=settled.note)
    await recorder.open()
    assert recorder.has_room()
    weather.write_text("full")
    assert await recorder.end(make_record()) is False
    assert not recorder.has_room()
    assert settled == {"hold_1": 1}  # never to be charged: nothing waits for it
    weather.unlink()
    await until(recorder.has_room)
    assert await recorder.end(make_record()) is True
    await recorder.flush()
    await recorder.close()


@pytest.mark.slow
async def test_usage_is_shipped_when_the_customer_leaves_while_it_is_written(tmp_path, weather):
    settled = Settled()

    recorder = Recorder(tmp_path, name="one", settled=settled.note)
    await recorder.open()
    weather.write_text("slow")
    waiting = asyncio.ensure_future(AnswerEnding(_ticket(recorder), None, None).written())
    await until(lambda: recorder._is_writing)
    waiting.cancel()
    with suppress(asyncio.CancelledError):
        await waiting
    weather.unlink()
    await until(lambda: settled)
    await recorder.close()

    assert settled == {"hold_1": 1}


@pytest.mark.slow
async def test_an_answer_too_large_to_be_stored_is_charged_before_that_is_told(tmp_path, weather, monkeypatch):
    def refuse(meter: Meter) -> None:
        raise CompletionTooLarge("too large", param="store")

    recorder = Recorder(tmp_path, name="one", settled=Settled().note)
    await recorder.open()
    ticket, charged = _ticket(recorder), []
    finish = Ticket.finish

    def finish_noted(self: Ticket, reason: str, *, is_charged: bool = True, completion: object = None) -> object:
        charged.append(is_charged)
        return finish(self, reason, is_charged=is_charged, completion=completion)

    monkeypatch.setattr(Ticket, "finish", finish_noted)
    with pytest.raises(CompletionTooLarge):
        await AnswerEnding(ticket, SimpleNamespace(record=refuse), None).written()
    await recorder.flush()
    await recorder.close()

    assert (charged, ticket.is_finished) == ([True], True)


def _ticket(recorder: Recorder) -> Ticket:
    price = SimpleNamespace(id=None, price_nano=1, per=1)
    slice_ = SimpleNamespace(hold_id="hold_1", reserved_nano=0, spent_nano=0)
    return Ticket(
        Metering(SimpleNamespace(now=lambda: 0.0), None, recorder, None),
        "use_1",
        SimpleNamespace(organization_id="org_1", key_id="key_1"),
        SimpleNamespace(model_name="anneal-demo", adapter_version_id=""),
        SimpleNamespace(input=price, output=price),
        SliceShare(slice_, 0),
        Meter(1),
    )


# A gateway that does nothing but meter, and writes down what was confirmed to it.
GATEWAY = textwrap.dedent(
    """
    import asyncio, sys, pathlib
    import django; django.setup()
    from apps.interfaces.gateway.metering import recorder as recording
    from apps.interfaces.gateway.metering.recorder import Recorder
    from tests.factories.usage import make_completion, make_record, make_start

    recording._COMMAND = (sys.executable, "-c", sys.argv[2])

    async def one(recorder, lane):
        for number in range(100_000):
            record = make_record(id=f"use_{lane}_{number}")
            recorder.start(make_start(record))
            if await recorder.end(record, completion=make_completion(id=f"chatcmpl-{lane}-{number}")):
                sys.stdout.write(record.id + "\\n")
                sys.stdout.flush()

    async def main():
        recorder = Recorder(pathlib.Path(sys.argv[1]), name="doomed", settled=lambda slice_id, count: None)
        await recorder.open()
        sys.stdout.write(f"{recorder._process.pid}\\n")
        await asyncio.gather(*(one(recorder, lane) for lane in range(8)))

    asyncio.run(main())
    """
)


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["gateway", "recorder"])
def test_nothing_confirmed_is_lost_by_kill_9(tmp_path, victim):
    environ = os.environ | {"DJANGO_SETTINGS_MODULE": "apps.config.settings.test", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", GATEWAY, str(tmp_path), PROGRAM]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environ) as gateway:
        recorder_pid = int(gateway.stdout.readline())
        confirmed = {gateway.stdout.readline().strip() for _ in range(500)}
        os.kill(gateway.pid if victim == "gateway" else recorder_pid, signal.SIGKILL)
        confirmed |= {line.strip() for line in gateway.stdout if line.endswith("\n")}

    assert gateway.wait() == (-signal.SIGKILL if victim == "gateway" else -signal.SIGTERM)
    orphan = _adopted(tmp_path)
    assert confirmed <= {record.id for record in orphan.ends}
    stored = {record.id.replace("chatcmpl-", "use_").replace("-", "_") for record in orphan.completions}
    assert confirmed <= stored
    assert len(orphan.starts) <= 8
    orphan.leave()


def _adopted(root: Path) -> Orphan:
    """Return what the gateway left, once the recorder noticed that it is gone."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        for orphan in adopt_orphans(root):
            return orphan
        time.sleep(0.01)
    raise AssertionError("the recorder outlived its gateway")
