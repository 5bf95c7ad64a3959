"""/internal/v1 and an object store in memory, over real HTTP, with the faults a test wants.

Decodes and encodes with the same contracts as the real one; the end-to-end tests run the agent against the real one.
"""

import hashlib
import json
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from apps.contracts.addresses.machines import NodeGroup
from apps.contracts.hyperparameters import Hyperparameters
from apps.contracts.runs import (
    BaseModelRef,
    CheckpointRef,
    CheckpointSaved,
    DatasetRef,
    Manifest,
    RunEvent,
    RunOutcome,
    RunSpec,
    SignedFile,
)
from apps.contracts.worker_api import (
    ClaimRequest,
    ClaimResponse,
    ConversionReport,
    ConversionRequest,
    EnrollRequest,
    EnrollResponse,
    EventsRequest,
    EventsResponse,
    ExaminationReport,
    ExaminationRequest,
    FinishRequest,
    FinishResponse,
    HeartbeatRequest,
    HeartbeatResponse,
    JudgeAccess,
    LeaveRequest,
    MissingProbes,
    ProbeReport,
    ProbeRequest,
    UploadRequest,
    UploadResponse,
)
from tests.support.waiting import wait_until
from tests.twins.http_server import Answer, Request, serve_http

CREDENTIAL = "annw_test"
MANIFEST = "manifest.json"


