"""The main job, through the public interfaces only: upload, estimate, fine-tune, serve, compare, and read the bill.

    python demo/main_job.py --home .anneal [--rows 200] [--qlora] [--figures FILE]

It talks to the platform with the official `openai` package, for what OpenAI's surface lacks under /api/v1. It keeps
what it did in HOME/demo/state.json: run it again, and it continues where it stopped. For each state of a job it has a
next step: it raises the cap of a paused job, and starts a new job after a failed or cancelled one.
"""

import argparse
import csv
import fcntl
import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import IO, Any

import httpx2  # what openai's client speaks through
import openai

DATA = Path(__file__).resolve().parent / "banking77"
ANSWER_TOKENS = 24  # the longest label has fewer
SCORE_SEED = 7
LANES = 16
BAR_WIDTH = 28
BAR_SECONDS = 30.0  # between two lines where no bar can be drawn
LEAST_CAP_USD = Decimal(1)
CAP_OVER_QUOTE = 20  # a busy machine makes a job slower; what is not spent returns
MOST_JOBS = 3  # of one kind in one run of this program
HINT_SECONDS = 20.0
RUNNING_HINT_SECONDS = 120.0  # steps are reported in bundles
GIVE_UP_SECONDS = 900.0
PAUSED_BY_PERSON_SECONDS = 20.0
_CHECKS_FILES = "celery-data-small"  # the demo's files have some megabytes at most
POLL_SECONDS = 0.5


class DemoFailed(Exception):
    """The main job did not finish; the message says why. `process` is the one whose log may say more."""

    def __init__(self, message: str, *, process: str = "web") -> None:
        super().__init__(message)
        self.process = process


@dataclass
class Stage:
    """Prints one line for each stage, and a bar that moves while one lasts. Seconds count from `began_at`."""

    began_at: float = field(default_factory=time.time)
    is_terminal: bool = field(default_factory=sys.stdout.isatty)
    seconds: dict[str, float] = field(default_factory=dict)
    _marked_at: float = field(default_factory=time.monotonic)
    _bar_at: float = field(default_factory=time.monotonic)

    def line(self, name: str, text: str) -> None:
        clear = "\r\033[K" if self.is_terminal else ""
        sys.stdout.write(f"{clear}{time.time() - self.began_at:7.1f} s  {name:<14} {text}\n")
        sys.stdout.flush()

    def bar(self, share: float, text: str) -> None:
        """Draw the bar; where there is no terminal, print a line now and then."""
        if self.is_terminal:
            full = round(BAR_WIDTH * min(max(share, 0.0), 1.0))
            sys.stdout.write(f"\r\033[K           {'█' * full}{'░' * (BAR_WIDTH - full)} {share:4.0%}  {text}")
            sys.stdout.flush()
        elif time.monotonic() - self._bar_at > BAR_SECONDS:
            self._bar_at = time.monotonic()
            self.line("", text)

    def mark(self, name: str) -> None:
        """Keep how long the stage that ends now took."""
        now = time.monotonic()
        self.seconds[name], self._marked_at = round(now - self._marked_at, 1), now


class State:
    """What was done before, by name. A file that cannot be read counts as none."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._values = _read_object(path)

    def __getitem__(self, name: str) -> Any:
        return self._values.get(name)

    def __setitem__(self, name: str, value: Any) -> None:
        """Write at once, and so that a kill at any moment leaves the old file or the new one."""
        self._values[name] = value
        draft = self._path.with_name(self._path.name + ".part")
        with draft.open("w") as file:
            file.write(json.dumps(self._values, indent=1))
            file.flush()
            os.fsync(file.fileno())
        draft.replace(self._path)


class Platform:
    """The two public doors: OpenAI's surface through its own SDK, and ours through the same client."""

    def __init__(self, home: Path, *, transport: httpx2.BaseTransport | None = None) -> None:
        self.home = home
        self.account = _read_object(home / "demo.json")
        self.url = _read_object(home / "ports.json").get("public_url", "")
        if not self.account or not self.url:
            raise DemoFailed(f"There is no running platform in {home}: start it with `make demo`.")
        # A proxy of the shell's is not for this machine's own addresses. Retries bridge the restart of a process.
        self.openai = openai.OpenAI(
            api_key=self.account["api_key"],
            base_url=f"{self.url}/v1",
            max_retries=8,
            timeout=120,
            http_client=openai.DefaultHttpxClient(trust_env=False, transport=transport),
        )
        self._native = self.openai.with_options(base_url=f"{self.url}/api/v1")

    def get(self, path: str) -> Any:
        return self._native.get(path, cast_to=object)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        return self._native.post(path, body=body, cast_to=object)

    def log(self, process: str) -> str:
        return str(self.home / "logs" / f"{process}.log")


