"""The worker's only connection to the control plane: typed calls of /internal/v1, retried if a repeat is harmless.

Every route answers a repeated request the same way (claims by lease, events by sequence, uploads by manifest hash,
finish by lease). A call is therefore repeated with back-off after a connection error, a 429 or a 5xx.
"""

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import httpx
import msgspec

from apps.contracts.runs import RunEvent, RunOutcome
from apps.contracts.serving import DesiredState, ObservedState
from apps.contracts.worker_api import (
    ClaimRequest,
    ClaimResponse,
    ConversionClaim,
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
    RehearsalReport,
    RehearsalRequest,
    UploadRequest,
    UploadResponse,
)

Answer = TypeVar("Answer", bound=msgspec.Struct)

PREFIX = "/internal/v1"
_READING_SECONDS = 3_600  # for which the control plane may read what was stored, before it answers for good


class ApiError(Exception):
    """The control plane refused; `code` is its stable error code."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(f"{status} {code}: {message}")
        self.status = status
        self.code = code
        self.message = message


class StaleLease(ApiError):
    """The lease is gone or belongs to another worker: stop the child at once and forget the run."""


class Unauthorized(ApiError):
    """The credential or the lease token is not accepted."""


class Unavailable(Exception):
    """No usable answer within the allowed time: only connection errors or 5xx."""


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """The access to `/leases/{id}/…` for one attempt."""

    id: str
    token: str

    @classmethod
    def of(cls, claim: ClaimResponse) -> "Lease":
        return cls(id=claim.lease_id, token=claim.lease_token)


class ApiClient:
    """One control plane, one credential. Safe to share between threads."""

    def __init__(
        self,
        internal_url: str,
        *,
        credential: str = "",
        timeout_seconds: float = 10.0,
        sleep: Callable[[float], None] = time.sleep,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        base_url, uds = internal_url.rstrip("/"), None
        if internal_url.startswith("unix:"):
            base_url, uds = "http://internal", "/" + internal_url.removeprefix("unix:").lstrip("/")
        self._credential = credential
        self._sleep = sleep
        self._http = httpx.Client(
            base_url=base_url,
            timeout=httpx.Timeout(timeout_seconds, connect=min(5.0, timeout_seconds)),
            transport=transport or httpx.HTTPTransport(uds=uds, retries=0),
            headers={"Accept": "application/json", "User-Agent": "anneal-worker/1"},
            trust_env=False,
        )

    def close(self) -> None:
        self._http.close()

    # --- worker credential ---------------------------------------------------------------------------------------

    def enroll(self, request: EnrollRequest) -> EnrollResponse:
        """Redeem a one-time token. Never repeated after a lost answer, because a token works once."""
        return self._call("POST", "/enroll", request, EnrollResponse, token="", patience_seconds=0)

    def claim(self, request: ClaimRequest) -> ClaimResponse | None:
        """Return the next run of this worker's pool with its lease, or None if no run waits."""
        return self._optional("POST", "/claim", request, ClaimResponse, patience_seconds=20)

    def list_missing_probes(self, *, base_model_id: str = "") -> MissingProbes:
        """Return the measurements that the control plane lacks for this worker's pool.

        With `base_model_id`, those of that base model come with the access that its repository requires.
        """
        query = f"?base_model={base_model_id}" if base_model_id else ""
        return self._call("GET", f"/probes/missing{query}", None, MissingProbes, patience_seconds=20)

    def report_probe(self, report: ProbeReport) -> None:
        self._send("POST", "/probes", report, token=self._credential, patience_seconds=60)

    def take_rehearsal(self) -> RehearsalRequest | None:
        """Return a request for rehearsed memory that is now this worker's, or None if none waits."""
        return self._optional("POST", "/rehearsals/next", None, RehearsalRequest, patience_seconds=0)

    def report_rehearsal(self, report: RehearsalReport) -> None:
        self._send("POST", "/rehearsals", report, token=self._credential, patience_seconds=60)

    def take_examination(self) -> ExaminationRequest | None:
        """Return an uploaded adapter whose examination is now this worker's, or None if none waits."""
        return self._optional("POST", "/examinations/next", None, ExaminationRequest, patience_seconds=0)

    def report_examination(self, report: ExaminationReport) -> None:
        self._send("POST", "/examinations", report, token=self._credential, patience_seconds=60)

    def take_conversion(self, claim: ConversionClaim) -> ConversionRequest | None:
        """Return a conversion of a finished model that is now leased to this worker, or None if none waits."""
        return self._optional("POST", "/conversions/next", claim, ConversionRequest, patience_seconds=0)

    def keep_conversion(self, conversion_id: str) -> None:
        """Extend the lease. It is sent once, because the caller soon sends the next heartbeat. Raises StaleLease."""
        path = f"/conversions/{conversion_id}/heartbeat"
        self._send("POST", path, None, token=self._credential, patience_seconds=0)

    def create_conversion_upload(self, conversion_id: str, request: UploadRequest) -> UploadResponse:
        path = f"/conversions/{conversion_id}/uploads"
        return self._call("POST", path, request, UploadResponse, patience_seconds=60)

    def finish_conversion(self, conversion_id: str, report: ConversionReport) -> None:
        path = f"/conversions/{conversion_id}/finish"
        self._send("POST", path, report, token=self._credential, patience_seconds=120)

    def get_desired_state(self, replica_id: str, *, known_generation: int | None = None) -> DesiredState | None:
        """Return the adapters that the replica should hold, or None if nothing changed since `known_generation`."""
        query = "" if known_generation is None else f"?known_generation={known_generation}"
        return self._optional("GET", f"/replicas/{replica_id}/desired{query}", None, DesiredState, patience_seconds=0)

    def report_observed_state(self, state: ObservedState) -> None:
        self._send("POST", f"/replicas/{state.replica_id}/observed", state, token=self._credential, patience_seconds=0)

    # --- lease token ---------------------------------------------------------------------------------------------

    def heartbeat(self, lease: Lease, request: HeartbeatRequest) -> HeartbeatResponse:
        """Extend the lease.

        It is sent once, because the caller soon sends the next heartbeat and counts accepted ones.
        """
        path = f"/leases/{lease.id}/heartbeat"
        return self._call("POST", path, request, HeartbeatResponse, token=lease.token, patience_seconds=0)

    def keep_place(self, lease: Lease, request: HeartbeatRequest) -> HeartbeatResponse:
        """Keep a place in a group that another machine leads. It is sent once, like `heartbeat`."""
        path = f"/leases/{lease.id}/member/heartbeat"
        return self._call("POST", path, request, HeartbeatResponse, token=lease.token, patience_seconds=0)

    def leave(self, lease: Lease, request: LeaveRequest, *, patience_seconds: float = 120) -> None:
        """Leave a group. A repeat after a lost answer raises StaleLease, like any call after it."""
        path = f"/leases/{lease.id}/member/leave"
        self._send("POST", path, request, token=lease.token, patience_seconds=patience_seconds)

    def report_events(self, lease: Lease, events: tuple[RunEvent, ...], *, patience_seconds: float) -> EventsResponse:
        path = f"/leases/{lease.id}/events"
        body = EventsRequest(events=events)
        return self._call("POST", path, body, EventsResponse, token=lease.token, patience_seconds=patience_seconds)

    def create_upload(self, lease: Lease, request: UploadRequest, *, patience_seconds: float = 60) -> UploadResponse:
        path = f"/leases/{lease.id}/uploads"
        return self._call("POST", path, request, UploadResponse, token=lease.token, patience_seconds=patience_seconds)

    def open_judge(self, lease: Lease) -> JudgeAccess:
        """Return the access to the judge of the run's plan. Each call creates another key."""
        return self._call(
            "POST", f"/leases/{lease.id}/judge", None, JudgeAccess, token=lease.token, patience_seconds=20
        )

    def finish(self, lease: Lease, outcome: RunOutcome, *, patience_seconds: float = 120) -> FinishResponse:
        path = f"/leases/{lease.id}/finish"
        body = FinishRequest(outcome=outcome)
        return self._call("POST", path, body, FinishResponse, token=lease.token, patience_seconds=patience_seconds)

    # --- transport -----------------------------------------------------------------------------------------------

    def _call(
        self,
        method: str,
        path: str,
        body: msgspec.Struct | None,
        answer: type[Answer],
        *,
        patience_seconds: float,
        token: str | None = None,
    ) -> Answer:
        bearer = self._credential if token is None else token
        response = self._send(method, path, body, token=bearer, patience_seconds=patience_seconds)
        return _decode(response, answer)

    def _optional(
        self, method: str, path: str, body: msgspec.Struct | None, answer: type[Answer], *, patience_seconds: float
    ) -> Answer | None:
        response = self._send(method, path, body, token=self._credential, patience_seconds=patience_seconds)
        return None if response.status_code in (204, 304) else _decode(response, answer)

    def _send(
        self, method: str, path: str, body: msgspec.Struct | None, *, token: str, patience_seconds: float
    ) -> httpx.Response:
        began_at = time.monotonic()
        deadline = began_at + patience_seconds
        delay = 0.2
        while True:
            try:
                response = self._send_once(method, path, body, token)
            except _FilesUnread as trouble:  # the control plane is well: patience begins anew
                deadline = time.monotonic() + delay + patience_seconds
                if deadline > began_at + _READING_SECONDS + patience_seconds:
                    raise Unavailable(f"{method} {PREFIX}{path.split('?')[0]}: {trouble!r}") from trouble
            except (httpx.TransportError, _ServerTrouble) as trouble:
                if time.monotonic() + delay > deadline:
                    raise Unavailable(f"{method} {PREFIX}{path.split('?')[0]}: {trouble!r}") from trouble
            else:
                return response
            self._sleep(delay * random.uniform(0.7, 1.3))  # noqa: S311 (jitter, not a secret)
            delay = min(delay * 2, 5.0)

    def _send_once(self, method: str, path: str, body: msgspec.Struct | None, token: str) -> httpx.Response:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        content = None
        if body is not None:
            headers["Content-Type"] = "application/json"
            content = msgspec.json.encode(body)
        response = self._http.request(method, PREFIX + path, content=content, headers=headers)
        if response.status_code == 503 and _refusal(response).code == "files_unread":
            raise _FilesUnread("the files are still being read")
        if response.status_code >= 500 or response.status_code == 429:
            raise _ServerTrouble(f"HTTP {response.status_code}")
        if response.is_error:
            raise _refusal(response)
        return response


