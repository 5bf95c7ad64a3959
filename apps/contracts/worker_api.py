"""Requests and answers of /internal/v1, the only door between workers and the control plane.

A worker credential (`Authorization: Bearer annw_…`) opens `claim`, `probes` and `replicas`; a lease token opens
everything under its lease, and nothing else. A stale lease gets 409 `stale_lease`: the worker must stop at once.
"""

from typing import Annotated, Any

from msgspec import Meta

from apps.contracts.runs import BaseModelRef, Manifest, RunEvent, RunOutcome, RunSpec, Struct
from apps.contracts.struct import Count, Rate, Seconds, Software, Steps, Text

API_VERSION = 1
Speed = Annotated[float, Meta(gt=0, le=1e9)]  # tokens a second: beyond any machine, and below any price of nothing


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
    replica_token: str | None = None  # what the gateway presents to this replica's proxy
    base_model: dict[str, str] | None = None  # replica: id, name, path|repo, revision, served_name
    is_whole_model: bool = False  # replica: the model's files come with the desired state; it serves no adapters


class ClaimRequest(Struct, frozen=True, kw_only=True):
    api_version: int = API_VERSION
    base_models: tuple[str, ...] | None = None  # ids installed here; None = will download
    software: Software = {}  # what is installed now, as at enrolment; {}: not told


class ClaimResponse(Struct, frozen=True, kw_only=True):
    spec: RunSpec
    lease_id: str
    lease_token: str
    lease_seconds: int
    heartbeat_seconds: int
    self_fence_seconds: int
    stall_seconds: float = 900.0  # without progress, after which the worker ends the run as stalled


class HeartbeatRequest(Struct, frozen=True, kw_only=True):
    step: Steps = 0
    phase: str = ""
    training_seconds: Seconds = 0.0
    work: Count = 0  # units done in this attempt, counted up: without any for long, the run is stalled
    gpu_utilization: float | None = None
    memory_bytes: Count | None = None


class HeartbeatResponse(Struct, frozen=True, kw_only=True):
    lease_seconds: int
    is_cancel_requested: bool = False
    is_pause_requested: bool = False
    is_drain_requested: bool = False  # checkpoint, report Stopped("preempted"), take no new work


class EventsRequest(Struct, frozen=True, kw_only=True):
    events: tuple[RunEvent, ...]


class EventsResponse(Struct, frozen=True, kw_only=True):
    accepted: int
    last_sequence: int


class UploadRequest(Struct, frozen=True, kw_only=True):
    """Ask for places to put the files of a manifest. The same manifest asked again gets the same upload."""

    manifest: Manifest
    manifest_sha256: str


class UploadResponse(Struct, frozen=True, kw_only=True):
    upload_id: str
    files: dict[str, str]  # file name -> signed PUT URL; the manifest itself under "manifest.json", put last


class JudgeAccess(Struct, frozen=True, kw_only=True):
    """How a run's worker asks the judge of its plan: the gateway, and a key of the organization for minutes."""

    url: str  # up to and with /v1
    key: str
    model: str


class FinishRequest(Struct, frozen=True, kw_only=True):
    outcome: RunOutcome


class FinishResponse(Struct, frozen=True, kw_only=True):
    run_status: str
    job_status: str


class ProbeReport(Struct, frozen=True, kw_only=True):
    """One short measured training loop on this worker: the row every time estimate of its pool starts from.

    Of a base model, or (`base_model_id` empty) of made-up weights of a `shape` whose config.json is `config`.
    `peak_memory_bytes` is reserved by torch on a GPU, resident on a CPU; `peak_allocated_bytes` is a GPU's alone.
    """

    base_model_id: str
    method: str
    gpu_key: str
    micro_batch_size: Steps
    sequence_length: Steps
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
    device: Text = ""  # the driver's or the processor's own name for it
    measured_steps: Steps = 0
    waited_share: Rate = 0.0  # of its time, for a core that something else used; not in `tokens_per_second`


class ProbeRequest(Struct, frozen=True, kw_only=True):
    """A measurement the control plane has no row for in the asking worker's pool."""

    base_model: BaseModelRef
    method: str
    micro_batch_size: int
    sequence_length: int
    lora_rank: int = 16
    gradient_checkpointing: bool = False
    shape: str = ""
    config: dict[str, Any] | None = None  # config.json to make weights up for, in place of the base model's files


class MissingProbes(Struct, frozen=True, kw_only=True):
    """Answer of GET /internal/v1/probes/missing (worker credential).

    Asked with `?base_model=<id>`, the requests of that base model come with the token of its repository.
    """

    probes: tuple[ProbeRequest, ...] = ()
