"""The main job, through the public interfaces only: upload, estimate, fine-tune, serve, compare, and read the bill.

    python demo/main_job.py --home .anneal [--rows 200] [--qlora] [--json]

It talks to the platform with the official `openai` package and, for what OpenAI's surface lacks, plain HTTP under
/api/v1. State is kept in HOME/demo/state.json, so that running it again goes on where it stopped.
"""

import argparse
import csv
import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai

DATA = Path(__file__).resolve().parent / "banking77"
ANSWER_TOKENS = 24  # the longest label has fewer
SCORE_SEED = 7
LANES = 16
LOAD_TIMEOUT_SECONDS = 180
BAR_WIDTH = 28


class DemoFailed(Exception):
    """The main job did not get through; the message says at which stage and why."""


@dataclass
class Stage:
    """Prints one line for each stage, and a bar that moves while one lasts."""

    started_at: float = field(default_factory=time.monotonic)
    is_terminal: bool = field(default_factory=sys.stdout.isatty)

    def line(self, name: str, text: str) -> None:
        self._clear()
        sys.stdout.write(f"{time.monotonic() - self.started_at:7.1f} s  {name:<10} {text}\n")
        sys.stdout.flush()

    def bar(self, share: float, text: str) -> None:
        if self.is_terminal:
            full = round(BAR_WIDTH * min(max(share, 0.0), 1.0))
            sys.stdout.write(f"\r\033[K           {'█' * full}{'░' * (BAR_WIDTH - full)} {share:4.0%}  {text}")
            sys.stdout.flush()

    def _clear(self) -> None:
        if self.is_terminal:
            sys.stdout.write("\r\033[K")


class State:
    """What was done before, by name; written at once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._values: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}

    def __getitem__(self, name: str) -> Any:
        return self._values.get(name)

    def __setitem__(self, name: str, value: Any) -> None:
        self._values[name] = value
        self._path.write_text(json.dumps(self._values, indent=1))


class Platform:
    """The two public doors: OpenAI's surface through its own SDK, and ours."""

    def __init__(self, home: Path) -> None:
        self.account = json.loads((home / "demo.json").read_text())
        self.url = json.loads((home / "ports.json").read_text())["public_url"]
        self.openai = openai.OpenAI(api_key=self.account["api_key"], base_url=f"{self.url}/v1", max_retries=4)
        headers = {"Authorization": f"Bearer {self.account['api_key']}"}
        self.native = httpx.Client(base_url=f"{self.url}/api/v1", headers=headers, timeout=60)

    def get(self, path: str) -> Any:
        return _checked(self.native.get(path))

    def post(self, path: str, body: dict[str, Any]) -> Any:
        return _checked(self.native.post(path, json=body))


def _checked(response: httpx.Response) -> Any:
    if response.is_error:
        raise DemoFailed(f"{response.request.url.path}: {response.text}")
    return response.json()


# --- the stages -------------------------------------------------------------------------------------------------


def run_main_job(platform: Platform, state: State, stage: Stage, *, rows: int, folder: Path) -> dict[str, Any]:
    """Upload, estimate, train by LoRA, serve, compare and settle; return the figures."""
    file_id = upload(platform, state, stage, folder)
    show_estimate(platform, stage, file_id, quantization=None)
    job = fine_tune(platform, state, stage, file_id, name="lora", quantization=None)
    model = wait_until_served(platform, stage, job)
    seconds = time.monotonic() - stage.started_at
    accuracy = {
        "base": score(platform, stage, platform.account["base_model"], rows),
        "lora": score(platform, stage, model, rows),
    }
    show_answers(platform, stage, model)
    bill = show_bill(platform, stage, job)
    return {
        "model": model,
        "seconds_until_served": round(seconds, 1),
        "seconds_main_job": round(time.monotonic() - stage.started_at, 1),
        "accuracy_base": accuracy["base"],
        "accuracy_lora": accuracy["lora"],
        "training_seconds_billed": _extra(job)["billed_gpu_seconds"],
        **bill,
    }


