"""Experiment trackers: what they are told, and that nothing about them ever stops or betrays a run."""

import gzip
import json
import socket
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from apps.contracts.runs import EvaluationCompleted, LogLine, StepCompleted, Succeeded, Tracker
from gpu_workers.common.events import EventTail
from gpu_workers.trainer.tracking import mlflow as tracking_mlflow
from gpu_workers.trainer.tracking.mlflow import MlflowRefused, MlflowRun, public_origin
from gpu_workers.trainer.tracking.points import FinalStatus, MetricPoint, points_of
from gpu_workers.trainer.tracking.process import TRACKING_FILE, Assignment, Tracking
from tests.support.agent import add_run, make_agent
from tests.twins.http_server import Answer, Request, serve_http

SECRET = "token-0123456789"


class MlflowServer:
    """The calls of MLflow's REST API that are made, with its own words for what is missing."""

    def __init__(self) -> None:
        self.url = ""
        self.runs: dict[str, dict[str, Any]] = {}
        self.experiments: dict[str, str] = {}
        self.tokens: set[str | None] = set()

    def answer(self, request: Request) -> Answer:
        self.tokens.add(request.headers["Authorization"])
        if request.method == "POST":
            return _json(self._change(request.path.removeprefix("/api/2.0/mlflow/"), json.loads(request.body)))
        name = request.path.rpartition("experiment_name=")[2]
        if name in self.experiments:
            return _json({"experiment": {"experiment_id": self.experiments[name]}})
        return _json({"error_code": "RESOURCE_DOES_NOT_EXIST", "message": f"No experiment {name}"}, status=404)

    def _change(self, call: str, asked: dict[str, Any]) -> dict[str, Any]:
        runs = self.runs
        match call:
            case "experiments/create":
                self.experiments[asked["name"]] = "7"
                return {"experiment_id": "7"}
            case "runs/search":
                job = asked["filter"].split("'")[1]
                found = [run for run in runs.values() if run["tags"].get("anneal.job") == job]
                return {"runs": [{"info": {"run_id": run["id"]}} for run in found]} if found else {}
            case "runs/create":
                tags = {tag["key"]: tag["value"] for tag in asked["tags"]}
                run = {"id": f"r{len(runs)}", "name": asked["run_name"], "tags": tags, "metrics": [], "params": {}}
                runs[run["id"]] = run
                return {"run": {"info": {"run_id": run["id"]}}}
            case "runs/log-batch":
                runs[asked["run_id"]]["metrics"] += asked.get("metrics", [])
                runs[asked["run_id"]]["params"] |= {p["key"]: p["value"] for p in asked.get("params", [])}
            case "runs/update":
                runs[asked["run_id"]]["status"] = asked["status"]
        return {}


def _json(body: dict[str, Any], *, status: int = 200) -> Answer:
    return Answer(status, json.dumps(body).encode())


@pytest.fixture
def mlflow(monkeypatch) -> Iterator[MlflowServer]:
    monkeypatch.setattr(tracking_mlflow, "public_origin", lambda url: url)
    server = MlflowServer()
    with serve_http(lambda request: server.answer(request)) as server.url:
        yield server


def tracker(url: str, **changes: Any) -> Tracker:
    given = Tracker(kind="mlflow", project="triage", name="first", tags=("nightly",), url=url, secret=SECRET)
    return msgspec.structs.replace(given, **changes)


def step(number: int) -> StepCompleted:
    return StepCompleted(
        sequence=0, step=number, total_steps=9, epoch=0.1, train_loss=1.5, learning_rate=1e-3, grad_norm=None,
        trained_tokens=1, tokens_per_second=2.0, training_seconds=1.0,
    )  # fmt: skip


def test_reports_and_evaluations_become_points_and_nothing_else_does():
    events = [
        step(3),
        LogLine(sequence=0, level="info", message="x"),
        EvaluationCompleted(sequence=0, step=4, valid_loss=2.0),
    ]

    first, second = points_of(events)

    assert (first.step, first.values["train/loss"], second.values) == (3, 1.5, {"eval/loss": 2.0})
    assert "train/grad_norm" not in first.values