# --- the stages -------------------------------------------------------------------------------------------------


def run_main_job(platform: Platform, state: State, stage: Stage, *, rows: int, folder: Path) -> dict[str, Any]:
    """Upload, estimate, train by LoRA, serve, compare and settle; return the figures."""
    started = time.monotonic()
    file_id = upload(platform, state, stage, folder)
    stage.mark("upload")
    model, job = train_and_serve(platform, state, stage, file_id, name="lora", quantization=None)
    seconds = time.monotonic() - started
    accuracy = {
        "base": score(platform, stage, platform.account["base_model"], rows),
        "lora": score(platform, stage, model, rows),
    }
    stage.mark("score")
    show_answers(platform, stage, model)
    bill = show_bill(platform, stage, job)
    stage.mark("compare_and_bill")
    quote = _extra(job)["estimate"] or {}
    return {
        "model": model,
        "seconds_until_served": round(seconds, 1),
        "seconds_main_job": round(time.monotonic() - started, 1),
        "main_job_ended_at": time.time(),
        "accuracy_base": accuracy["base"],
        "accuracy_lora": accuracy["lora"],
        **{f"quote_seconds_{name}": quote.get(f"train_seconds_{name}") for name in ("p10", "p50", "p90")},
        "training_seconds_billed": _extra(job)["billed_gpu_seconds"],
        **bill,
    }


def run_qlora_job(platform: Platform, state: State, stage: Stage, *, rows: int, folder: Path) -> dict[str, Any]:
    """Train the same file by QLoRA and score its adapter."""
    file_id = upload(platform, state, stage, folder)
    model, job = train_and_serve(platform, state, stage, file_id, name="qlora", quantization="nf4")
    accuracy = score(platform, stage, model, rows)
    stage.mark("qlora_score")
    return {"accuracy_qlora": accuracy, "qlora_training_seconds_billed": _extra(job)["billed_gpu_seconds"]}


def upload(platform: Platform, state: State, stage: Stage, folder: Path) -> str:
    """Return the id of the training file, uploaded now unless it is there and valid."""
    files = platform.openai.files
    kept = _found(lambda: files.retrieve(state["file_id"])) if state["file_id"] else None
    if kept is not None and kept.status != "error":
        stage.line("upload", f"kept from before: {kept.id}")
        return _validated(platform, stage, kept.id).id
    if state["file_id"]:
        stage.line("upload", f"The file {state['file_id']} is gone or not valid: uploading it again.")
    path = folder / "banking77-train.jsonl"
    path.write_text("".join(json.dumps(_chat_row(text, label)) + "\n" for text, label in _read("train.csv")))
    created = files.create(file=path, purpose="fine-tune")
    state["file_id"] = created.id
    checked = _validated(platform, stage, created.id)
    rows = _extra(checked)["validation"]["rows"]
    stage.line("upload", f"{path.name}, {checked.bytes / 1e6:.1f} MB, {rows:,} rows valid: {checked.id}")
    return checked.id


def _validated(platform: Platform, stage: Stage, file_id: str) -> Any:
    def look() -> Any:
        file = platform.openai.files.retrieve(file_id)
        return file if file.status in ("processed", "error") else None

    hint = f"The file is still being checked. The process {_CHECKS_FILES} does that."
    checked = _until(platform, stage, look, lambda: hint, "upload", process=_CHECKS_FILES)
    if checked.status == "error":
        raise DemoFailed(f"The training file is not valid: {checked.status_details}", process=_CHECKS_FILES)
    return checked


