"""What a worker reports of a rehearsal: its figure, why there is none, or that something else went first."""

import signal
from contextlib import nullcontext

import pytest

from apps.contracts.hyperparameters import Hyperparameters
from apps.contracts.runs import MemoryReport, MemoryRequest
from apps.contracts.worker_api import RehearsalReport, RehearsalRequest
from gpu_workers.trainer.idle import rehearsals
from gpu_workers.trainer.idle.rehearsals import Interrupted, NotRehearsed, Rehearser, rehearse

MEMORY = MemoryRequest(config={"model_type": "llama"}, hyperparameters=Hyperparameters())
FIGURE = MemoryReport(
    allocated_bytes=2, resting_bytes=1, weight_bytes=1, peak_bytes=3, moment="head", moments={"head": 2}
)


class Plane:
    reported: RehearsalReport | None = None

    def take_rehearsal(self) -> RehearsalRequest:
        return RehearsalRequest(digest="d" * 64, memory=MEMORY)

    def report_rehearsal(self, report: RehearsalReport) -> None:
        self.reported = report


@pytest.mark.parametrize(
    ("ends_with", "reported"),
    [
        (FIGURE, RehearsalReport(digest="d" * 64, memory=FIGURE)),
        (NotRehearsed("an odd model"), RehearsalReport(digest="d" * 64, error="an odd model")),
        (Interrupted("a run has arrived"), RehearsalReport(digest="d" * 64)),
    ],
)
def test_an_interrupted_rehearsal_is_given_back_without_an_error(monkeypatch, ends_with, reported) -> None:
    def ended(request: MemoryRequest, **_: object) -> MemoryReport:
        if isinstance(ends_with, Exception):
            raise ends_with
        return ends_with

    plane = Plane()
    monkeypatch.setattr(rehearsals, "rehearse", ended)

    assert Rehearser(plane).run_one(should_stop=lambda: False)
    assert plane.reported == reported


@pytest.mark.parametrize(("is_stopping", "error"), [(True, Interrupted), (False, NotRehearsed)])
def test_a_tracer_that_was_killed_with_its_worker_was_interrupted(monkeypatch, is_stopping, error) -> None:
    class Killed(nullcontext):
        returncode = -signal.SIGTERM

        def communicate(self, *_: object, **__: object) -> tuple[bytes, None]:
            return b"", None

        def kill(self) -> None: ...

        def __enter__(self) -> "Killed":
            return self

    monkeypatch.setattr(rehearsals.subprocess, "Popen", lambda *_, **__: Killed())

    with pytest.raises(error) as raised:
        rehearse(MEMORY, should_stop=lambda: is_stopping)

    assert raised.type is error