class ControlPlane:
    """State, faults and what was reported. Attributes may be changed while the agent runs."""

    def __init__(self) -> None:
        self.queue: list[RunSpec] = []
        self.objects: dict[str, bytes] = {}
        self.puts: list[str] = []
        self.uploads: dict[str, Manifest] = {}
        self.judge: JudgeAccess | None = None  # None: refused
        self.events: list[RunEvent] = []
        self.beats: list[HeartbeatRequest] = []
        self.beats_of: defaultdict[str, list[HeartbeatRequest]] = defaultdict(list)  # by run
        self.outcomes: list[RunOutcome] = []
        self.claimed: list[ClaimRequest] = []
        self.places_kept = 0  # heartbeats of machines that another one leads
        self.left: list[LeaveRequest] = []  # by those machines
        self.one_time_token = "once"
        self.enrollments: list[EnrollRequest] = []
        self.probes: list[ProbeRequest] = []
        self.reports: list[ProbeReport] = []
        self.examinations: list[ExaminationRequest] = []
        self.examined: list[ExaminationReport] = []
        self.conversions: list[ConversionRequest] = []
        self.converted: list[ConversionReport] = []
        self.conversions_kept = 0  # heartbeats
        self.is_conversion_lost = False
        self.claims = 0
        self.heartbeat_seconds = 1
        self.self_fence_seconds = 45
        self.stall_seconds = 900.0
        self.is_lease_stale = False
        self.is_cancel_requested = False
        self.is_pause_requested = False
        self.is_drain_requested = False
        self.failures_left = 0  # so many requests get 503 first
        self.trickle_seconds = 0.0  # objects are sent byte by byte, with so long between two
        self.is_down = False  # every request gets 503
        self.refuse_event: Callable[[RunEvent], bool] = lambda event: False
        self.stale: set[str] = set()  # runs whose leases are stale
        self.cancelled: set[str] = set()  # runs whose customer asked to cancel them
        self.ends: dict[str, RunOutcome] = {}  # by run
        self.ended_at = 0.0  # when the last outcome arrived, by time.time()
        self._sequences: dict[str, int] = {}  # the last one, by lease
        self._leases: dict[str, tuple[str, str]] = {}  # lease -> its token and run
        self.lock = threading.Lock()
        self.url = ""

    # --- what a test asks ------------------------------------------------------------------------------------------

    def add_object(self, name: str, content: bytes) -> SignedFile:
        self.objects[f"/objects/{name}"] = content
        return SignedFile(
            name=name.rsplit("/", 1)[-1],
            url=f"{self.url}/objects/{name}",
            sha256=hashlib.sha256(content).hexdigest(),
            bytes=len(content),
        )

    def add_run(
        self,
        rows: bytes,
        *,
        base_model: Path,
        hyperparameters: Hyperparameters,
        validation: bytes | None = None,
        attempt: int = 1,
        resume_from: CheckpointRef | None = None,
        checkpoint_interval_seconds: int = 300,
        gpu_count: int = 1,
        group: NodeGroup | None = None,
    ) -> RunSpec:
        spec = RunSpec(
            run_id=f"run_{attempt}",
            job_id="ftjob-1",
            organization_id="org_1",
            attempt=attempt,
            base_model=BaseModelRef(id="bm_1", name="tiny", path=str(base_model)),
            training=self._dataset("train.jsonl", rows),
            validation=None if validation is None else self._dataset("valid.jsonl", validation),
            hyperparameters=hyperparameters,
            resume_from=resume_from,
            checkpoint_interval_seconds=checkpoint_interval_seconds,
            gpu_count=gpu_count,
            group=group,
        )
        self.queue.append(spec)
        return spec

    def _dataset(self, name: str, content: bytes) -> DatasetRef:
        file = self.add_object(name, content)
        rows = len(content.splitlines())
        return DatasetRef(id=f"ds_{name}", sha256=file.sha256, bytes=file.bytes, rows=rows, url=file.url)

    def events_of(self, kind: type) -> list:
        return [event for event in self.events if isinstance(event, kind)]

    def stored_files(self, upload_id: str) -> dict[str, bytes]:
        prefix = f"/objects/uploads/{upload_id}/"
        return {path.removeprefix(prefix): body for path, body in self.objects.items() if path.startswith(prefix)}

    def checkpoint_ref(self, event: CheckpointSaved) -> CheckpointRef:
        files = self.stored_files(event.upload_id)
        return CheckpointRef(
            id="ckpt_1",
            step=event.step,
            manifest_sha256=event.manifest_sha256,
            files=tuple(
                SignedFile(
                    name=name,
                    url=f"{self.url}/objects/uploads/{event.upload_id}/{name}",
                    sha256=hashlib.sha256(body).hexdigest(),
                    bytes=len(body),
                )
                for name, body in files.items()
            ),
        )

    def forget_lease(self) -> None:
        """Begin another attempt: what was reported stays readable in `events`."""
        self._sequences.clear()
        self._leases.clear()

    def wait_for(self, condition: Callable[[], bool], *, timeout_seconds: float = 60) -> None:
        wait_until(condition, seconds=timeout_seconds)

    # --- routes ----------------------------------------------------------------------------------------------------

    def answer(self, method: str, path: str, token: str, body: bytes) -> tuple[int, bytes]:
        if self.is_down or self.failures_left > 0:
            self.failures_left -= 1
            return 503, b"{}"
        if path.startswith("/objects/"):
            return self._object(method, path, body)
        with self.lock:
            return self._api(path.removeprefix("/internal/v1"), token, body)

    def _object(self, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        if method == "PUT":
            self.puts.append(path)
            self.objects[path] = body
            return 200, b""
        return (200, self.objects[path]) if path in self.objects else (404, b"")

    def _api(self, path: str, token: str, body: bytes) -> tuple[int, bytes]:
        if path == "/enroll":
            request = msgspec.json.decode(body, type=EnrollRequest)
            if request.token != self.one_time_token or self.enrollments:
                return _error(403, "invalid_token")
            self.enrollments.append(request)
            return _ok(EnrollResponse(worker_id="worker_1", credential=CREDENTIAL, pool="cpu"))
        if path.startswith("/leases/"):
            lease_id, _, verb = path.removeprefix("/leases/").partition("/")
            known, run_id = self._leases.get(lease_id, ("", ""))
            if self.is_lease_stale or token != known or run_id in self.stale:
                return _error(409, "stale_lease")
            return getattr(self, f"_{verb.replace('/', '_')}")(body, lease_id)
        if token != CREDENTIAL:
            return _error(401, "invalid_credential")
        if path == "/claim":
            return self._claim(body)
        if path.partition("?")[0] == "/probes/missing":
            return _ok(MissingProbes(probes=tuple(self.probes)))
        if path == "/probes":
            report = msgspec.json.decode(body, type=ProbeReport)
            self.reports.append(report)
            self.probes = [
                p for p in self.probes if (p.base_model.id, p.method) != (report.base_model_id, report.method)
            ]
            return 204, b""
        if path == "/examinations/next":
            return _ok(self.examinations.pop(0)) if self.examinations else (204, b"")
        if path == "/examinations":
            self.examined.append(msgspec.json.decode(body, type=ExaminationReport))
            return 204, b""
        if path.startswith("/conversions/"):
            return self._conversion(path.rpartition("/")[2], body)
        return _error(404, "not_found")

    def _conversion(self, verb: str, body: bytes) -> tuple[int, bytes]:
        if verb == "next":
            return _ok(self.conversions.pop(0)) if self.conversions else (204, b"")
        if self.is_conversion_lost:
            return _error(409, "stale_lease")
        if verb == "uploads":
            return self._uploads(body, "")
        if verb == "finish":
            self.converted.append(msgspec.json.decode(body, type=ConversionReport))
        else:
            self.conversions_kept += 1
        return 204, b""

    def _claim(self, body: bytes) -> tuple[int, bytes]:
        self.claimed.append(msgspec.json.decode(body, type=ClaimRequest))
        free = self.claimed[-1].free_gpus
        self.claims += 1
        spec = next((each for each in self.queue if free is None or each.gpus_here <= free), None)
        if spec is None:
            return 204, b""
        self.queue.remove(spec)
        lease_id, token = f"lease_{self.claims}", f"token_{self.claims}"
        self._leases[lease_id] = token, spec.run_id
        return _ok(
            ClaimResponse(
                spec=spec,
                lease_id=lease_id,
                lease_token=token,
                lease_seconds=60,
                heartbeat_seconds=self.heartbeat_seconds,
                self_fence_seconds=self.self_fence_seconds,
                stall_seconds=self.stall_seconds,
            )
        )

    def _heartbeat(self, body: bytes, lease_id: str) -> tuple[int, bytes]:
        self.beats.append(msgspec.json.decode(body, type=HeartbeatRequest))
        self.beats_of[self._leases[lease_id][1]].append(self.beats[-1])
        return _ok(
            HeartbeatResponse(
                lease_seconds=60,
                is_cancel_requested=self.is_cancel_requested or self._leases[lease_id][1] in self.cancelled,
                is_pause_requested=self.is_pause_requested,
                is_drain_requested=self.is_drain_requested,
            )
        )

    def _member_heartbeat(self, body: bytes, lease_id: str) -> tuple[int, bytes]:
        self.places_kept += 1
        return _ok(HeartbeatResponse(lease_seconds=60, is_drain_requested=self.is_drain_requested))

    def _member_leave(self, body: bytes, lease_id: str) -> tuple[int, bytes]:
        self.left.append(msgspec.json.decode(body, type=LeaveRequest))
        return 204, b""

    def _events(self, body: bytes, lease_id: str) -> tuple[int, bytes]:
        reported = msgspec.json.decode(body, type=EventsRequest).events
        if any(self.refuse_event(event) for event in reported):
            return _error(400, "upload_incomplete")
        last = self._sequences.get(lease_id, 0)
        fresh = [event for event in reported if event.sequence > last]
        self.events += fresh
        last = self._sequences[lease_id] = max([last, *(event.sequence for event in fresh)])
        return _ok(EventsResponse(accepted=len(fresh), last_sequence=last))

    def _uploads(self, body: bytes, lease_id: str) -> tuple[int, bytes]:
        request = msgspec.json.decode(body, type=UploadRequest)
        upload_id = f"{request.manifest.kind}-{request.manifest_sha256[:12]}"
        self.uploads[upload_id] = request.manifest
        names = [file.name for file in request.manifest.files] + [MANIFEST]
        urls = {name: f"{self.url}/objects/uploads/{upload_id}/{name}" for name in names}
        return _ok(UploadResponse(upload_id=upload_id, files=urls))

    def _judge(self, body: bytes, lease_id: str) -> tuple[int, bytes]:
        return _ok(self.judge) if self.judge else _error(403, "insufficient_permissions")

    def _finish(self, body: bytes, lease_id: str) -> tuple[int, bytes]:
        self.ended_at = time.time()
        self.outcomes.append(msgspec.json.decode(body, type=FinishRequest).outcome)
        self.ends[self._leases.pop(lease_id)[1]] = self.outcomes[-1]
        return _ok(FinishResponse(run_status="done", job_status="done"))


def _ok(value: msgspec.Struct) -> tuple[int, bytes]:
    return 200, msgspec.json.encode(value)


def _error(status: int, code: str) -> tuple[int, bytes]:
    return status, json.dumps({"error": {"code": code, "message": code}}).encode()


@contextmanager
def serve_control_plane() -> Iterator[ControlPlane]:
    """Run it on a free loopback port."""
    plane = ControlPlane()

    def answer(request: Request) -> Answer:
        status, content = plane.answer(request.method, request.path, request.bearer, request.body)
        is_trickling = request.method == "GET" and request.path.startswith("/objects/")
        return Answer(status, content, seconds_a_byte=plane.trickle_seconds if is_trickling else 0.0)

    with serve_http(answer) as plane.url:
        yield plane
