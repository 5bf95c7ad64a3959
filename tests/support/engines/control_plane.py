"""The control plane's side of the wire for these tests: enrolment, wishes, reports and signed files over HTTP.

The engines' environment has no Django; the real one is tried with the real agent end to end. What is said here is
said in the wire types of apps.contracts.
"""

import hashlib
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec

from apps.contracts.runs import SignedFile
from apps.contracts.serving import DesiredAdapter, DesiredState, ObservedAdapter, ObservedState
from apps.contracts.worker_api import EnrollRequest, EnrollResponse
from tests.twins.http_server import Answer, Request, serve_http

REPLICA_ID = "rep_test"
REPLICA_TOKEN = "replica-token-of-this-test"
CREDENTIAL = "annw_credential-of-this-test"
ENROLL_TOKEN = "one-time"


class ControlPlane:
    """Holds one replica's desired state; remembers what the agent reported."""

    def __init__(self, *, base_model_path: str, served_name: str) -> None:
        self.enrollment = EnrollResponse(
            worker_id="wrk_test",
            credential=CREDENTIAL,
            pool="cpu",
            replica_id=REPLICA_ID,
            replica_token=REPLICA_TOKEN,
            base_model={"id": "base_test", "name": "demo", "path": base_model_path, "served_name": served_name},
        )
        self.observed: list[ObservedState] = []
        self.desired_reads = 0
        self._takes_not_ready = threading.Event()
        self._takes_not_ready.set()
        self._files: dict[str, bytes] = {}
        self._desired = DesiredState(
            replica_id=REPLICA_ID,
            base_lora_served_name=served_name,
            base_model_sha256=hashlib.sha256((Path(base_model_path) / "model.safetensors").read_bytes()).hexdigest(),
            generation=1,
            adapters=(),
        )
        self._serving = ExitStack()
        self.url = self._serving.enter_context(serve_http(self._answer))

    def close(self) -> None:
        self._serving.close()

    def describe(self, lora_name: str, files: dict[str, bytes], *, rank: int = 8) -> DesiredAdapter:
        """Publish files and return the wish for an adapter made of them."""
        return DesiredAdapter(
            lora_name=lora_name,
            version_id=f"adpv_{lora_name}",
            manifest_sha256=hashlib.sha256(lora_name.encode()).hexdigest(),
            rank=rank,
            files=tuple(self._sign(lora_name, name, data) for name, data in files.items()),
        )

    def serve_whole(self, files: dict[str, bytes], *, served_name: str) -> None:
        """Give the replica one whole model instead of the base model; before it enrols."""
        named = {"id": "adpv_whole", "name": "ft:whole", "served_name": served_name}
        self.enrollment = msgspec.structs.replace(self.enrollment, base_model=named, is_whole_model=True)
        self._desired = msgspec.structs.replace(
            self._desired,
            base_lora_served_name=served_name,
            base_model_sha256=hashlib.sha256(files["model.safetensors"]).hexdigest(),
            model_files=tuple(self._sign(served_name, name, data) for name, data in files.items()),
        )

    def withdraw(self) -> None:
        """The whole model was deleted."""
        self._desired = msgspec.structs.replace(
            self._desired, generation=self._desired.generation + 1, model_files=(), is_withdrawn=True
        )

    def want(self, *adapters: DesiredAdapter) -> int:
        """Desire exactly these; returns the new generation."""
        state = msgspec.structs.replace(
            self._desired, generation=self._desired.generation + 1, adapters=tuple(adapters)
        )
        self._desired = state
        return state.generation

    @contextmanager
    def keeping_not_ready_waiting(self) -> Iterator[None]:
        """Leave a replica that says it is not ready without an answer meanwhile."""
        self._takes_not_ready.clear()
        try:
            yield
        finally:
            self._takes_not_ready.set()

    def get_adapter(self, lora_name: str) -> ObservedAdapter | None:
        """Return what the last report says of an adapter."""
        rows = self.observed[-1].adapters if self.observed else ()
        return next((row for row in rows if row.lora_name == lora_name), None)

    def _sign(self, lora_name: str, name: str, data: bytes) -> SignedFile:
        path = f"/objects/{lora_name}/{hashlib.sha256(data).hexdigest()}/{name}"
        self._files[path] = data
        return SignedFile(name=name, url=self.url + path, sha256=hashlib.sha256(data).hexdigest(), bytes=len(data))

    def _answer(self, request: Request) -> Answer:
        path, _, query = request.path.partition("?")
        if path in self._files:
            return Answer(200, self._files[path])
        if (request.method, path) == ("POST", "/internal/v1/enroll"):
            if msgspec.json.decode(request.body, type=EnrollRequest).token != ENROLL_TOKEN:
                return _refuse(403, "bad_token")
            return Answer(200, msgspec.json.encode(self.enrollment))
        if request.bearer != CREDENTIAL:
            return _refuse(401, "unauthorized")
        if path == f"/internal/v1/replicas/{REPLICA_ID}/desired":
            self.desired_reads += 1
            if query == f"known_generation={self._desired.generation}":
                return Answer(304)
            return Answer(200, msgspec.json.encode(self._desired))
        if path == f"/internal/v1/replicas/{REPLICA_ID}/observed":
            state = msgspec.json.decode(request.body, type=ObservedState)
            self.observed.append(state)
            if not state.is_ready:
                self._takes_not_ready.wait(600)
            return Answer(204)
        return _refuse(404, "not_found")


def _refuse(status: int, code: str) -> Answer:
    return Answer(status, msgspec.json.encode({"error": {"code": code, "message": ""}}))
