"""A cloud announces that it takes the machine away: the run saves a checkpoint and is given back in time."""

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from apps.contracts.runs import CheckpointSaved, StepCompleted
from gpu_workers.common import interruptions
from tests.support.agent import Draining, add_run, make_agent
from tests.support.waiting import wait_until
from tests.twins.http_server import Answer, Request, serve_http

AZURE_ASSET_TAG = "7783-7084-3265-9085-8269-3286-77"
FIRMWARE = {
    "aws": {"sys_vendor": "Amazon EC2\n"},
    "google": {"sys_vendor": "Google\n"},
    "azure": {"sys_vendor": "Microsoft Corporation\n", "chassis_asset_tag": f"{AZURE_ASSET_TAG}\n"},
}


class Metadata:
    """The metadata services of the three clouds, on one address; `is_taken` announces the end of this machine."""

    def __init__(self) -> None:
        self.is_taken = self.is_neighbour_taken = self.is_broken = False
        self.asked: list[str] = []

    def answer(self, request: Request) -> Answer:
        self.asked.append(request.path)
        headers, path = request.headers, request.path.partition("?")[0]
        if self.is_broken:
            return Answer(503)
        if path == "/latest/api/token":
            is_valid = request.method == "PUT" and headers["X-aws-ec2-metadata-token-ttl-seconds"]
            return Answer(content=b"the-token") if is_valid else Answer(403)
        if path == "/latest/meta-data/spot/instance-action":
            if headers["X-aws-ec2-metadata-token"] != "the-token":
                return Answer(401)
            action = json.dumps({"action": "terminate", "time": "2026-11-30T12:00:00Z"})
            return Answer(content=action.encode()) if self.is_taken else Answer(404)
        if path == "/computeMetadata/v1/instance/preempted" and headers["Metadata-Flavor"] == "Google":
            return Answer(content=b"TRUE" if self.is_taken else b"FALSE")
        if path == "/metadata/instance/compute/name" and headers["Metadata"] == "true":
            return Answer(content=b"trainer-1")
        if path == "/metadata/scheduledevents" and headers["Metadata"] == "true":
            return Answer(content=json.dumps({"DocumentIncarnation": 1, "Events": self._events()}).encode())
        return Answer(400)

    def _events(self) -> list[dict[str, object]]:
        events: list[dict[str, object]] = [
            {"EventType": "Freeze", "Resources": ["trainer-1"], "EventStatus": "Started"}
        ]
        if self.is_neighbour_taken:
            events.append({"EventType": "Preempt", "Resources": ["trainer-2"], "EventStatus": "Scheduled"})
        if self.is_taken:
            events.append({"EventType": "Preempt", "Resources": ["trainer-1"], "EventStatus": "Scheduled"})
        return events


@pytest.fixture
def metadata() -> Metadata:
    return Metadata()


@pytest.fixture
def url(metadata: Metadata) -> Iterator[str]:
    with serve_http(metadata.answer) as url:
        yield url


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interruptions, "_SECONDS_BETWEEN_LOOKS", 0.05)


@pytest.fixture
def stopped() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def look_of(cloud: str, folder: Path) -> interruptions.Look | None:
    for name, text in FIRMWARE.get(cloud, {"sys_vendor": "Microsoft Corporation\n"}).items():
        (folder / name).write_text(text)
    return interruptions.find_cloud(folder)


def test_a_machine_elsewhere_has_no_cloud_to_ask(tmp_path):
    assert interruptions.find_cloud(tmp_path) is None
    assert look_of("a desktop of the vendor of Azure", tmp_path) is None


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("cloud", FIRMWARE)
def test_the_notice_of_a_cloud_is_seen_once(cloud, metadata, url, stopped, tmp_path):
    seen: list[float] = []
    metadata.is_neighbour_taken = True
    watch = interruptions.Watch(look_of(cloud, tmp_path), url=url)
    assert not watch.has_notice()
    watch.start(stopped=stopped, on_notice=lambda: seen.append(time.monotonic()))
    wait_until(lambda: len(metadata.asked) > 6, "it does not ask")
    assert seen == []

    metadata.is_taken = True
    wait_until(lambda: seen, "it does not see the notice")
    asked = len(metadata.asked)
    time.sleep(0.3)
    assert (len(seen), len(metadata.asked)) == (1, asked)
    assert watch.has_notice()  # as a process that starts again sees it


@pytest.mark.usefixtures("impatient")
def test_metadata_that_fail_are_reported_once_and_asked_again(metadata, url, stopped, tmp_path, caplog):
    metadata.is_broken, seen = True, threading.Event()
    interruptions.Watch(look_of("google", tmp_path), url=url).start(stopped=stopped, on_notice=seen.set)
    wait_until(lambda: len(metadata.asked) > 3, "it gives up")
    assert [record.levelname for record in caplog.records if "metadata fails" in record.message] == ["WARNING"]

    metadata.is_broken, metadata.is_taken = False, True
    assert seen.wait(20)


@pytest.mark.slow
def test_a_run_is_given_back_with_a_checkpoint_within_ten_seconds(
    plane, models, tmp_path, metadata, url, stopped, record_property
):
    add_run(plane, models)
    agent = make_agent(plane, tmp_path, "wait")
    (tmp_path / "firmware").mkdir()
    watch = interruptions.Watch(look_of("aws", tmp_path / "firmware"), url=url)
    watch.start(stopped=stopped, on_notice=agent.request_stop)
    draining = Draining(agent)
    plane.wait_for(lambda: plane.events_of(StepCompleted))

    began = time.monotonic()
    metadata.is_taken = True
    plane.wait_for(lambda: plane.events_of(CheckpointSaved))
    seconds = time.monotonic() - began
    draining.join()

    record_property("seconds_notice_to_checkpoint", round(seconds, 2))
    assert seconds < 10