def train_and_serve(
    platform: Platform, state: State, stage: Stage, file_id: str, *, name: str, quantization: str | None
) -> tuple[str, Any]:
    """Return a served adapter's name and the job that made it. What went wrong is done again, a few times at most."""
    for _ in range(MOST_JOBS):
        job = train(platform, state, stage, file_id, name=name, quantization=quantization)
        stage.mark(f"{name}_train")
        if model := serve(platform, stage, job):
            stage.mark(f"{name}_serve")
            return model, job
        state[name] = None
    raise DemoFailed(f"No adapter of {MOST_JOBS} jobs could be served.", process="serving-agent")


# --- training ---------------------------------------------------------------------------------------------------


def train(platform: Platform, state: State, stage: Stage, file_id: str, *, name: str, quantization: str | None) -> Any:
    """Return a job that succeeded: the one begun before, or a new one after one that failed or was cancelled."""
    job = _found(lambda: platform.openai.fine_tuning.jobs.retrieve(state[name])) if state[name] else None
    if job is not None:
        stage.line("job", f"kept from before: {job.id}, {job.status.replace('_', ' ')}")
    for attempt in range(MOST_JOBS):
        if job is None:
            job = create_job(platform, stage, file_id, name=name, quantization=quantization)
            state[name], seen = job.id, ""
        else:
            seen = next((event.id for event in _events(platform, job.id)), "")
        job = follow(platform, stage, job.id, seen=seen)
        if job.status == "succeeded":
            return job
        stage.line("job", why_it_ended(job) + (" A new job starts." if attempt + 1 < MOST_JOBS else ""))
        job = None
    raise DemoFailed(f"{MOST_JOBS} jobs ended without an adapter.", process="trainer")


def why_it_ended(job: Any) -> str:
    """Say in plain words why a job has no adapter."""
    if job.status == "cancelled":
        return f"{job.id} was cancelled."
    error = job.error.to_dict() if job.error else {}
    cause, reported = error.get("cause") or "", error.get("message") or "the platform gives no cause"
    advice = (error.get("suggestion") or {}).get("text") or ""
    said = [f"{job.id} failed: {cause or reported}"]
    said += [f"Reported: {reported}"] if cause and reported not in cause else []
    said += [f"The platform suggests: {advice}"] if advice else []
    return " ".join(said)


def create_job(platform: Platform, stage: Stage, file_id: str, *, name: str, quantization: str | None) -> Any:
    """Show what the job will take, and create it with a spend cap far above that."""
    quote = wait_for_quote(platform, stage, file_id, quantization=quantization)
    p90 = Decimal(quote["cost_usd"]["p90"])
    balance = Decimal(platform.get("/billing")["available_usd"])
    if balance < p90:
        raise DemoFailed(f"The job costs up to ${p90:.4f}, and the balance is ${balance:.4f}. {_grant(platform)}")
    cap = min(max(LEAST_CAP_USD, CAP_OVER_QUOTE * p90), balance)

    def create() -> Any:
        try:
            return platform.openai.fine_tuning.jobs.create(
                model=platform.account["base_model"],
                training_file=file_id,
                suffix=f"banking-{name}",
                extra_body={
                    "quantization": quantization,
                    "compute": {"pool": platform.account["pool"]},
                    "budget": {"max_cost_usd": str(cap)},
                },
            )
        except openai.BadRequestError as refused:
            if refused.code == "cannot_launch":  # its worker restarts just now
                return None
            raise

    job = _until(platform, stage, create, lambda: _trainer_hint(platform, file_id), "job", process="trainer")
    stage.line("hold", f"${cap:.2f} set aside for {job.id}, far above the quote. What is not spent returns.")
    return job


