"""The outbox's topics: each names a task that takes its payload, and a lane that a worker serves."""

import ast
import datetime
import inspect
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from celery.beat import Scheduler
from django.conf import settings
from django.utils.module_loading import import_string

from apps.config.celery import app
from apps.config.schedule import PAYMENTS_SCHEDULE, SCHEDULE
from apps.datasets.intake.lanes import SMALL_BYTES, lane_of
from scripts.processes import PROGRAMS, Program

APPS = Path(__file__).resolve().parents[4] / "apps"


def published() -> Iterator[tuple[str, str, frozenset[str]]]:
    """Yield place, topic and the payload's keys of each call of `publish` or `announce` that spells them out."""
    for path in APPS.rglob("*.py"):
        source = path.read_text()
        for function in ast.walk(ast.parse(source)) if "publish(" in source or "announce(" in source else ():
            if isinstance(function, ast.FunctionDef):
                yield from _calls(path, function)


def _calls(path: Path, function: ast.FunctionDef) -> Iterator[tuple[str, str, frozenset[str]]]:
    local = {
        target.id: value
        for node in ast.walk(function)
        if isinstance(node, ast.Assign)
        for target, value in _pairs(node.targets[0], node.value)
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(function):
        if not isinstance(node, ast.Call):
            continue
        given = {keyword.arg: keyword.value for keyword in node.keywords}
        if isinstance(node.func, ast.Attribute) and node.func.attr == "publish":
            topic, payload = given.get("topic"), given.get("payload")
        elif isinstance(node.func, ast.Name) and node.func.id == "announce":
            mail = given.get("mail")
            mail = mail.orelse if isinstance(mail, ast.IfExp) else mail
            topic, payload = mail.elts if isinstance(mail, ast.Tuple) else (None, None)
        else:
            continue
        if isinstance(payload, ast.Name):
            payload = local.get(payload.id)
        if not isinstance(payload, ast.Dict):
            continue
        keys = frozenset(key.value for key in payload.keys if isinstance(key, ast.Constant))
        for each in (topic.body, topic.orelse) if isinstance(topic, ast.IfExp) else (topic,):
            if isinstance(each, ast.Constant):
                yield f"{path.relative_to(APPS)}:{node.lineno}", str(each.value), keys


def _pairs(target: ast.expr, value: ast.expr) -> Iterable[tuple[ast.expr, ast.expr]]:
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        return zip(target.elts, value.elts, strict=True)
    return ((target, value),)


PUBLISHED = sorted(published(), key=lambda call: call[0])


@pytest.mark.parametrize(("place", "topic", "keys"), PUBLISHED)
def test_the_task_of_a_topic_takes_the_payload_that_is_published(place: str, topic: str, keys: frozenset[str]) -> None:
    task: Any = import_string(settings.OUTBOX_TOPICS[topic].task)

    inspect.signature(task).bind(**dict.fromkeys(keys))


def test_each_topic_is_published_somewhere() -> None:
    assert {topic for _, topic, _ in PUBLISHED} == set(settings.OUTBOX_TOPICS)


def served_queues(programs: Iterable[Program]) -> set[str]:
    commands = [program.command.split() for program in programs if " --queues " in program.command]
    return {queue for command in commands for queue in command[command.index("--queues") + 1].split(",")}


def test_each_periodic_task_has_a_worker_also_without_stripe() -> None:
    router = app.amqp.router
    queues = {router.route({}, entry["task"])["queue"].name for entry in SCHEDULE.values()}
    of_payments = {router.route({}, entry["task"])["queue"].name for entry in PAYMENTS_SCHEDULE.values()}

    assert queues <= served_queues(program for program in PROGRAMS if not program.only_with)
    assert of_payments == {"payments"}


def test_each_lane_has_a_worker() -> None:
    served = served_queues(PROGRAMS)
    lanes = {topic.lane for topic in settings.OUTBOX_TOPICS.values()} | {lane_of(0), lane_of(SMALL_BYTES + 1)}

    assert lanes <= served


def test_hourly_and_daily_tasks_run_although_beat_starts_anew_every_twelve_hours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a container, beat forgets at each start when a task last ran."""
    whole = SCHEDULE | PAYMENTS_SCHEDULE
    rare = {name: dict(each) for name, each in whole.items() if each["schedule"] not in range(3_600)}
    began = clock = datetime.datetime(2026, 11, 3, 7, 43, tzinfo=datetime.UTC)
    runs: dict[str, list[datetime.datetime]] = {name: [began] for name in rare}
    monkeypatch.setattr(app, "now", lambda: clock)
    monkeypatch.setattr(Scheduler, "apply_entry", lambda _, entry, **__: runs[entry.name].append(clock))

    for start in range(6):
        beat = Scheduler(app, lazy=True)
        beat.update_from_dict(rare)
        while clock < began + (start + 1) * datetime.timedelta(hours=12):
            clock += datetime.timedelta(seconds=max(beat.tick(), 1))

    assert len(rare) > 12
    for name, times in runs.items():
        assert max(after - before for before, after in pairwise([*times, clock])) < datetime.timedelta(hours=25), name
        assert min(after - before for before, after in pairwise(times[1:])) >= datetime.timedelta(minutes=59), name
