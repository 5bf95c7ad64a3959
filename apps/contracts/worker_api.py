"""Requests and responses of /internal/v1, the only interface between workers and the control plane.

A worker credential (`Authorization: Bearer annw_…`) opens `claim`, `probes` and `replicas`; a lease token opens
everything under its lease, and nothing else. A token of a group's other machines opens `member/…` only. A stale lease
gets 409 `stale_lease`: the worker must stop at once.
"""

from typing import Annotated, Any

from msgspec import Meta

from apps.contracts.parity import ParityProbe
from apps.contracts.runs import (
    BaseModelRef,
    CheckpointRef,
    Failed,
    Manifest,
    MemoryReport,
    MemoryRequest,
    RunEvent,
    RunOutcome,
    RunSpec,
    Stopped,
    Struct,
)
from apps.contracts.struct import Count, Rate, Seconds, Software, Steps, Text

API_VERSION = 1
NodeAddress = Annotated[str, Meta(max_length=253, pattern=r"^[A-Za-z0-9:._-]*\Z")]
# Both are part of quotes, which divide by them. A probe of a slower machine would take days.
Speed = Annotated[float, Meta(ge=1e-3, le=1e9)]  # tokens per second; the limit is beyond any machine
Size = Annotated[int, Meta(ge=1, le=2**31 - 1)]


class GpuInfo(Struct, frozen=True, kw_only=True):
    key: Text  # catalog key of the GPU type, or "cpu"
    name: Text
    memory_bytes: Count
    driver: Text = ""


class EnrollRequest(Struct, frozen=True, kw_only=True):
    """Redeem a one-time token. `kind` is "trainer" or "replica"."""

    token: str
    kind: str
    hostname: str
    gpus: Annotated[tuple[GpuInfo, ...], Meta(max_length=64)] = ()
    software: Software = {}
    memory_bytes: Count | None = None  # of the machine itself
    listen_url: str = ""  # replica: where the gateway reaches its proxy, unix:///… or http(s)://…


class EnrollResponse(Struct, frozen=True, kw_only=True):
    worker_id: str
    credential: str  # shown once
    pool: str
    replica_id: str | None = None
    replica_token: str | None = None  # the gateway presents it to this replica's proxy
    base_model: dict[str, str] | None = None  # replica: id, name, path|repo, revision, served_name
    files_sha256: dict[str, str] = {}  # replica: of the base model's files; {}: not known
    hub_token: str | None = None  # replica: opens the gated repository of its base model
    is_whole_model: bool = False  # replica: the model's files come with the desired state; it serves no adapters


class ClaimRequest(Struct, frozen=True, kw_only=True):
    api_version: int = API_VERSION
    base_models: Annotated[tuple[Text, ...], Meta(max_length=1_000)] | None = None  # ids installed; None: downloads
    software: Software = {}  # installed now, as at enrolment; {}: not reported
    free_gpus: Count | None = None  # that no run of this worker uses; None: all that are not leased
    gpu_count: Count | None = None  # all that it may use, in use or not; None: not reported
    leases: Annotated[tuple[Text, ...], Meta(max_length=64)] | None = None  # it works under these; None: not reported
    address: NodeAddress = ""  # where other machines of the pool reach it; "": it trains with no other machine
    port: Annotated[int, Meta(ge=1, le=65_535)] | None = None  # free there now, for a group to meet


class ClaimResponse(Struct, frozen=True, kw_only=True):
    spec: RunSpec
    lease_id: str
    lease_token: str
    lease_seconds: int
    heartbeat_seconds: int
    self_fence_seconds: int
    stall_seconds: float = 900.0  # without progress; then the worker ends the run as stalled


class LeaveRequest(Struct, frozen=True, kw_only=True):
    """A group's machine, other than the first, is done. Without an outcome the attempt goes on; else it ends so."""

    outcome: Failed | Stopped | None = None


class HeartbeatRequest(Struct, frozen=True, kw_only=True):
    step: Steps = 0
    phase: str = ""
    training_seconds: Seconds = 0.0
    work: Count = 0  # units done in this attempt, cumulative; a run without new ones for long is stalled
    gpu_utilization: float | None = None
    memory_bytes: Count | None = None


class HeartbeatResponse(Struct, frozen=True, kw_only=True):
    lease_seconds: int
    is_cancel_requested: bool = False
    is_pause_requested: bool = False
    is_drain_requested: bool = False  # checkpoint, report Stopped("preempted"), take no new work


class EventsRequest(Struct, frozen=True, kw_only=True):
    events: Annotated[tuple[RunEvent, ...], Meta(max_length=500)]  # a worker sends 200 at once; they lock their job


class EventsResponse(Struct, frozen=True, kw_only=True):
    accepted: int
    last_sequence: int


class UploadRequest(Struct, frozen=True, kw_only=True):
    """Request places for the files of a manifest. The same manifest always gets the same upload."""

    manifest: Manifest
    manifest_sha256: str