def wait_for_quote(platform: Platform, stage: Stage, file_id: str, *, quantization: str | None) -> dict[str, Any]:
    """Print the estimate for each pool, and return that of the pool which trains here."""
    body = {"model": platform.account["base_model"], "training_file": file_id, "quantization": quantization}

    def look() -> dict[str, Any] | None:
        answer: dict[str, Any] = platform.post("/estimates", body)
        return answer if any(pool["is_launchable"] for pool in _own_pools(platform, answer)) else None

    answer = _until(platform, stage, look, lambda: _trainer_hint(platform, file_id), "estimate", process="trainer")
    stage.mark(f"wait_for_quote{'_' + quantization if quantization else ''}")
    recipe = answer["recipe"]
    epochs = "1 epoch" if recipe["epochs"] == 1 else f"{recipe['epochs']} epochs"
    stage.line("estimate", f"for {answer['model']}, {recipe['method']}, {epochs}:")
    for pool in answer["pools"]:
        stage.line("", _pool_line(pool))
    return next(pool for pool in _own_pools(platform, answer) if pool["is_launchable"])


def _own_pools(platform: Platform, answer: dict[str, Any]) -> list[dict[str, Any]]:
    return [pool for pool in answer["pools"] if pool["pool"] == platform.account["pool"]]


def _pool_line(pool: dict[str, Any]) -> str:
    estimate = pool["estimate"]
    memory = f"{estimate['peak_bytes'] / 2**30:5.1f} of {estimate['capacity_bytes'] / 2**30:5.1f} GiB"
    seconds, cost = estimate["train_seconds_p50"], pool["cost_usd"]
    time_and_cost = "time not known   "
    if seconds is not None and cost["p50"] is not None:
        time_and_cost = (
            f"{seconds:6.0f} s  ${float(cost['p50']):.4f} (${float(cost['p10']):.4f} to ${float(cost['p90']):.4f})"
        )
    return f"{pool['gpu_type']:<18} {memory}  {time_and_cost}  {pool['block_reason'] or 'ready'}"


def _trainer_hint(platform: Platform, file_id: str) -> str:
    """Say why no job of the pool starts now."""
    body = {"model": platform.account["base_model"], "training_file": file_id}
    try:
        pools = _own_pools(platform, platform.post("/estimates", body))
    except openai.NotFoundError:  # the file of an earlier job was deleted
        return "The trainer has not taken it yet."
    if not any(pool["live_workers"] for pool in pools):
        return "No trainer has reported lately. The process trainer is missing, still starts or measures its speed."
    reason = pools[0]["block_reason"] or ""
    if reason.startswith("No time estimate yet"):
        return "The trainer is online and measures its speed, which takes up to a minute. The estimate needs this."
    return (
        f"The trainer is online and not ready: {reason.rstrip('.')}." if reason else "The trainer is online and busy."
    )


def follow(platform: Platform, stage: Stage, job_id: str, *, seen: str = "") -> Any:
    """Print state changes after the event `seen` and draw the live loss until the job is over; return the job.

    What to do next follows from the job's state now, never from its events. A paused job is resumed.
    """
    quiet = Quiet()
    while True:
        job = platform.openai.fine_tuning.jobs.retrieve(job_id)
        for event in _new_events(platform, job_id, seen):
            seen = event.id
            _show_event(stage, event)
        if job.status in ("succeeded", "failed", "cancelled"):
            return job
        if job.status == "paused":
            resume(platform, stage, job, is_watched=quiet.is_begun)
        ours = _extra(job)
        hint_after = RUNNING_HINT_SECONDS if job.status == "running" else HINT_SECONDS
        now = (job.status, ours["step"], ours["queue_position"], ours["waiting_reason"], seen)
        quiet.look(now, hint_after=hint_after)
        if quiet.is_too_long:
            text = f"{job.id} has been {job.status.replace('_', ' ')} for {quiet.seconds:.0f} s and nothing changed."
            raise DemoFailed(text, process=_process_of(job))
        if quiet.is_hint_due:
            stage.line("job", f"{why_it_waits(platform, job)} Log: {platform.log(_process_of(job))}")
        time.sleep(POLL_SECONDS)