def run_qlora_job(platform: Platform, state: State, stage: Stage, *, rows: int, folder: Path) -> dict[str, Any]:
    """Train the same file by QLoRA and score its adapter."""
    file_id = upload(platform, state, stage, folder)
    job = fine_tune(platform, state, stage, file_id, name="qlora", quantization="nf4")
    model = wait_until_served(platform, stage, job)
    return {
        "accuracy_qlora": score(platform, stage, model, rows),
        "qlora_training_seconds_billed": _extra(job)["billed_gpu_seconds"],
    }


def upload(platform: Platform, state: State, stage: Stage, folder: Path) -> str:
    if state["file_id"]:
        stage.line("upload", f"kept from before: {state['file_id']}")
        return state["file_id"]
    path = folder / "banking77-train.jsonl"
    path.write_text("".join(json.dumps(_chat_row(text, label)) + "\n" for text, label in _read("train.csv")))
    created = platform.openai.files.create(file=path, purpose="fine-tune")
    checked = platform.openai.files.wait_for_processing(created.id, poll_interval=0.5, max_wait_seconds=120)
    if checked.status != "processed":
        raise DemoFailed(f"validation: {checked.status_details}")
    rows = _extra(checked)["validation"]["rows"]
    stage.line("upload", f"{path.name}, {checked.bytes / 1e6:.1f} MB, {rows:,} rows valid: {checked.id}")
    state["file_id"] = checked.id
    return checked.id


def show_estimate(platform: Platform, stage: Stage, file_id: str, *, quantization: str | None) -> None:
    body = {"model": platform.account["base_model"], "training_file": file_id, "quantization": quantization}
    answer = _until(lambda: _launchable(platform.post("/estimates", body)), 180, "the pool's speed was not measured")
    stage.line("estimate", f"for {answer['model']}, {answer['recipe']['method']}, {answer['recipe']['epochs']} epochs:")
    for pool in answer["pools"]:
        stage.line("", _pool_line(pool))


def _extra(answered: Any) -> dict[str, Any]:
    """Return what the platform answers beyond the fields the client library knows."""
    extra: dict[str, Any] | None = answered.model_extra
    return extra or {}


def _launchable(answer: dict[str, Any]) -> dict[str, Any] | None:
    return answer if any(pool["is_launchable"] for pool in answer["pools"]) else None


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


def fine_tune(
    platform: Platform, state: State, stage: Stage, file_id: str, *, name: str, quantization: str | None
) -> Any:
    """Create the job (or follow the one begun before) until it has succeeded."""
    jobs = platform.openai.fine_tuning.jobs
    job = jobs.retrieve(state[name]) if state[name] else None
    if job is None or job.status in ("failed", "cancelled"):
        extra = {"quantization": quantization, "compute": {"pool": platform.account["pool"]}}
        job = jobs.create(
            model=platform.account["base_model"], training_file=file_id, suffix=f"banking-{name}", extra_body=extra
        )
        state[name] = job.id
        stage.line("hold", f"${_extra(job)['held_usd'] or '0'} set aside for {job.id}")
    _follow(platform, stage, job.id)
    job = jobs.retrieve(job.id)
    if job.status != "succeeded":
        raise DemoFailed(f"training {job.status}: {job.error.message if job.error else ''}")
    return job


def _follow(platform: Platform, stage: Stage, job_id: str) -> None:
    """Print state changes and draw the live loss until the job is over."""
    seen = ""
    while True:
        job = platform.openai.fine_tuning.jobs.retrieve(job_id)
        for event in _new_events(platform, job_id, seen):
            seen = event.id
            if event.type == "metrics" and "train_loss" in event.data:
                data = event.data
                text = f"step {data['step']}/{data['total_steps']}  loss {data['train_loss']:.3f}"
                stage.bar(data["step"] / data["total_steps"], f"{text}  {data['tokens_per_second']:,.0f} tokens/s")
            elif event.type != "metrics":
                stage.line("job", event.message)
        if job.status in ("succeeded", "failed", "cancelled", "paused"):
            return
        time.sleep(0.5)


