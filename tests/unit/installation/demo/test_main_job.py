"""The main job has a next step for every state of a job, explains it, and comes to an end."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from demo.main_job import __main__ as program
from demo.main_job import jobs, pauses
from demo.main_job.platform import DemoFailed
from demo.main_job.state import State
from tests.support.scripted_main_job import Clock, ScriptedPlatform, become, nothing, say, succeed

pytestmark = pytest.mark.usefixtures("clock")
CAP_EVENT = "Paused at the spend cap; the last checkpoint is kept"
FAILURE = {"code": "internal_error", "message": "KeyError: 'x'", "cause": "A fault of our own software."}
STALLED = {
    "code": "stalled", "blame": "platform", "message": "No step for 900 s.", "cause": "The run stalled twice."
}  # fmt: skip
NO_WORKER = {"code": "cannot_launch", "blame": "customer", "message": "No worker is online."}
Train = Callable[[], Any]


def test_a_terminal_without_the_bars_signs_shows_it_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(program.sys, "stdout", io.TextIOWrapper(written, encoding="iso-8859-1"))
    monkeypatch.setattr(program.sys, "argv", ["main_job", "--home", "."])
    monkeypatch.setattr(program, "run", lambda _: program.Stage(is_terminal=True).bar(0.5, "training") or {})

    assert program.main() == 0
    assert b"????  50%  training" in written.getvalue()


def test_a_job_is_created_with_a_cap_far_above_its_quote(scripted: ScriptedPlatform, train: Train) -> None:
    scripted.fates = [[nothing, become("running"), succeed]]

    assert train().status == "succeeded"

    [body] = scripted.sent("/jobs$")
    assert float(body["budget"]["max_cost_usd"]) == pytest.approx(20 * 0.06)


def test_a_job_at_its_cap_continues_with_a_higher_one_and_says_why(
    scripted: ScriptedPlatform, train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    pause = [say(CAP_EVENT), become("pausing"), become("paused", cost_usd="1.19")]
    scripted.fates = [[become("running"), *pause, become("running"), succeed]]

    assert train().status == "succeeded"

    [body] = scripted.sent("/resume$")
    assert float(body["budget"]["max_cost_usd"]) == pytest.approx(2.4)
    assert (
        "because it reached its spend cap: $1.1900 of $1.2000 are spent. The cap is now $2.40"
        in capsys.readouterr().out
    )


def test_a_job_kept_from_before_that_is_paused_at_its_cap_continues(
    scripted: ScriptedPlatform, train: Train, state: State
) -> None:
    kept = scripted.add_job("paused", nothing, nothing, nothing, become("running"), succeed, spend_cap_usd="0.06")
    kept["cost_usd"] = "0.058"
    say(CAP_EVENT)(scripted, kept)
    state["lora"] = kept["id"]

    assert train().id == kept["id"]

    assert scripted.sent("/resume$") == [{"budget": {"max_cost_usd": "1"}}]
    assert not scripted.sent("/jobs$")


def test_a_job_that_a_person_paused_continues_after_a_moment_under_its_own_cap(
    scripted: ScriptedPlatform, train: Train, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    scripted.fates = [
        [become("running"), say("Pause requested"), become("paused", cost_usd="0.01"), *[nothing] * 42, succeed]
    ]
    began_at = clock.now

    assert train().status == "succeeded"

    assert scripted.sent("/resume$") == [{}]
    assert clock.now - began_at >= pauses.PAUSED_BY_PERSON_SECONDS
    assert "A person paused the job. It continues in 20 s, or when you press Resume." in capsys.readouterr().out


def test_a_job_that_a_person_resumes_is_left_alone(scripted: ScriptedPlatform, train: Train) -> None:
    paused = [say("Pause requested"), become("paused", cost_usd="0.01"), nothing]
    scripted.fates = [[become("running"), *paused, become("running"), succeed]]

    assert train().status == "succeeded"

    assert not scripted.sent("/resume$")


def test_a_paused_job_that_may_not_continue_fails_with_the_reason(scripted: ScriptedPlatform, train: Train) -> None:
    scripted.fates = [[say("The organization is suspended: pausing"), become("paused", cost_usd="0.01")]]
    refused = {"message": "Add at least $0.99.", "code": "insufficient_quota"}
    scripted.refusals["/resume$"] = [(429, refused)]

    with pytest.raises(DemoFailed, match=r"the organization is suspended, and it cannot .* Add at least .* grant"):
        train()


def test_a_small_cap_that_does_not_pay_for_another_start_is_raised(scripted: ScriptedPlatform, train: Train) -> None:
    scripted.balance = "0.09"
    scripted.fates = [[say("Pause requested"), become("paused", cost_usd="0.01"), *[nothing] * 60, succeed]]

    assert train().status == "succeeded"

    assert scripted.sent("/resume$") == [{"budget": {"max_cost_usd": "0.10"}}]


def test_a_balance_that_does_not_pay_for_another_start_says_who_can_grant_credit(
    scripted: ScriptedPlatform, train: Train
) -> None:
    scripted.fates = [[say("The spend cap is close: stop"), become("paused", cost_usd="1.19")]]
    refused = {"message": "Raise the cap to $2.50.", "code": "invalid_state", "param": "budget.max_cost_usd"}
    scripted.refusals["/resume$"] = [(400, refused)]

    with pytest.raises(DemoFailed, match=r"came close to its spend cap, and it cannot .* Raise the cap .* can grant"):
        train()


def test_old_events_of_a_running_job_are_not_acted_on(
    scripted: ScriptedPlatform, train: Train, state: State, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = scripted.add_job("running", nothing, nothing, say("Step 7"), succeed)
    say(CAP_EVENT)(scripted, kept)
    state["lora"] = kept["id"]

    assert train().status == "succeeded"

    assert not scripted.sent("/resume$")
    said = capsys.readouterr().out
    assert "Step 7" in said and CAP_EVENT not in said


@pytest.mark.parametrize(
    ("end", "words"),
    [
        (become("failed", error=FAILURE), "failed: A fault of our own software. Reported: KeyError: 'x'"),
        (become("failed", error=STALLED), "failed: The run stalled twice. Reported: No step for 900 s."),
        (become("failed", error=NO_WORKER), "failed: No worker is online."),
        (become("cancelled"), "was cancelled."),
    ],
)
@pytest.mark.parametrize("is_kept", [False, True])
def test_after_a_job_without_an_adapter_a_new_one_starts(
    end: Any,
    words: str,
    is_kept: bool,
    scripted: ScriptedPlatform,
    train: Train,
    state: State,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if is_kept:
        state["lora"] = scripted.add_job("queued", end)["id"]
    scripted.fates = [*([] if is_kept else [[become("running"), end]]), [succeed]]

    assert train().id == state["lora"] == "ftjob-2"

    assert f"ftjob-1 {words} A new job starts." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("code", "hint"), [("loss_not_finite", "same way.$"), ("insufficient_quota", "/staff/organizations")]
)
def test_a_failure_that_another_job_would_repeat_ends_the_main_job_with_its_cause(
    code: str, hint: str, scripted: ScriptedPlatform, train: Train, state: State
) -> None:
    error = {"code": code, "blame": "customer", "message": "It cannot be.", "suggestion": {"text": "Change it."}}
    scripted.fates = [[become("failed", error=error)]]

    with pytest.raises(DemoFailed, match=rf"failed: It cannot be\. The platform suggests: Change it\. .*{hint}"):
        train()

    assert len(scripted.jobs) == 1 and not state["lora"]


def test_jobs_that_keep_failing_end_the_main_job(scripted: ScriptedPlatform, train: Train) -> None:
    scripted.fates = [[become("failed", error=FAILURE)] for _ in range(jobs.MAX_JOBS)]

    with pytest.raises(DemoFailed, match="3 jobs ended without an adapter") as failed:
        train()

    assert failed.value.process == "trainer" and len(scripted.jobs) == 3


@pytest.mark.parametrize(
    ("status", "changes", "words", "log"),
    [
        (
            "queued",
            {"live_workers": 0},
            "No trainer has reported lately. The process trainer is missing",
            "trainer.log",
        ),
        ("queued", {}, "The trainer is online and busy.", "trainer.log"),
        (
            "queued",
            {"block_reason": "No time estimate yet: no measurement for CPU yet"},
            "The trainer is online and measures its speed",
            "trainer.log",
        ),
        (
            "queued",
            {"queue_position": None},
            "It has no place in line, as happens while its organization",
            "trainer.log",
        ),
        ("queued", {"block_reason": "No price is set for this pool."}, "not ready: No price is set", "trainer.log"),
        ("queued", {"waiting_reason": "2 jobs run already."}, "The job is queued: 2 jobs run already.", "trainer.log"),
        ("queued", {"queue_position": 4}, "The job is queued behind 3 other jobs of local-cpu.", "trainer.log"),
        ("validating_files", {}, "The files are still being checked.", "celery-data-small.log"),
        ("pausing", {}, "The trainer saves a checkpoint before the job pauses.", "trainer.log"),
        ("running", {}, "The trainer has reported nothing new for a while.", "trainer.log"),
    ],
)
def test_a_job_that_does_not_move_names_what_is_missing_and_gives_up_in_the_end(
    status: str,
    changes: dict[str, Any],
    words: str,
    log: str,
    scripted: ScriptedPlatform,
    train: Train,
    state: State,
    home: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(jobs, "POLL_SECONDS", 10.0)
    scripted.live_workers = changes.pop("live_workers", 1)
    scripted.block_reason = changes.pop("block_reason", None)
    state["lora"] = scripted.add_job(status, **changes)["id"]

    with pytest.raises(DemoFailed, match=f"has been {status.replace('_', ' ')} for .* and nothing changed"):
        train()

    hints = [line for line in capsys.readouterr().out.splitlines() if words in line]
    assert 2 <= len(hints) <= 5 and all(line.endswith(f"Log: {home}/logs/{log}") for line in hints)


def test_a_trainer_that_is_not_ready_yet_is_waited_for_before_the_job_is_created(
    scripted: ScriptedPlatform, train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    scripted.fates = [[succeed]]
    scripted.live_workers = 0
    busy = {"message": "local-cpu: No worker is online.", "code": "cannot_launch"}
    scripted.refusals["/jobs$"] = [(400, busy)]
    scripted.refusals["/estimates$"] = []

    class Later(list):  # type: ignore[type-arg]
        """Answers nothing of its own, and brings the worker online at the 60th look."""

        looks = 0

        def __bool__(self) -> bool:
            self.looks += 1
            scripted.live_workers = int(self.looks > 60)
            return False

    scripted.refusals["/estimates$"] = Later()

    assert train().status == "succeeded"

    assert len(scripted.sent("/jobs$")) == 2
    assert "No trainer has reported lately. The process trainer is missing" in capsys.readouterr().out


def test_a_wallet_that_cannot_pay_says_who_can_grant_credit(scripted: ScriptedPlatform, train: Train) -> None:
    scripted.balance = "0.02"

    with pytest.raises(DemoFailed, match=r"up to \$0.0600, and the balance is \$0.0200.*/staff/organizations"):
        train()


@pytest.mark.parametrize(
    ("status", "code", "message"),
    [
        (400, "spend_cap_too_low", "A spend cap of $0.07 does not pay for one start."),
        (429, "insufficient_quota", "This organization is suspended: an invoice is unpaid."),
    ],
)
def test_a_job_that_the_wallet_does_not_start_says_why_and_who_can_change_it(
    status: int, code: str, message: str, scripted: ScriptedPlatform, train: Train
) -> None:
    scripted.refusals["/jobs$"] = [(status, {"message": message, "code": code})]

    with pytest.raises(DemoFailed) as failed:
        train()

    assert str(failed.value).startswith(f"The job cannot start: {message} An operator can grant credit or lift")