class Quiet:
    """How long nothing changed, and when that is worth a line."""

    def __init__(self) -> None:
        self._last: Any = None
        self._since = time.monotonic()
        self._hint_after = HINT_SECONDS

    def look(self, value: Any, *, hint_after: float = HINT_SECONDS) -> None:
        if value != self._last:
            self._last, self._since, self._hint_after = value, time.monotonic(), hint_after

    @property
    def is_begun(self) -> bool:
        return self._last is not None

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._since

    @property
    def is_too_long(self) -> bool:
        return self.seconds > GIVE_UP_SECONDS

    @property
    def is_hint_due(self) -> bool:
        """Whether to say something now: first after a short while, then after ever longer ones."""
        if self.seconds < self._hint_after:
            return False
        self._hint_after = self.seconds * 3
        return True


def why_it_waits(platform: Platform, job: Any) -> str:
    """Say what a job that does not move waits for."""
    ours = _extra(job)
    match job.status:
        case "validating_files":
            return f"The files are still being checked. The processes celery and {_CHECKS_FILES} do that."
        case "queued" if ours["waiting_reason"]:
            return f"The job is queued: {ours['waiting_reason']}"
        case "queued" if (ours["queue_position"] or 1) > 1:
            return f"The job is queued behind {ours['queue_position'] - 1} other jobs of {ours['pool']}."
        case "queued":
            return f"The job is queued. {_trainer_hint(platform, job.training_file)}"
        case "pausing":
            return "The trainer saves a checkpoint before the job pauses."
        case _:
            return "The trainer has reported nothing new for a while."


def _process_of(job: Any) -> str:
    return _CHECKS_FILES if job.status == "validating_files" else "trainer"


def resume(platform: Platform, stage: Stage, job: Any, *, is_watched: bool) -> None:
    """Say why the job paused, raise its cap where that stopped it, and continue it."""
    jobs, ours = platform.openai.fine_tuning.jobs, _extra(job)
    reason = why_it_paused(platform, job)
    spent, cap = Decimal(ours["cost_usd"]), Decimal(ours["spend_cap_usd"])
    if is_watched and reason == PAUSE_REASONS["Pause requested"] and _is_resumed_by_a_person(platform, stage, job):
        return
    text, body = f"The job paused because {reason}. It continues from its last checkpoint.", {}
    if 2 * spent >= cap:
        balance = Decimal(platform.get("/billing")["available_usd"])
        raised = min(max(LEAST_CAP_USD, 2 * cap), spent + balance)
        body = {"budget": {"max_cost_usd": str(raised)}}
        text = (
            f"The job paused because {reason}: ${spent:.4f} of ${cap:.4f} are spent. "
            f"The cap is now ${raised:.2f}, and the job continues from its last checkpoint."
        )
    try:
        jobs.resume(job.id, extra_body=body)
    except openai.APIStatusError as refused:
        if jobs.retrieve(job.id).status == "paused":
            text = f"The job paused because {reason}, and it cannot continue: {_message(refused)}"
            raise DemoFailed(
                f"{text} {_grant(platform)}" if refused.code == "insufficient_quota" else text
            ) from refused
        return  # a person resumed or cancelled it
    stage.line("job", text)


def _is_resumed_by_a_person(platform: Platform, stage: Stage, job: Any) -> bool:
    seconds = PAUSED_BY_PERSON_SECONDS
    stage.line("job", f"A person paused the job. It continues in {seconds:.0f} s, or when you press Resume.")
    give_up_at = time.monotonic() + seconds
    while time.monotonic() < give_up_at:
        if platform.openai.fine_tuning.jobs.retrieve(job.id).status != "paused":
            return True
        time.sleep(POLL_SECONDS)
    return False


PAUSE_REASONS = {
    "Paused at the spend cap": "it reached its spend cap",
    "A budget of the organization is used up": "a budget of the organization is used up",
    "The organization is suspended": "the organization is suspended",
    "Pause requested": "a person paused it",
}


