"""What runs, as it runs: a job with its events and its loss; a batch, or a run of an eval, with its counts."""

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from anneal.api import PATIENT_ATTEMPTS, Api, job_path
from anneal.failures import ExitCode
from anneal.output import console, dollars, fields, moment, notice, plain, span

SUCCEEDED, COMPLETED, FAILED, PAUSED = "succeeded", "completed", "failed", "paused"
# `pausing` and statuses that a later version adds go on; these do not change without a command.
SETTLED = frozenset({SUCCEEDED, FAILED, "cancelled", PAUSED})
_SECONDS = 2.0
_MOST_EVENTS = 100_000
_DRAWN_EVENTS, _PRINTED_EVENTS = 5_000, 100  # of those before the watching began
_BARS = "▁▂▃▄▅▆▇█"
_CURVE_WIDTH, _SHOWN_EVENTS = 60, 6


def states(api: Api, path: str, *, settled: Collection[str]) -> Iterator[dict[str, Any]]:
    """Yield an object again and again, until its status is a settled one."""
    api.attempts = PATIENT_ATTEMPTS
    while True:
        found = api.get(path)
        yield found
        if found["status"] in settled:
            return
        time.sleep(_SECONDS)


@contextmanager
def screen(*, is_drawn: bool, farewell: str) -> Iterator[Live | None]:
    """Give the place to draw in if the output is a terminal. Ctrl-C ends the watching, and not what is watched."""
    shown = console()
    try:
        with Live(console=shown, auto_refresh=False) if is_drawn and shown.is_terminal else nullcontext() as live:
            yield live
    except KeyboardInterrupt:
        notice(f"\n{farewell}")
        raise


def watch_counts(
    api: Api,
    path: str,
    *,
    settled: Collection[str],
    counts: Callable[[dict[str, Any]], tuple[int, int]],
    is_drawn: bool,
    farewell: str,
) -> dict[str, Any]:
    """Follow a batch or a run, drawn if the output is a terminal; return it once its status is a settled one.

    `counts` returns how much of it is done, and all of it, which is 0 until it is known.
    """
    found = dict[str, Any]()
    with screen(is_drawn=is_drawn, farewell=farewell) as live:
        for found in states(api, path, settled=settled):
            if live:
                done, total = counts(found)
                text = f"{done:,} of {total:,}" if total else ""
                live.update(progress_line(found["status"], done, total, text), refresh=True)
    return found


def progress_line(status: str, done: int, total: int | None, text: str) -> Table:
    line = Table.grid(padding=(0, 2))
    line.add_row(Text(status), ProgressBar(total=total or 1, completed=done, width=40), Text(text))
    return line


def new_events(api: Api, job_id: str, *, last_id: str | None, limit: int = _MOST_EVENTS) -> list[dict[str, Any]]:
    """Return the events after `last_id`, the oldest first; without it, the latest ones."""
    found: list[dict[str, Any]] = []
    for event in api.pages(f"{job_path(job_id)}/events", limit=limit):
        if event["id"] == last_id:
            break
        found.append(event)
    return found[::-1]


def follow(api: Api, job_id: str, *, tail: int) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Yield the job and its new events again and again, until the job has settled."""
    last_id: str | None = None
    for job in states(api, job_path(job_id), settled=SETTLED):
        # Once there was an event, all later ones are read; before, only the latest.
        events = new_events(api, job_id, last_id=last_id, limit=_MOST_EVENTS if last_id else tail)
        last_id = events[-1]["id"] if events else last_id
        yield job, events


def watch(api: Api, job_id: str, *, on_event: Callable[[dict[str, Any]], None], is_drawn: bool) -> dict[str, Any]:
    """Follow a job, drawn if the output is a terminal, else event by event; return it once it has settled."""
    view, job = View(), dict[str, Any]()
    farewell = (
        f"{job_id} keeps running. Watch it again with `anneal jobs watch {job_id}`, "
        f"or stop it with `anneal jobs cancel {job_id}`."
    )
    with screen(is_drawn=is_drawn, farewell=farewell) as live:
        for job, events in follow(api, job_id, tail=_DRAWN_EVENTS if live else _PRINTED_EVENTS):
            if live:
                view.add(events)
                live.update(view.render(job), refresh=True)
            else:
                for event in events:
                    on_event(event)
    return job


@dataclass
class View:
    """What is drawn of a job: progress, the curve of its loss and the latest events."""

    losses: list[float] = field(default_factory=list)
    valid_loss: float | None = None
    lines: list[str] = field(default_factory=list)

    def add(self, events: list[dict[str, Any]]) -> None:
        for event in events:
            data = event["data"] or {}
            if (loss := data.get("train_loss")) is not None:
                self.losses.append(loss)
            elif (loss := data.get("valid_loss")) is not None:
                self.valid_loss = loss
            else:
                self.lines.append(event_line(event))
        self.lines = self.lines[-_SHOWN_EVENTS:]

    def render(self, job: dict[str, Any]) -> Group:
        total = job["total_steps"]
        place = f"step {job['step']} of {total}" if total else waiting_text(job)
        head = progress_line(job["status"], job["step"], total, place)
        facts = fields(
            [
                ("Time left", span(job["seconds_remaining"])),
                ("Cost", dollars(job["cost_usd"])),
                ("Training loss", f"{self.losses[-1]:.4f}" if self.losses else None),
                ("Validation loss", f"{self.valid_loss:.4f}" if self.valid_loss is not None else None),
            ]
        )
        return Group(head, Text(curve(self.losses)), Text(plain(facts)), Text("\n".join(self.lines)))


def curve(values: list[float], *, width: int = _CURVE_WIDTH) -> str:
    """Return the values as a line of bars, each the mean of its share of the values."""
    if not values:
        return ""
    count = min(width, len(values))
    ends = [len(values) * number // count for number in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(ends)]
    low, high = min(means), max(means)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((mean - low) * scale)] for mean in means)


def waiting_text(job: dict[str, Any]) -> str:
    place = job["queue_position"]
    return job["waiting_reason"] or (f"place {place} in the queue" if place is not None else "")


def event_line(event: dict[str, Any]) -> str:
    level = "" if event["level"] == "info" else f"{event['level']}: "
    return plain(f"{moment(event['created_at'])}  {level}{event['message']}")


def job_text(job: dict[str, Any]) -> str:
    """Return what a person wants to know of a job."""
    error, steps = job["error"] or {}, job["total_steps"]
    advice = error.get("suggestion") or {}
    return fields(
        [
            ("Job", job["id"]),
            ("Status", job["status"]),
            ("Base model", job["base_model"]),
            ("Continues", job["model"] if job["model"] != job["base_model"] else None),
            ("Model", job["fine_tuned_model"]),
            ("Training file", job["training_file"]),
            ("Pool", job["pool"]),
            ("Machines", job["node_count"] if (job["node_count"] or 1) > 1 else None),
            ("Step", f"{job['step']} of {steps}" if steps else None),
            ("Time left", span(job["seconds_remaining"])),
            ("Waiting", waiting_text(job)),
            ("Spend cap", dollars(job["spend_cap_usd"])),
            ("Cost", dollars(job["cost_usd"])),
            ("Error", error.get("message")),
            ("Fix", advice.get("text")),
        ]
    )


def exit_code_of(job: dict[str, Any]) -> ExitCode:
    return ExitCode.DONE if job["status"] == SUCCEEDED else ExitCode.NEGATIVE
