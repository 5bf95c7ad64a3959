"""Desired and observed state of a replica: all messages between control plane and serving agent."""

from enum import StrEnum
from typing import Annotated

from msgspec import Meta

from apps.contracts.parity import ParityResult
from apps.contracts.runs import SignedFile, Struct
from apps.contracts.struct import Count, Rate, Seconds

Room = Annotated[int, Meta(ge=0, le=10_000)]  # adapters, or a rank: more than any engine has
MAX_CHOICES = 128  # the most sequences that one request may ask of an engine; OpenAI's limit too
LORA_NAME_PATTERN = r"^a-[0-9a-z]{26}$"


class LoadState(StrEnum):
    LOADING = "loading"
    LOADED = "loaded"
    REJECTED = "rejected"  # the adapter is invalid: never retried on this replica
    FAILED = "failed"  # the replica failed: retried


class DesiredAdapter(Struct, frozen=True, kw_only=True):
    """One adapter version to load. `lora_name` is immutable: other weights have another name."""

    lora_name: str
    version_id: str
    manifest_sha256: str
    rank: int
    files: tuple[SignedFile, ...]
    is_tried: bool = False  # an engine has answered with exactly these weights before


class DesiredState(Struct, frozen=True, kw_only=True):
    """Everything the replica should hold now. `generation` grows with every change, but a restored
    database may send a lower one."""

    replica_id: str
    base_lora_served_name: str  # the engine's own name of the base model, `b-<id>`
    base_model_sha256: str
    generation: int
    adapters: tuple[DesiredAdapter, ...]
    model_files: tuple[SignedFile, ...] = ()  # of a whole model; its replica fetches them before the engine starts
    is_withdrawn: bool = False  # the whole model was deleted: its files are deleted and its engine stops


class ObservedAdapter(Struct, frozen=True, kw_only=True):
    lora_name: str
    state: LoadState
    reason: str = ""
    parity: ParityResult | None = None  # the result that certified it, or failed to


class EngineLoad(Struct, frozen=True, kw_only=True):
    """An engine's load, by its own figures and the agent's. Rates cover the time since the last report."""

    memory_bytes: Count = 0  # resident, of every process of the engine
    cached_adapters: Count = 0  # in the engine's cache, including those it no longer serves
    running: Count = 0
    waiting: Count = 0  # in the engine, and before it for an adapter slot
    tokens_per_second: Rate = 0.0
    kv_cache_share: Rate = 0.0
    restarts: Count = 0  # of the engine, since the agent started
    disk_bytes: Count = 0  # of adapters in the local cache


class EngineCount(Struct, frozen=True, kw_only=True):
    """Tokens by the engine's own counters since it started, without the agent's own requests.

    `age_seconds`: how long ago the counters were read. A prompt counts once for each of its choices.
    """

    input_tokens: Count
    output_tokens: Count
    age_seconds: Seconds = 0.0


class ObservedState(Struct, frozen=True, kw_only=True):
    """The state that the engine reports. `engine_generation` changes with each engine start."""

    replica_id: str
    generation: Count
    engine_generation: Annotated[str, Meta(max_length=64)]
    is_ready: bool
    adapters: Annotated[tuple[ObservedAdapter, ...], Meta(max_length=10_000)]
    nan_requests_total: Count = 0
    reason: str = ""
    url: str = ""  # of its proxy; has no effect: enrolment fixed its address
    capacity: Room = 0  # adapters registered at once
    max_lora_rank: Room = 0
    max_loras: Room = 0  # adapters in one batch
    base_model_sha256: Annotated[str, Meta(max_length=64)] = ""
    load: EngineLoad = EngineLoad()
    counted: EngineCount | None = None