def why_it_paused(platform: Platform, job: Any) -> str:
    """Return the reason that the newest event about it gives."""
    for event in _events(platform, job.id):
        for words, reason in PAUSE_REASONS.items():
            if event.message.startswith(words):
                return reason
    return "of a reason that its events do not name"


def _grant(platform: Platform) -> str:
    return f"An operator can grant credit at {platform.url}/staff/organizations; the demo's login is one."


def _show_event(stage: Stage, event: Any) -> None:
    if event.type != "metrics":
        stage.line("job", event.message)
    elif "train_loss" in event.data:
        data = event.data
        text = f"step {data['step']}/{data['total_steps']}  loss {data['train_loss']:.3f}"
        stage.bar(data["step"] / data["total_steps"], f"{text}  {data['tokens_per_second']:,.0f} tokens/s")


def _events(platform: Platform, job_id: str) -> Iterator[Any]:
    """Yield the job's events, newest first."""
    yield from platform.openai.fine_tuning.jobs.list_events(job_id, limit=100)


def _new_events(platform: Platform, job_id: str, seen: str) -> list[Any]:
    fresh = []
    for event in _events(platform, job_id):
        if event.id <= seen:
            break
        fresh.append(event)
    return fresh[::-1]


# --- serving and scoring ----------------------------------------------------------------------------------------


def serve(platform: Platform, stage: Stage, job: Any) -> str | None:
    """Return the adapter's name once it answers; None for one that was deleted or refused and must be made again."""
    model, started = job.fine_tuned_model, time.monotonic()
    quiet = Quiet()
    quiet.look(model)
    while not _answers(platform, model):
        found = _found(lambda: platform.openai.models.retrieve(model))
        if found is None:
            stage.line("serve", f"The adapter {model} was deleted. A new job makes another one.")
            return None
        if _extra(found)["status"] == "refused":
            stage.line("serve", f"The adapter {model} was refused: {_extra(found)['status_reason']} A new job starts.")
            return None
        serving = platform.get(f"/models/{model}/serving")
        if serving["state"] == "off":
            stage.line("serve", f"The adapter {model} was not served. It is now.")
            platform.post(f"/models/{model}/serving", {"is_served": True})
        if quiet.is_too_long:
            text = f"The adapter {model} did not answer within {quiet.seconds:.0f} s: {_why_it_is_silent(serving)}"
            raise DemoFailed(text, process="vllm")
        if quiet.is_hint_due:
            logs = f"Logs: {platform.log('vllm')} and {platform.log('serving-agent')}"
            stage.line("serve", f"{_why_it_is_silent(serving)} {logs}")
        time.sleep(POLL_SECONDS)
    stage.line("serve", f"{model} answers, after {time.monotonic() - started:.1f} s")
    return str(model)


def _why_it_is_silent(serving: dict[str, Any]) -> str:
    match serving["state"]:
        case "waiting" | "loading" | "cold" | "off":
            return "The engine (the process vllm) is still loading the base model or the adapter."
        case "warm":
            return "The engine holds the adapter and does not answer yet."
        case state:
            return f"The adapter is {state}: {serving['reason']}"


def _answers(platform: Platform, model: str) -> bool:
    try:
        _ask_once(platform.openai.with_options(max_retries=0), model, "Is this on?")
    except openai.NotFoundError:
        return False
    except openai.APIError as error:
        if not _passes(error):
            raise
        return False
    return True


def score(platform: Platform, stage: Stage, model: str, rows: int) -> float:
    """Return the share of held-out messages whose greedy answer is exactly the label."""
    sample = random.Random(SCORE_SEED).sample(_read("test.csv"), rows)
    started, right = time.monotonic(), 0
    with ThreadPoolExecutor(LANES) as lanes:
        answers = lanes.map(lambda row: ask(platform, model, row[0]) == row[1], sample)
        for number, is_right in enumerate(answers, start=1):
            right += is_right
            stage.bar(number / rows, f"{model}: {right}/{number}")
    accuracy = right / rows
    spent = time.monotonic() - started
    stage.line("score", f"{accuracy:6.1%} of {rows:,} held-out messages by {model} in {spent:.0f} s")
    return round(accuracy, 4)