def test_mlflow_has_one_run_a_job_across_attempts(mlflow):
    for number, status in ((3, FinalStatus.PAUSED), (6, FinalStatus.SUCCEEDED)):
        run = MlflowRun(tracker(mlflow.url), job_id="ftjob-1", parameters={"epochs": "3"})
        run.log([MetricPoint(step=number, values={"train/loss": 1.0 / number})])
        run.finish(status)

    [found] = mlflow.runs.values()
    assert (found["name"], found["status"]) == ("first", "FINISHED")
    assert found["tags"] == {"anneal.job": "ftjob-1", "nightly": "true"}
    assert found["params"] == {"epochs": "3"}
    assert [(metric["key"], metric["step"]) for metric in found["metrics"]] == [("train/loss", 3), ("train/loss", 6)]
    assert mlflow.tokens == {f"Bearer {SECRET}"}


@pytest.mark.parametrize("found", ["10.0.0.1", "64:ff9b::a9fe:a9fe", "fe80::1%eth0", "8.8.8.8 127.0.0.1"])
def test_a_name_that_leads_into_a_private_network_is_not_called(monkeypatch, found: str):
    infos = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 443)) for address in found.split()]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *parts, **named: infos)

    with pytest.raises(ValueError, match="not a public one"):
        public_origin("https://mlflow.example.com")


def test_a_public_server_is_called_by_the_address_that_was_checked(monkeypatch):
    for address, origin in (("8.8.8.8", "https://8.8.8.8:443"), ("2001:4860::8", "https://[2001:4860::8]:443")):
        infos = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 443))]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *parts, infos=infos, **named: infos)
        assert public_origin("https://mlflow.example.com/path") == origin


@pytest.mark.parametrize(
    ("header", "body", "why"),
    [
        ({}, b'{"experiment": "' + b"a" * 2**21 + b'"}', "longer than"),
        ({"Content-Encoding": "gzip"}, gzip.compress(b"{}" * 2**20), "compressed"),
    ],
)
def test_a_servers_answer_is_read_to_a_limit(mlflow, monkeypatch, header, body, why):
    monkeypatch.setattr(mlflow, "answer", lambda request: Answer(200, body, header))
    with pytest.raises(MlflowRefused, match=why):
        MlflowRun(tracker(mlflow.url), job_id="ftjob-1", parameters={})


class Refusing:
    def log(self, points: object) -> None:
        raise MlflowRefused(f"401 for the token {SECRET}")

    def finish(self, status: str) -> None:
        raise AssertionError("it was left alone")


def test_a_tracker_that_fails_is_told_once_without_the_key_and_left_alone(tmp_path):
    assignment = Assignment(trackers=(tracker("https://x.example"),), job_id="ftjob-1", parameters={})
    tracking = Tracking(assignment, tmp_path, open_one=lambda *_: Refusing())
    tracking.begin()

    for number in (1, 2):
        tracking.log([MetricPoint(step=number, values={"train/loss": 1.0})])
    tracking.finish(FinalStatus.SUCCEEDED)

    [warning] = EventTail(tmp_path / TRACKING_FILE).read()
    assert warning.message.startswith("MLflow gets no more of this run, which goes on without it: 401")
    assert SECRET not in warning.message


def test_a_run_with_a_tracker_that_cannot_be_reached_succeeds_and_says_so(plane, models, tmp_path):
    spec = add_run(plane, models)
    plane.queue[0] = msgspec.structs.replace(spec, trackers=(tracker("https://127.0.0.1"),))

    make_agent(plane, tmp_path, "succeed").drain()

    [outcome] = plane.outcomes
    assert isinstance(outcome, Succeeded)
    assert any("MLflow gets no more" in line.message for line in plane.events_of(LogLine))
    seen = (tmp_path / "work" / "secrets").read_text()
    assert SECRET not in seen, "the trainer's process has no business with it"
