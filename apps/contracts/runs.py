"""A training run in messages between web and worker: its spec, events and outcome.

WARNING: runs in flight hold these structs. Changes are additive only: a new field has a default, a field never changes
meaning, a tag is never reused.
"""

from enum import StrEnum
from typing import Annotated

from msgspec import Meta

from apps.contracts.addresses.machines import NodeGroup
from apps.contracts.evaluation import EvaluationPlan, EvaluationReport
from apps.contracts.failures import FailureCode
from apps.contracts.hyperparameters import Hyperparameters
from apps.contracts.struct import Count, Rate, Seconds, Software, Steps, Text
from apps.contracts.struct import Struct as Struct

MAX_SAMPLES, SAMPLE_CHARACTERS = 3, 1_000
SampleText = Annotated[str, Meta(max_length=SAMPLE_CHARACTERS)]


class Phase(StrEnum):
    """The worker's present work, for display; no decision depends on it."""

    DOWNLOADING = "downloading"
    LOADING = "loading"
    TRAINING = "training"
    EVALUATING = "evaluating"
    UPLOADING = "uploading"


class SignedFile(Struct, frozen=True, kw_only=True):
    """One object that a worker may read until the URL expires. `sha256` is lower-case hex of the content."""

    name: str
    url: str
    sha256: str
    bytes: int


class ManifestFile(Struct, frozen=True, kw_only=True):
    name: str
    sha256: str
    bytes: int


class Manifest(Struct, frozen=True, kw_only=True):
    """The files of a checkpoint or an adapter. It is written last, so an object with a manifest is complete."""

    kind: str  # "checkpoint" | "adapter" | "model"
    run_id: str
    attempt: int
    step: int
    files: tuple[ManifestFile, ...]
    metadata: dict[str, str] = {}


class BaseModelRef(Struct, frozen=True, kw_only=True):
    """Where the worker finds the base model: a local path, or a hub repository at one commit."""

    id: str
    name: str
    path: str | None = None
    repo: str | None = None
    revision: str | None = None
    files_sha256: dict[str, str] = {}
    chat_template: str = ""
    chat_template_sha256: str = ""
    hub_token: str | None = None


class DatasetRef(Struct, frozen=True, kw_only=True):
    id: str
    sha256: str
    bytes: int
    rows: int
    url: str
    kind: str = "chat"  # "chat" | "preference" | "text"


class CheckpointRef(Struct, frozen=True, kw_only=True):
    """A verified checkpoint to resume from, or a checkpoint or adapter version of an earlier job to start with."""

    id: str
    step: int
    manifest_sha256: str
    files: tuple[SignedFile, ...]


class Tracker(Struct, frozen=True, kw_only=True):
    """An external tracker on which the customer follows the run, with the customer's account and key.

    `project` is W&B's project or MLflow's experiment, `name` the run's name there; `url` is MLflow's server.
    """

    kind: str  # "wandb" | "mlflow"
    project: str
    name: str = ""
    entity: str | None = None
    tags: tuple[str, ...] = ()
    url: str = ""
    secret: str | None = None  # stays in the agent and the reporting process; never written to a file


class RunSpec(Struct, frozen=True, kw_only=True):
    """A frozen snapshot of everything one attempt needs: the same spec gives the same adapter."""

    run_id: str
    job_id: str
    organization_id: str
    attempt: int
    base_model: BaseModelRef
    training: DatasetRef
    hyperparameters: Hyperparameters
    validation: DatasetRef | None = None
    resume_from: CheckpointRef | None = None
    checkpoint_interval_seconds: int = 300
    expected_training_seconds: float | None = None  # of all steps, from the quote
    estimated_peak_bytes: int | None = None
    rehearsed_bytes: int | None = None  # of one GPU; None: not rehearsed yet
    rehearsal: "MemoryRequest | None" = None  # for the worker to rehearse before it begins
    start_from: CheckpointRef | None = None  # weights to start with; nothing else is taken from it
    gpu_count: int = 1  # of all machines
    parallelism: str = "single"  # "single" | "ddp" | "fsdp"
    model_copies: int = 1  # of fsdp: each is spread over as many GPUs, and several exchange only gradients (HSDP)
    group: NodeGroup | None = None  # None: one machine
    seconds_between_failures: float | None = None  # of the pool, measured; None: too few failures to measure
    evaluation: EvaluationPlan | None = None  # None: the default plan, if there are held-out rows
    exports: tuple[str, ...] = ()  # besides the adapter: "merged_16bit", "gguf"
    trackers: tuple[Tracker, ...] = ()

    @property
    def gpus_here(self) -> int:
        """The GPUs of one machine."""
        return self.gpu_count // self.group.node_count if self.group else self.gpu_count

    @property
    def is_led_elsewhere(self) -> bool:
        """Whether another machine reports and delivers."""
        return self.group is not None and self.group.rank > 0


# --- events -----------------------------------------------------------------------------------------------------


class Event(Struct, frozen=True, kw_only=True, tag_field="type"):
    """Something the worker observed. `sequence` counts up from 1 within an attempt; repeated events are ignored."""

    sequence: Count


class PhaseChanged(Event, frozen=True, kw_only=True, tag="phase_changed"):
    phase: Phase


class TrainingStarted(Event, frozen=True, kw_only=True, tag="training_started"):
    """The model is loaded and the first batch is ready: billing starts here."""

    total_steps: Steps
    start_step: Steps
    rows: Steps
    trained_tokens_per_epoch: Count


