"""A stand-in of dstack's server 0.22: the runs of the project `anneal`, over TLS, with the shapes of its own models.

It refuses fields that dstack's models do not have, and answers as dstack does: 403 for a token, 404 for a project, and
400 for what it cannot do. `faults` maps the last word of a path to the answer instead: a status, "slow", or "lost"
(done, but no answer comes). `start` and `end` do what dstack's own loops do to a run.
"""

import datetime
import json
import re
import ssl
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from tests.twins.http_server import Answer, Request, serve_http
from tests.twins.kubernetes import make_certificate

TOKEN = "dstack-token"
_NAME = re.compile(r"[a-z][a-z0-9-]{1,40}")
_ENDED = ("terminated", "failed", "done")
_Tag = Annotated[str, msgspec.Meta(pattern=r"^[a-zA-Z0-9 .:/=_\-+@]{0,256}$")]


class _Strict(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Base of the parts of a request, with the fields of dstack that nodes use."""


class _Cpu(_Strict):
    arch: Literal["x86", "arm"] | None = None


class _Gpu(_Strict):
    name: list[str] | None = None
    count: int = 1
    memory: Annotated[str, msgspec.Meta(pattern=r"^[0-9]+GB$")] | None = None


class _Resources(_Strict):
    cpu: _Cpu
    gpu: _Gpu


class _Retry(_Strict):
    on_events: Annotated[list[Literal["no-capacity", "interruption", "error"]], msgspec.Meta(min_length=1)]
    duration: int


class _Task(_Strict):
    type: Literal["task"]
    name: str
    image: str
    user: str
    entrypoint: str
    commands: list[str]
    working_dir: str
    env: dict[str, str]
    resources: _Resources
    spot_policy: Literal["spot", "on-demand", "auto"]
    retry: _Retry
    max_duration: int
    stop_duration: int
    tags: dict[str, _Tag]
    fleets: list[str] | None = None


class _RunSpec(_Strict):
    run_name: str
    configuration: _Task


class _Plan(_Strict):
    run_spec: _RunSpec


class _Apply(_Strict):
    plan: _Plan
    force: bool


class _List(_Strict):
    project_name: str
    only_active: bool
    include_jobs: bool
    limit: Annotated[int, msgspec.Meta(ge=0, le=100)]
    prev_submitted_at: datetime.datetime | None = None
    prev_run_id: str | None = None


class _Stop(_Strict):
    runs_names: list[str]
    abort: bool


_BODIES: dict[str, type[_Strict]] = {"apply": _Apply, "list": _List, "stop": _Stop}


class DstackTwin:
    """The project's runs by name, the newest last."""

    def __init__(self, folder: Path) -> None:
        self.ca = make_certificate(folder / "twin.pem")
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.load_cert_chain(folder / "twin.pem")
        self.url = ""
        self.reset()

    def reset(self) -> None:
        self.rows: dict[str, dict[str, Any]] = {}
        self.faults: dict[str, int | str] = {}
        self.fleets = {"h100"}
        self.calls = 0

    def move(self, name: str, status: str, message: str = "") -> None:
        """Let a run become `status`, as dstack's own loops do: provisioning, running, or ended."""
        self.rows[name] |= {"status": status, "status_message": message or status}

    def answer(self, request: Request) -> Answer | None:
        self.calls += 1
        verb = request.path.rpartition("/")[2]
        fault = self.faults.get(verb)
        if fault == "slow":
            return Answer(content=b" " * 5, seconds_a_byte=0.2)
        if fault and fault != "lost":
            said = f"fault {request.headers['Authorization']} {request.body.decode()}"
            return _answer(int(fault), {"detail": [{"msg": said, "code": "error"}]})
        if request.bearer != TOKEN:
            return _answer(403, {"detail": {"msg": "Invalid token", "code": None}})
        if request.method != "POST" or request.path not in ("/api/runs/list", f"/api/project/anneal/runs/{verb}"):
            return _answer(404, {"detail": {"msg": "Not found", "code": None}})
        try:
            body = msgspec.json.decode(request.body, type=_BODIES[verb])
        except msgspec.ValidationError as error:
            return _answer(422, {"detail": [{"type": "extra_forbidden", "loc": ["body"], "msg": str(error)}]})
        answer = getattr(self, f"_{verb}")(body)
        return None if fault == "lost" else answer

    def _apply(self, body: _Apply) -> Answer:
        name, task = body.plan.run_spec.run_name, body.plan.run_spec.configuration
        if not _NAME.fullmatch(name):
            return _refused("Resource name should match regex '^[a-z][a-z0-9-]{1,40}$'")
        if name in self.rows and self.rows[name]["status"] not in _ENDED:
            return _refused("Failed to apply plan. Resource has been changed. Try again or use force apply.")
        row = {
            "id": str(uuid.uuid4()), "project_name": "anneal", "user": "admin", "jobs": [], "cost": 0.0,
            "submitted_at": datetime.datetime.now(datetime.UTC).isoformat(), "status": "submitted",
            "status_message": "submitted", "termination_reason": None, "error": None,
            "run_spec": {"run_name": name, "configuration": msgspec.to_builtins(task)},
        }  # fmt: skip
        self.rows.pop(name, None)
        self.rows[name] = row
        if not set(task.fleets or ()) <= self.fleets:
            self.move(name, "pending", "retrying")  # no fleet, no capacity
        return _answer(200, row)

    def _list(self, body: _List) -> Answer:
        """Answer with the newest first, as many as asked for."""
        rows = [row for row in reversed(self.rows.values()) if row["project_name"] == body.project_name]
        if body.only_active:
            rows = [row for row in rows if row["status"] not in _ENDED]
        if body.prev_run_id:
            rows = rows[[row["id"] for row in rows].index(body.prev_run_id) + 1 :]
        return _answer(200, rows[: body.limit])

    def _stop(self, body: _Stop) -> Answer:
        for name in body.runs_names:
            if name in self.rows and self.rows[name]["status"] not in _ENDED:
                self.move(name, "terminating")
        return _answer(200, None)


def _refused(said: str) -> Answer:
    return _answer(400, {"detail": [{"msg": said, "code": "error"}]})


def _answer(status: int, body: object) -> Answer:
    return Answer(status, json.dumps(body).encode())


@contextmanager
def serve_dstack(folder: Path) -> Iterator[DstackTwin]:
    """Serve a twin whose key lies in `folder`."""
    twin = DstackTwin(folder)
    with serve_http(twin.answer, tls=twin.context) as url:
        twin.url = url
        yield twin
