"""The stream of a job's page: what a watcher sees, and who may watch."""

import asyncio
import json
import time

import pytest
from asgiref.sync import async_to_sync, sync_to_async
from django.db import connection

from apps.accounts.models import Membership, Organization, Project, User
from apps.contracts import runs as wire
from apps.core.database.clock import db_now
from apps.core.database.tenancy import tenant
from apps.interfaces.web.shell import live
from apps.interfaces.web.shell.live import Watcher, follow_job
from tests.support.attempts import step
from tests.support.waiting import wait_until


def test_the_stream_of_a_foreign_job_is_not_found(floor, client_for, charlie, rival, alice):
    job = floor.job()

    assert client_for(charlie).get(f"/jobs/{job.pk}/stream").status_code == 404
    assert client_for(None).get(f"/jobs/{job.pk}/stream").status_code == 302
    assert client_for(alice).get("/jobs/ftjob-unknown/stream").status_code == 404


@pytest.mark.slow
@pytest.mark.django_db(transaction=True)
def test_a_watcher_who_comes_back_gets_exactly_what_it_missed(floor, organization, alice, claim, client_for):
    job = floor.job()
    attempt = claim().start()
    for number in range(1, 4):
        attempt.report(wire.StepCompleted, **step(number, 3.0 / number))
    attempt.succeed(floor.base_model)
    with tenant(organization=organization):
        sequences = list(job.events.order_by("sequence").values_list("sequence", flat=True))

    watcher = Watcher(alice, client_for(alice).session.session_key, organization.pk)

    async def watch(after: int) -> list[str]:
        stream = follow_job(watcher=watcher, job_id=job.pk, after=after)
        return [frame.decode() async for frame in stream]

    everything, rest = asyncio.run(watch(0)), asyncio.run(watch(4))

    assert [_id(frame) for frame in everything[:-1]] == sequences == list(range(1, len(sequences) + 1))
    assert [_id(frame) for frame in rest[:-1]] == sequences[4:]
    assert json.loads(everything[-1].partition("data: ")[2]) == {"status": "succeeded"}


@pytest.mark.slow
@pytest.mark.django_db(transaction=True)
def test_a_watcher_sees_progress_money_and_time_move(floor, organization, alice, claim, client_for):
    job = floor.job()
    attempt = claim().start()
    for number, speed in ((1, 900.0), (2, 10.0), (3, 950.0)):
        fields = step(number, 3.0) | {"tokens_per_second": speed, "training_seconds": 20.0 * number}
        attempt.report(wire.StepCompleted, **fields)

    watcher = Watcher(alice, client_for(alice).session.session_key, organization.pk)

    async def read() -> list[str]:
        stream = follow_job(watcher=watcher, job_id=job.pk, after=0)
        return [(await anext(stream)).decode() for _ in range(job_events + 1)]

    with tenant(organization=organization):
        job_events = job.events.count()
    *_, last, between = (frame.partition("data: ")[2] for frame in asyncio.run(read()))

    figures = {"percent": 30, "spent": "$0.06", "throughput": "900"}
    for frame in (last, between):  # with the step, and while nothing happens
        assert json.loads(frame).items() >= figures.items()
        assert json.loads(frame)["time_left"].startswith("52m ")  # its three steps took half an hour


@pytest.mark.slow
@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(
    "ending", ["removed", "suspended", "signed out", "project private", "viewing stopped", "viewing too long"]
)
def test_a_watcher_who_may_watch_no_longer_is_left_out(floor, organization, bob, olga, client_for, monkeypatch, ending):
    """Asked again every few seconds, here at once, and with no help of what was found a moment ago."""
    monkeypatch.setattr(live, "ASK_AGAIN_SECONDS", -1.0)
    monkeypatch.setattr(live, "LOOK_ANYWAY_SECONDS", 0.01)
    person = olga if ending.startswith("viewing") else bob
    job, browser = floor.job(), client_for(person)
    if person is olga:
        browser.post(f"/staff/organizations/{organization.pk}/view")
    assert browser.get(f"/jobs/{job.pk}").status_code == 200
    watcher = Watcher(person, browser.session.session_key, organization.pk)

    def end() -> None:
        match ending:
            case "removed":
                Membership.objects.filter(user=bob).delete()
            case "suspended":
                Organization.objects.filter(pk=organization.pk).update(suspended_at=db_now())
            case "project private":
                Project.objects.filter(pk=job.project_id).update(is_private=True)
            case "viewing stopped":
                browser.post("/staff/viewing/stop")
            case "viewing too long":
                session = browser.session
                session["viewing"] |= {"ends_at": time.time() - 1}
                session.save()
            case _:
                browser.session.flush()
        connection.close()  # of the thread that it runs in

    async def watch() -> list[bytes]:
        stream = follow_job(watcher=watcher, job_id=job.pk, after=0)
        seen = [await anext(stream), await anext(stream)]
        await sync_to_async(end)()
        return seen + [frame async for frame in stream]

    assert len(asyncio.run(asyncio.wait_for(watch(), 30))) < 6