def ask(platform: Platform, model: str, text: str) -> str:
    """Return the greedy answer. An engine that restarts is waited for."""
    give_up_at = time.monotonic() + GIVE_UP_SECONDS
    while True:
        try:
            return _ask_once(platform.openai, model, text)
        except openai.APIError as error:
            if not _passes(error) or time.monotonic() > give_up_at:
                raise


def _passes(error: openai.APIError) -> bool:
    """Whether the same request may succeed later: a process restarts or is busy."""
    is_busy = isinstance(error, openai.RateLimitError) and error.code != "insufficient_quota"
    return is_busy or isinstance(error, openai.InternalServerError | openai.APIConnectionError)


def _ask_once(client: openai.OpenAI, model: str, text: str) -> str:
    reply = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": text}], temperature=0, max_tokens=ANSWER_TOKENS
    )
    return (reply.choices[0].message.content or "").strip()


def show_answers(platform: Platform, stage: Stage, model: str) -> None:
    for text, label in random.Random(SCORE_SEED + 1).sample(_read("test.csv"), 3):
        base = " ".join(ask(platform, platform.account["base_model"], text).split())
        stage.line("compare", f"{text.strip()!r}")
        stage.line("", f"expected {label} | adapter {ask(platform, model, text)} | base {base[:40]!r}")


def show_bill(platform: Platform, stage: Stage, job: Any) -> dict[str, Any]:
    """Wait until every request is rated, then show what was charged and that the books balance."""
    bill = _until(
        platform,
        stage,
        lambda: _settled(platform.get("/billing")),
        lambda: "Some requests are not charged yet. The process celery does that.",
        "bill",
        process="celery",
    )
    for line in bill_lines(_extra(job), bill):
        stage.line(*line)
    return {name: bill[name] for name in ("tokens_billed", "ledger_sum_nano")}