class StepCompleted(Event, frozen=True, kw_only=True, tag="step_completed"):
    """Progress, at most a few times per second. Tokens are cumulative over the job; seconds over this attempt."""

    step: Steps
    total_steps: Steps
    epoch: float
    train_loss: float
    learning_rate: float
    grad_norm: float | None
    trained_tokens: Count
    tokens_per_second: Rate
    training_seconds: Seconds
    train_mean_token_accuracy: float | None = None  # for preferences: the share of pairs ranked correctly
    memory_bytes: Count | None = None  # reserved on a GPU, or resident on a CPU
    gpu_utilization: float | None = None  # 0 to 1
    gpu_celsius: Rate | None = None
    gpu_watts: Rate | None = None
    eta_seconds: float | None = None


class EvaluationCompleted(Event, frozen=True, kw_only=True, tag="evaluation_completed"):
    step: Steps
    valid_loss: float
    valid_mean_token_accuracy: float | None = None


class CheckpointSaved(Event, frozen=True, kw_only=True, tag="checkpoint_saved"):
    """Every file and the manifest are in the object store under `upload_id`."""

    step: Steps
    upload_id: str
    manifest_sha256: str
    bytes: Count
    trained_tokens: Count
    training_seconds: Seconds
    train_loss: float | None = None


class Sample(Struct, frozen=True, kw_only=True):
    """A prompt, the answer that its row has, and the model's answer; each is cut."""

    prompt: SampleText
    reference: SampleText
    answer: SampleText


class SamplesGenerated(Event, frozen=True, kw_only=True, tag="samples_generated"):
    """The answers of the model after `step` to the same prompts; step 0 is the model before training."""

    step: Steps
    samples: Annotated[tuple[Sample, ...], Meta(max_length=MAX_SAMPLES)]


class LogLine(Event, frozen=True, kw_only=True, tag="log_line"):
    level: str  # "info" | "warn" | "error"
    message: str


RunEvent = (
    PhaseChanged | TrainingStarted | StepCompleted | EvaluationCompleted | CheckpointSaved | SamplesGenerated | LogLine
)


# --- outcomes ---------------------------------------------------------------------------------------------------


class Outcome(Struct, frozen=True, kw_only=True, tag_field="type"):
    """The end of an attempt.

    `training_seconds` is the time from TrainingStarted to the last training step by the worker's monotonic clock, and
    counts only durable steps (checkpointed, or in the adapter). `tokens` are all processed tokens, with prompts and
    without padding, cumulative over the job like `trained_tokens`. `peak_memory_bytes` is torch's maximum reservation
    on a GPU, resident memory on a CPU.
    """

    training_seconds: Seconds = 0.0
    trained_tokens: Count = 0
    tokens: Count | None = None
    peak_memory_bytes: Count | None = None


class Export(Struct, frozen=True, kw_only=True):
    """Another form of the result, stored complete under a separate upload."""

    kind: str  # "merged_16bit" | "gguf"
    upload_id: str
    manifest_sha256: str


class MissingPart(Struct, frozen=True, kw_only=True):
    """A promised part besides the adapter that could not be made or stored."""

    kind: str  # "evaluation" | "merged_16bit" | "gguf"
    cause: str  # for the customer: follows a colon, without a full stop
    is_made: bool = False  # it only could not be stored, so another attempt may deliver it


class Succeeded(Outcome, frozen=True, kw_only=True, tag="succeeded"):
    upload_id: str
    manifest_sha256: str
    step: Steps
    train_loss: float | None = None
    valid_loss: float | None = None
    is_stopped_early: bool = False  # the evaluation stopped improving; `step` is the last one trained
    best_step: Steps | None = None  # the step of these weights, if it is not the last one
    report: EvaluationReport | None = None  # base and tuned on held-out rows
    exports: tuple[Export, ...] = ()
    missing: tuple[MissingPart, ...] = ()


class Failed(Outcome, frozen=True, kw_only=True, tag="failed"):
    code: FailureCode
    message: str  # one line for the customer, without paths and host names
    log_tail: str = ""


class StopReason(StrEnum):
    """Why an attempt stops before its end: a customer's request, or its machine has to go."""

    CANCELLED = "cancelled"
    PAUSED = "paused"
    PREEMPTED = "preempted"


class Stopped(Outcome, frozen=True, kw_only=True, tag="stopped"):
    """The attempt followed a request (cancel, pause, drain) and kept what it could."""

    reason: str  # a StopReason to the control plane; the training child knows no reason and says "stopped"
    step: Steps = 0


RunOutcome = Succeeded | Failed | Stopped


# --- memory rehearsals --------------------------------------------------------------------------------------------


class MemoryRequest(Struct, frozen=True, kw_only=True):
    """One process of a job. `config` is the model's config.json; a micro-step has `rows` rows of `row_tokens` tokens.

    `gradient_accumulation_steps` of the recipe matters, its `batch_size` does not.
    """

    config: dict[str, object]
    hyperparameters: Hyperparameters
    rows: int = 1
    row_tokens: int = 1024
    trained_share: float = 1.0  # of a row's tokens; the head runs on these alone
    gpu_count: int = 1
    parallelism: str = "single"  # "single" | "ddp" | "fsdp"
    is_on_cpu: bool = False
    stack: str = "anneal"  # or another of apps.estimates: transformers' Trainer with PEFT, as published rows used it
    attention: str = "flash"  # of other stacks than ours: "flash" or "eager"
    is_full_depth: bool = False  # trace every layer; else two shallow depths, extrapolated


class MemoryReport(Struct, frozen=True, kw_only=True):
    """Bytes of one process at the peak. `allocated_bytes` are tensors; `peak_bytes` adds the constants of a device."""

    allocated_bytes: Count
    resting_bytes: Count  # of them, weights and optimizer state, which stay between steps
    weight_bytes: Count  # of them, the base model
    peak_bytes: Count
    moment: Text  # of the peak
    moments: Annotated[dict[Text, Count], Meta(max_length=200)]
    seconds: Seconds = 0.0
    software: Software = {}
