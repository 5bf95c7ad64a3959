"""What should be loaded on a replica, and what is: the only words between control plane and serving agent."""

from enum import StrEnum
from typing import Annotated

from msgspec import Meta

from apps.contracts.parity import ParityResult
from apps.contracts.runs import SignedFile, Struct
from apps.contracts.struct import Count, Rate, Seconds

Room = Annotated[int, Meta(ge=0, le=10_000)]  # adapters, or a rank: what any engine has and any plan can bear
LORA_NAME_PATTERN = r"^a-[0-9a-z]{26}$"


class LoadState(StrEnum):
    LOADING = "loading"
    LOADED = "loaded"
    REJECTED = "rejected"  # the adapter is bad: never retried on this replica
    FAILED = "failed"  # the replica could not: tried again


class DesiredAdapter(Struct, frozen=True, kw_only=True):
    """One adapter version to have loaded. `lora_name` is immutable: other weights have another name."""

    lora_name: str
    version_id: str
    manifest_sha256: str
    rank: int
    files: tuple[SignedFile, ...]
    is_tried: bool = False  # an engine has answered with exactly these weights before


class DesiredState(Struct, frozen=True, kw_only=True):
    """Everything the replica should hold now. `generation` grows with every change; an older one is ignored."""

    replica_id: str
    base_lora_served_name: str  # the engine's own name of the base model, `b-<id>`
    base_model_sha256: str
    generation: int
    adapters: tuple[DesiredAdapter, ...]
    model_files: tuple[SignedFile, ...] = ()  # of a whole model, which a replica of its own fetches before its engine
    is_withdrawn: bool = False  # that model was deleted: its files go, and its engine ends


class ObservedAdapter(Struct, frozen=True, kw_only=True):
    lora_name: str
    state: LoadState
    reason: str = ""
    parity: ParityResult | None = None  # what certified it, or failed to


class EngineLoad(Struct, frozen=True, kw_only=True):
    """How an engine is doing, by its own figures and the agent's. Rates are over the time since the last report."""

    memory_bytes: Count = 0  # resident, of every process of the engine
    cached_adapters: Count = 0  # in the engine's cache, those it no longer serves included
    running: Count = 0
    waiting: Count = 0  # in the engine, and before it for an adapter slot
    tokens_per_second: Rate = 0.0
    kv_cache_share: Rate = 0.0
    restarts: Count = 0  # of the engine, since the agent started
    disk_bytes: Count = 0  # of adapters in the local cache


class EngineCount(Struct, frozen=True, kw_only=True):
    """Tokens by the engine's own counters since it started, less what the agent asked for itself.

    `age_seconds`: how long ago they were read. A prompt counts once for each of its choices, as the engine counts it.
    """

    input_tokens: Count
    output_tokens: Count
    age_seconds: Seconds = 0.0


class ObservedState(Struct, frozen=True, kw_only=True):
    """What the engine says it holds. `engine_generation` changes with each engine start."""

    replica_id: str
    generation: Count
    engine_generation: Annotated[str, Meta(max_length=64)]
    is_ready: bool
    adapters: Annotated[tuple[ObservedAdapter, ...], Meta(max_length=10_000)]
    nan_requests_total: Count = 0
    reason: str = ""
    url: str = ""  # where its proxy listens; without effect: its address was settled at its enrolment
    capacity: Room = 0  # adapters registered at once
    max_lora_rank: Room = 0
    max_loras: Room = 0  # adapters in one batch
    base_model_sha256: Annotated[str, Meta(max_length=64)] = ""
    load: EngineLoad = EngineLoad()
    counted: EngineCount | None = None