@pytest.mark.django_db(transaction=True)
def test_a_person_follows_so_many_pages_at_once_and_an_organization_so_many(
    floor, organization, alice, bob, client_for, monkeypatch
):
    monkeypatch.setattr(live, "MAX_OF_PERSON", 2)
    monkeypatch.setattr(live, "MAX_OF_ORGANIZATION", 3)
    job = floor.job()
    browsers = {person: client_for(person) for person in (alice, bob)}

    def open_another(person: User) -> int:
        status = browsers[person].get(f"/jobs/{job.pk}/stream").status_code
        connection.close()  # of the thread that it runs in
        return status

    async def watch() -> list[int]:
        watchers = [Watcher(person, "a-session", organization.pk) for person in (alice, alice, bob)]
        streams, found = [follow_job(watcher=watcher, job_id=job.pk, after=0) for watcher in watchers], []
        for stream, person in zip(streams, (alice, bob, bob), strict=True):
            await anext(stream)
            found.append(await sync_to_async(open_another)(person))
        for stream in streams:
            await stream.aclose()
        return [*found, await sync_to_async(open_another)(alice)]

    assert asyncio.run(watch()) == [200, 200, 429, 200]


@pytest.mark.slow
@pytest.mark.django_db(transaction=True)
def test_an_event_is_read_once_for_all_who_watch_the_job(floor, organization, alice, bob, claim, monkeypatch):
    monkeypatch.setattr(live, "ASK_AGAIN_SECONDS", 1000.0)
    monkeypatch.setattr(live, "LOOK_ANYWAY_SECONDS", 1000.0)
    job, attempt, read, reads = floor.job(), claim().start(), live._read, []
    monkeypatch.setattr(live, "_read", lambda *of: reads.append(of) or read(*of))
    watchers = [Watcher(person, "a-session", organization.pk) for person in (alice, bob) for _ in range(8)]

    async def until(stream, end: str) -> str:
        async for frame in stream:
            if end in frame.decode():
                return frame.decode()
        raise AssertionError("the stream ended")

    async def watch() -> list[str]:
        streams = [follow_job(watcher=watcher, job_id=job.pk, after=0) for watcher in watchers]
        await asyncio.gather(*(until(stream, "event: metric") for stream in streams))
        waiting = [asyncio.create_task(until(stream, "train_loss")) for stream in streams]
        await sync_to_async(attempt.report)(wire.StepCompleted, **step(1, 3.0))
        frames = await asyncio.gather(*waiting)
        for stream in streams:
            await stream.aclose()
        return frames

    frames = asyncio.run(asyncio.wait_for(watch(), 30))

    assert len({_id(frame) for frame in frames}) == 1
    assert len(reads) < len(watchers)  # a few: at the begin, once Redis listens, at the event, and after it


@pytest.mark.slow
@pytest.mark.django_db(transaction=True)
def test_an_event_that_comes_while_a_watcher_reads_is_not_missed(floor, organization, alice, claim, monkeypatch):
    monkeypatch.setattr(live, "ASK_AGAIN_SECONDS", 1000.0)
    monkeypatch.setattr(live, "LOOK_ANYWAY_SECONDS", 1000.0)
    job, attempt, read, added = floor.job(), claim().start(), live._read, []

    def read_too_early(*of):
        found = read(*of)
        if not found[0] and not added:
            channel = live.hub._channels[f"job:{job.pk}"]
            added.append(channel.rings)
            attempt.report(wire.StepCompleted, **step(1, 3.0))
            connection.close()  # of the thread that it runs in
            wait_until(lambda: channel.rings != added[0], "Redis did not say it", seconds=20)
        return found

    monkeypatch.setattr(live, "_read", read_too_early)

    async def watch() -> bool:
        stream = follow_job(watcher=Watcher(alice, "a-session", organization.pk), job_id=job.pk, after=0)
        async for frame in stream:
            if "train_loss" in frame.decode():
                return True
        return False

    assert asyncio.run(asyncio.wait_for(watch(), 30))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("last_seen", "first"),
    [("5", 6), ("\u00b2", 1), ("9" * 5000, 1), ("-3", 1)],
    ids=["a number", "superscript", "huge", "negative"],
)
def test_a_browser_that_reconnects_goes_on_after_the_last_event_it_saw(
    last_seen,
    first,
    floor,
    client_for,
    alice,
    claim,
):
    """A browser repeats the address it began with and adds the header, which therefore goes before `after`."""
    job = floor.job()
    attempt = claim().start()
    for number in range(1, 4):
        attempt.report(wire.StepCompleted, **step(number, 3.0 / number))
    attempt.succeed(floor.base_model)

    async def read(response) -> list[str]:
        return [frame.decode() async for frame in response]

    url = f"/jobs/{job.pk}/stream?after=2"
    resumed = async_to_sync(read)(client_for(alice).get(url, headers={"Last-Event-ID": last_seen}))
    fresh = async_to_sync(read)(client_for(alice).get(url))

    assert (_id(resumed[0]), _id(fresh[0])) == (first, 3)
    assert resumed[-1] == fresh[-1] and resumed[-1].startswith("event: done")


def _id(frame: str) -> int:
    return int(frame.partition("id: ")[2].partition("\n")[0])


@pytest.mark.slow
@pytest.mark.django_db(transaction=True)
def test_a_watcher_hears_that_a_checkpoint_was_saved(floor, organization, alice, claim, client_for):
    job = floor.job()
    attempt = claim().start()
    attempt.report(wire.StepCompleted, **step(4, 2.0))
    attempt.checkpoint(step=4, seconds=4.0)
    attempt.succeed(floor.base_model)
    watcher = Watcher(alice, client_for(alice).session.session_key, organization.pk)

    async def watch() -> list[str]:
        return [frame.decode() async for frame in follow_job(watcher=watcher, job_id=job.pk, after=0)]

    frames = [frame for frame in asyncio.run(watch()) if "event: log" in frame]
    told = [json.loads(frame.partition("data: ")[2]) for frame in frames]

    assert [(each["step"], each["bytes"] > 0) for each in told if "bytes" in each] == [(4, True)]