def _new_events(platform: Platform, job_id: str, seen: str) -> list[Any]:
    fresh = []
    for event in platform.openai.fine_tuning.jobs.list_events(job_id, limit=100):
        if event.id <= seen:
            break
        fresh.append(event)
    return fresh[::-1]


def wait_until_served(platform: Platform, stage: Stage, job: Any) -> str:
    model = job.fine_tuned_model
    started = time.monotonic()
    _until(lambda: _answers(platform, model), LOAD_TIMEOUT_SECONDS, f"{model} was not loaded")
    stage.line("serve", f"{model} answers, loaded in {time.monotonic() - started:.1f} s")
    return model


def _answers(platform: Platform, model: str) -> bool:
    try:
        ask(platform, model, "Is this on?")
    except (openai.InternalServerError, openai.NotFoundError):
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
    reply = platform.openai.chat.completions.create(
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
    bill = _until(lambda: _settled(platform.get("/billing")), 60, "usage was not rated")
    extra = _extra(job)
    stage.line(
        "bill",
        f"training {extra['billed_gpu_seconds']:.1f} s = ${extra['cost_usd']}; "
        f"rest of ${extra['spend_cap_usd']} released",
    )
    stage.line("", f"{bill['tokens_billed']:,} tokens of inference = ${bill['inference_usd']}")
    stage.line("", f"balance ${bill['available_usd']}, held ${bill['held_usd']}, ledger sum {bill['ledger_sum_nano']}")
    return {name: bill[name] for name in ("tokens_billed", "ledger_sum_nano")}


def _settled(bill: dict[str, Any]) -> dict[str, Any] | None:
    return None if bill["unrated_requests"] else bill


# --- small things -----------------------------------------------------------------------------------------------


def _until(look: Callable[[], Any], seconds: float, complaint: str) -> Any:
    deadline = time.monotonic() + seconds
    while True:
        if found := look():
            return found
        if time.monotonic() > deadline:
            raise DemoFailed(f"{complaint} within {seconds:.0f} s")
        time.sleep(0.5)


def _read(name: str) -> list[tuple[str, str]]:
    with (DATA / name).open(newline="") as file:
        return [(row["text"], row["category"]) for row in csv.DictReader(file)]


def _chat_row(text: str, label: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": label}]}


def _curl(platform: Platform, model: str) -> Iterator[str]:
    body = {"model": model, "messages": [{"role": "user", "content": "My card still has not arrived, where is it?"}]}
    yield f"curl {platform.url}/v1/chat/completions \\"
    yield f"  -H 'Authorization: Bearer {platform.account['api_key']}' -H 'Content-Type: application/json' \\"
    yield f"  -d '{json.dumps(body)}'"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=200, help="held-out messages to score")
    parser.add_argument("--qlora", action="store_true", help="then run a second job by QLoRA")
    parser.add_argument("--json", action="store_true", help="print the figures as one line of JSON, last")
    asked = parser.parse_args()
    folder = asked.home / "demo"
    folder.mkdir(exist_ok=True)
    platform, state, stage = Platform(asked.home), State(folder / "state.json"), Stage()
    try:
        figures = run_main_job(platform, state, stage, rows=asked.rows, folder=folder)
        if asked.qlora:
            figures |= run_qlora_job(platform, state, stage, rows=asked.rows, folder=folder)
    except (DemoFailed, openai.APIError) as error:
        stage.line("failed", str(error))
        return 1
    sys.stdout.write("\n".join(["", *_curl(platform, figures["model"]), ""]))
    sys.stdout.write(f"\nDashboard {platform.url}  {platform.account['email']} / {platform.account['password']}\n")
    if asked.json:
        sys.stdout.write(json.dumps(figures) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