def bill_lines(job: dict[str, Any], bill: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield what the job and all inference cost, and what is left."""
    spent, cap = Decimal(job["cost_usd"]), Decimal(job["spend_cap_usd"])
    quote = job["estimate"] or {}
    if quote.get("train_seconds_p50") is not None:
        low, middle, high = (quote[f"train_seconds_{name}"] for name in ("p10", "p50", "p90"))
        yield "quote", f"training was quoted at {middle:.0f} s ({low:.0f} to {high:.0f} s)"
    returned = f"${cap - spent:.4f} of the ${cap:.2f} set aside returned"
    yield "bill", f"the job is billed {job['billed_gpu_seconds']:.1f} s = ${spent:.4f}; {returned}"
    yield "", f"all inference so far: {bill['tokens_billed']:,} tokens = ${Decimal(bill['inference_usd']):.4f}"
    balance, held = (Decimal(bill[name]) for name in ("available_usd", "held_usd"))
    books = f"all ledger entries add up to {bill['ledger_sum_nano']}, as they must"
    yield "", f"balance ${balance:.4f}, held ${held:.4f}; {books}"


def _settled(bill: dict[str, Any]) -> dict[str, Any] | None:
    return None if bill["unrated_requests"] else bill


# --- small things -----------------------------------------------------------------------------------------------


def _until(
    platform: Platform,
    stage: Stage,
    look: Callable[[], Any],
    hint: Callable[[], str],
    name: str,
    *,
    process: str,
) -> Any:
    """Return the first true answer of `look`; after a while print `hint` and the log of `process`."""
    quiet = Quiet()
    while not (found := look()):
        if quiet.is_too_long:
            raise DemoFailed(f"Nothing happened for {quiet.seconds:.0f} s. {hint()}", process=process)
        if quiet.is_hint_due:
            stage.line(name, f"{hint()} Log: {platform.log(process)}")
        time.sleep(POLL_SECONDS)
    return found


def _found(retrieve: Callable[[], Any]) -> Any:
    """Return what is there; None for what was deleted, or belongs to a database that is gone."""
    try:
        return retrieve()
    except openai.NotFoundError:
        return None


def _extra(answered: Any) -> dict[str, Any]:
    """Return what the platform answers beyond the fields the client library knows."""
    extra: dict[str, Any] | None = answered.model_extra
    return extra or {}


def _message(error: openai.APIError) -> str:
    body = error.body if isinstance(error.body, dict) else {}
    return str(body.get("message") or error.message)


def _read(name: str) -> list[tuple[str, str]]:
    with (DATA / name).open(newline="") as file:
        return [(row["text"], row["category"]) for row in csv.DictReader(file)]


def _read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; an empty one where there is none that can be read."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _chat_row(text: str, label: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": label}]}


def _curl(platform: Platform, model: str) -> Iterator[str]:
    body = {"model": model, "messages": [{"role": "user", "content": "My card still has not arrived, where is it?"}]}
    yield f"curl {platform.url}/v1/chat/completions \\"
    yield f"  -H 'Authorization: Bearer {platform.account['api_key']}' -H 'Content-Type: application/json' \\"
    yield f"  -d '{json.dumps(body)}'"


# --- from the command line --------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=200, help="held-out messages to score")
    parser.add_argument("--qlora", action="store_true", help="then run a second job by QLoRA")
    parser.add_argument("--figures", type=Path, help="write the figures, or the reason of a failure, into this file")
    parser.add_argument(
        "--began-at", type=float, default=time.time(), help="Unix time that the printed seconds count from"
    )
    asked = parser.parse_args()
    figures = run(asked)
    if asked.figures:
        asked.figures.write_text(json.dumps(figures) + "\n")
    return 1 if "error" in figures else 0


def run(asked: argparse.Namespace) -> dict[str, Any]:
    """Run what was asked for and return the figures; in their place `error` when it did not finish."""
    home, stage = asked.home.resolve(), Stage(began_at=asked.began_at)
    try:
        platform = Platform(home)
        folder = home / "demo"
        folder.mkdir(exist_ok=True)
        with _alone(folder):
            state = State(folder / "state.json")
            figures = run_main_job(platform, state, stage, rows=asked.rows, folder=folder)
            if asked.qlora:
                figures |= run_qlora_job(platform, state, stage, rows=asked.rows, folder=folder)
    except KeyboardInterrupt:
        stage.line("stopped", "Run it again, and it continues where it stopped.")
        return {"error": "stopped"}
    except (DemoFailed, openai.APIError) as error:
        reason, process = _reason(error, home)
        stage.line("failed", reason)
        stage.line("", f"The log to read: {home / 'logs' / process}.log")
        return {"error": reason}
    sys.stdout.write("\n".join(["", *_curl(platform, figures["model"]), ""]))
    account = platform.account
    sys.stdout.write(f"\nDashboard {platform.url}  {account['email']} / {account['password']}\n")
    return figures | {"seconds_by_stage": stage.seconds}


def _reason(error: Exception, home: Path) -> tuple[str, str]:
    """Return why it failed in words that say what to do, and the process whose log may say more."""
    match error:
        case DemoFailed():
            return str(error), error.process
        case openai.AuthenticationError():
            again = "Stop Anneal with Ctrl-C and run `make demo` again: it makes a new key."
            return f"The API key in {home / 'demo.json'} is not accepted any more. {again}", "web"
        case openai.APIConnectionError():
            return "The web server does not answer. Is Anneal running? `make demo` starts it.", "web"
        case openai.APIError():
            return f"The platform answered: {_message(error)}", "web"
        case _:
            return str(error), "web"


def _alone(folder: Path) -> IO[str]:
    """Hold the folder for this process. Raises DemoFailed while another main job has it."""
    file = (folder / "main_job.lock").open("a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise DemoFailed("The main job runs already, in another process. Wait until it ends.") from None
    return file


if __name__ == "__main__":
    sys.exit(main())
