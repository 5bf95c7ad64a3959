"""A platform of a few dictionaries that answers the main job, and does to its jobs what a test says."""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import httpx2

platform.processor()  # openai's client asks for it; Python starts `uname` the first time and keeps the answer
Answer = tuple[int, Any]
Step = Callable[["ScriptedPlatform", dict[str, Any]], None]


class Clock:
    """Time that passes only during a sleep."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def as_module(self) -> SimpleNamespace:
        return SimpleNamespace(sleep=self.sleep, monotonic=lambda: self.now, time=lambda: self.now)


@dataclass
class ScriptedPlatform:
    """Each job created takes the next of `fates`: what is done to it, one step before each look at it."""

    fates: list[list[Step]] = field(default_factory=list)
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    jobs: dict[str, dict[str, Any]] = field(default_factory=dict)
    models: dict[str, dict[str, Any]] = field(default_factory=dict)
    live_workers: int = 1
    block_reason: str | None = None  # of the pool, while a worker is online
    balance: str = "25.00"
    refusals: dict[str, list[Answer]] = field(default_factory=dict)  # answers that a path gives first
    calls: list[tuple[str, str, Any]] = field(default_factory=list)
    _steps: dict[str, Iterator[Step]] = field(default_factory=dict)

    def answer(self, request: httpx2.Request) -> httpx2.Response:
        path, is_json = request.url.path, request.headers.get("content-type") == "application/json"
        body = json.loads(request.content) if is_json and request.content else None
        self.calls.append((request.method, path, body))
        status, content = self._route(request.method, path, body)
        if status >= 400:
            content = {"error": content}
        return httpx2.Response(status, json=content, headers={"x-should-retry": "false"})

    def sent(self, path_pattern: str) -> list[Any]:
        """Return the bodies of the POSTs to addresses of this pattern."""
        return [body for method, path, body in self.calls if method == "POST" and re.search(path_pattern, path)]

    def add_job(self, status: str, *fate: Step, **changes: Any) -> dict[str, Any]:
        """Add a job, as one is that was made before."""
        number = len(self.jobs) + 1
        self.jobs[f"ftjob-{number}"] = job = {
            "id": f"ftjob-{number}",
            "status": status,
            "training_file": "file-1",
            "fine_tuned_model": None,
            "error": None,
            "estimate": {"train_seconds_p10": 200.0, "train_seconds_p50": 230.0, "train_seconds_p90": 265.0},
            "step": 0,
            "queue_position": 1,
            "waiting_reason": None,
            "spend_cap_usd": "1.00",
            "cost_usd": "0",
            "billed_gpu_seconds": 0.0,
            "pool": "local-cpu",
            "events": [],
        } | changes
        self._steps[job["id"]] = iter(fate)
        return job

    def add_file(self, status: str = "processed") -> dict[str, Any]:
        file_id = f"file-{len(self.files) + 1}"
        details = {"bytes": 1_700_000, "status_details": None, "validation": {"rows": 10_003}}
        self.files[file_id] = {"id": file_id, "status": status} | details
        return self.files[file_id]

    def add_model(self, name: str, *, status: str = "ready", state: str = "warm") -> None:
        self.models[name] = {"id": name, "status": status, "status_reason": None, "state": state, "silent": 0}

    # --- the addresses --------------------------------------------------------------------------------------------

    def _route(self, method: str, path: str, body: Any) -> Answer:
        for pattern, answers in self.refusals.items():
            if re.search(pattern, path) and answers:
                return answers.pop(0)
        job_path = re.fullmatch(r"/v1/fine_tuning/jobs/([^/]+)(/\w+)?", path)
        if job_path:
            return self._job(method, job_path[1], job_path[2], body)
        model_path = re.fullmatch(r"/(?:api/)?v1/models/([^/]+)(/serving)?", path)
        if model_path:
            model = self.models.get(model_path[1])
            if model is None:
                return 404, {"message": "No such model."}
            if method == "POST":
                model["state"] = "warm"
            return 200, {**model, "reason": None}
        match method, path:
            case "POST", "/v1/fine_tuning/jobs":
                cap = body["budget"]["max_cost_usd"]
                return 200, self.add_job("queued", *self.fates.pop(0), spend_cap_usd=cap)
            case "POST", "/v1/files":
                return 200, self.add_file("uploaded")
            case "POST", "/v1/chat/completions":
                return self._ask(body)
            case "POST", "/api/v1/estimates":
                return 200, self._estimate(body)
            case "GET", "/api/v1/billing":
                spent = {"inference_usd": "0", "tokens_billed": 0, "unrated_requests": 0, "ledger_sum_nano": 0}
                return 200, {"available_usd": self.balance, "held_usd": "0"} | spent
        file = self.files.get(path.removeprefix("/v1/files/"))
        if file is None:
            return 404, {"message": "No such file."}
        shown = dict(file)
        if file["status"] == "uploaded":
            file["status"] = "processed"  # by the time of the next look
        return 200, shown

    def _job(self, method: str, job_id: str, action: str | None, body: Any) -> Answer:
        job = self.jobs.get(job_id)
        if job is None:
            return 404, {"message": "No fine-tuning job has this id."}
        match method, action:
            case "GET", "/events":
                return 200, {"data": job["events"][::-1], "has_more": False}
            case "POST", "/resume":
                job["status"] = "queued"
                job["spend_cap_usd"] = ((body or {}).get("budget") or {}).get("max_cost_usd", job["spend_cap_usd"])
            case "GET", None:
                next(self._steps[job_id], nothing)(self, job)
        return 200, {name: value for name, value in job.items() if name != "events"}

    def _ask(self, body: Any) -> Answer:
        model = self.models.get(body["model"])
        if model is None or model["state"] == "off":
            return 404, {"message": "No such model."}
        if model["silent"]:
            model["silent"] -= 1
            return 503, {"message": "No replica holds it."}
        return 200, {"choices": [{"message": {"role": "assistant", "content": "card_arrival"}}]}

    def _estimate(self, body: Any) -> dict[str, Any]:
        pool = {
            "pool": "local-cpu",
            "gpu_type": "CPU",
            "is_launchable": self.live_workers > 0 and not self.block_reason,
            "block_reason": self.block_reason if self.live_workers else "No worker is online.",
            "live_workers": self.live_workers,
            "cost_usd": {"p10": "0.03", "p50": "0.04", "p90": "0.06"},
            "estimate": {"peak_bytes": 2**30, "capacity_bytes": 2**33, "train_seconds_p50": 230.0},
        }
        return {"model": body["model"], "recipe": {"method": "lora", "epochs": 2}, "pools": [pool]}


# --- what may happen to a job -------------------------------------------------------------------------------------


def say(message: str) -> Step:
    """Return a step that adds an event."""

    def step(platform: ScriptedPlatform, job: dict[str, Any]) -> None:
        event_id = f"ftevent-{job['id']}-{len(job['events']):08d}"
        job["events"].append({"id": event_id, "type": "message", "message": message, "data": None})

    return step


def become(status: str, message: str = "", **changes: Any) -> Step:
    """Return a step that moves the job."""

    def step(platform: ScriptedPlatform, job: dict[str, Any]) -> None:
        job.update(status=status, **changes)
        if message:
            say(message)(platform, job)

    return step


def nothing(platform: ScriptedPlatform, job: dict[str, Any]) -> None:
    """The job stays as it is."""


def succeed(platform: ScriptedPlatform, job: dict[str, Any]) -> None:
    """The job ends with an adapter that answers."""
    name = f"ft:{job['id']}"
    job.update(status="succeeded", fine_tuned_model=name, cost_usd="0.04", billed_gpu_seconds=240.0)
    platform.add_model(name)