class UploadResponse(Struct, frozen=True, kw_only=True):
    upload_id: str
    files: dict[str, str]  # file name -> signed PUT URL; the manifest itself, "manifest.json", is put last
    parts: dict[str, tuple[str, ...]] = {}  # name of a large file -> signed PUT URLs of its parts, in order
    part_bytes: Count = 0  # of each part but the last


class JudgeAccess(Struct, frozen=True, kw_only=True):
    """How a run's worker calls its plan's judge: the gateway, and a key of the organization that lasts minutes."""

    url: str  # including /v1
    key: str
    model: str


class FinishRequest(Struct, frozen=True, kw_only=True):
    outcome: RunOutcome


class FinishResponse(Struct, frozen=True, kw_only=True):
    run_status: str
    job_status: str


PROBE_TRAINED_SHARE = 0.5  # of the tokens of a made-up row: its answer


class ProbeReport(Struct, frozen=True, kw_only=True):
    """One short measured training loop on this worker: the basis of every time estimate of its pool.

    It used a base model, or (`base_model_id` empty) generated weights of a `shape` whose config.json is `config`.
    `peak_memory_bytes` is reserved by torch on a GPU, resident on a CPU; `peak_allocated_bytes` exists on a GPU only.
    """

    base_model_id: str
    method: str
    gpu_key: str
    micro_batch_size: Size
    sequence_length: Size
    lora_rank: Steps
    threads: Steps
    tokens_per_second: Speed
    tokens_per_second_low: Speed
    tokens_per_second_high: Speed
    seconds_per_micro_step: Seconds
    peak_memory_bytes: Count
    startup_seconds: Seconds
    software: Software = {}
    shape: str = ""
    config: dict[str, Any] | None = None
    gradient_checkpointing: bool = False
    peak_allocated_bytes: Count | None = None
    device: Text = ""  # the driver's or the processor's own name of it
    measured_steps: Steps = 0
    waited_share: Rate = 0.0  # of its time, waiting for a core in use elsewhere; not part of `tokens_per_second`


class ProbeRequest(Struct, frozen=True, kw_only=True):
    """A measurement that the control plane lacks for the requesting worker's pool."""

    base_model: BaseModelRef
    method: str
    micro_batch_size: int
    sequence_length: int
    lora_rank: int = 16
    gradient_checkpointing: bool = False
    shape: str = ""
    config: dict[str, Any] | None = None  # config.json to generate weights for, instead of the base model's files
    is_first: bool = False  # of the method in the pool, whose quotes have no measured speed without it


class RehearsalRequest(Struct, frozen=True, kw_only=True):
    """Response of POST /internal/v1/rehearsals/next (worker credential): a job's memory to trace; 204 without one."""

    digest: str
    memory: MemoryRequest


class RehearsalReport(Struct, frozen=True, kw_only=True):
    """A traced request of this worker; with `error`, it could not be traced; with neither, a run arrived first."""

    digest: Text
    memory: MemoryReport | None = None
    error: Text = ""


class ExaminationRequest(Struct, frozen=True, kw_only=True):
    """Response of POST /internal/v1/examinations/next (worker credential): an uploaded adapter; 204 without one."""

    id: str
    base_model: BaseModelRef
    adapter: CheckpointRef
    lora_rank: int
    target_modules: tuple[str, ...]


class ExaminationReport(Struct, frozen=True, kw_only=True):
    """The probe of an adapter that this worker took; without `probe`, it could not be computed, or a run arrived."""

    id: Text
    probe: ParityProbe | None = None
    error: Text = ""


class ConversionClaim(Struct, frozen=True, kw_only=True):
    """Ask for a conversion. `base_models` are the ids installed, as in a claim; None: this worker downloads them."""

    base_models: Annotated[tuple[Text, ...], Meta(max_length=1_000)] | None = None


class ConversionRequest(Struct, frozen=True, kw_only=True):
    """Response of POST /internal/v1/conversions/next (worker credential): a leased conversion; 204 without one.

    The worker beats at `conversions/{id}/heartbeat`, and stores a sealed folder by `conversions/{id}/uploads`.
    """

    id: str
    kind: str  # "merged_16bit" | "gguf"
    base_model: BaseModelRef
    adapter: CheckpointRef  # or a whole model, if every weight was trained
    base_bytes: Count = 0  # of the base model in 16 bits, for the time limit
    beat_seconds: float = 30.0


class ConversionReport(Struct, frozen=True, kw_only=True):
    """The end of an attempt at a conversion: the manifest of the stored files, or why there are none.

    `is_lasting`: a repeat would not help. `is_interrupted`: a run arrived, or the worker stops.
    """

    manifest_sha256: str = ""
    problem: Text = ""
    is_lasting: bool = False
    is_interrupted: bool = False


class MissingProbes(Struct, frozen=True, kw_only=True):
    """Response of GET /internal/v1/probes/missing (worker credential).

    With `?base_model=<id>`, the requests of that base model include the token of its repository.
    """

    probes: tuple[ProbeRequest, ...] = ()