class _ServerTrouble(Exception):
    """The control plane answered with a temporary error."""


class _FilesUnread(Exception):
    """The control plane still reads the files that the call is about."""


class _ErrorBody(msgspec.Struct):
    code: str | None = None
    message: str = ""


class _ErrorEnvelope(msgspec.Struct):
    error: _ErrorBody


def load_credential(path: Path) -> EnrollResponse:
    """Read the credential that enrolment stored; raises FileNotFoundError before enrolment."""
    return msgspec.json.decode(path.read_bytes(), type=EnrollResponse)


def _decode(response: httpx.Response, answer: type[Answer]) -> Answer:
    try:
        return msgspec.json.decode(response.content, type=answer)
    except msgspec.DecodeError as error:
        raise ApiError(response.status_code, "unreadable_answer", str(error)) from error


def _refusal(response: httpx.Response) -> ApiError:
    try:
        body = msgspec.json.decode(response.content, type=_ErrorEnvelope).error
    except msgspec.DecodeError:
        body = _ErrorBody(message=response.text[:200])
    code = body.code or f"http_{response.status_code}"
    if response.status_code == 409 and code in ("stale_lease", "http_409"):
        return StaleLease(409, code, body.message)
    if response.status_code in (401, 403):
        return Unauthorized(response.status_code, code, body.message)
    return ApiError(response.status_code, code, body.message)
