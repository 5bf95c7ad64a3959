"""Inputs of a quote: the job, the pool, and the correction from that pool's finished runs."""

from collections import Counter
from collections.abc import Iterable

import msgspec

from apps.contracts.hyperparameters import Method
from apps.estimates.errors import EstimateError
from apps.estimates.models.architectures import Architecture
from apps.estimates.physics.gpus import Gpu
from apps.estimates.physics.plans import DEFAULT_TARGET_MODULES, Optimizer
from apps.estimates.physics.stacks import STACKS
from apps.estimates.physics.throughput import ProbeRow

# A value beyond these limits is a typing error.
_LIMITS = {
    "max_length": 16_777_216,
    "batch_size": 65_536,
    "epochs": 1_000,
    "tokens": 10**15,
    "rows": 10**10,
    "trained_tokens": 10**15,
    "longest_row_tokens": 16_777_216,
}


_METHODS, _OPTIMIZERS = frozenset(Method), frozenset(Optimizer)


class QuoteRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One job. `tokens` and `trained_tokens` are per epoch, after truncation to `max_length`, without padding.

    `row_lengths` is the dataset's length histogram as (length in tokens, rows), if known: padding is computed from it.
    `evaluation_tokens` are read once per evaluation, of which there are `evaluations`. DPO's reference reads all
    `held_out_rows` once. `checkpoints` is the number saved.
    """

    architecture: Architecture
    method: str
    max_length: int
    batch_size: int
    epochs: int
    rows: int
    tokens: int
    trained_tokens: int
    longest_row_tokens: int
    lora_rank: int = 16
    target_modules: tuple[str, ...] = DEFAULT_TARGET_MODULES
    use_dora: bool = False
    use_rslora: bool = False
    lora_dropout: float = 0.05
    optimizer: str = "adamw"
    packing: bool = False  # rows fill sequences of `max_length`
    pads_rows: bool = False  # at the customer's request, our trainer does not pack a micro-batch's rows
    row_lengths: tuple[tuple[int, int], ...] = ()
    evaluations: int = 0
    evaluation_tokens: int = 0
    held_out_rows: int = 0
    checkpoints: int | None = 1  # None: as often as the pool's workers save
    stack: str = "anneal"
    micro_batch_size: int | None = None  # None: the largest that fits
    gradient_checkpointing: bool | None = None  # None: only if needed
    cpu_offload: bool = False
    is_preference: bool = False  # a row is two answers; its length is the longer one's, its tokens both
    has_reference: bool = True  # of preferences: DPO compares with the original model, ORPO does not
    node_count: int = 1  # machines that share the GPUs evenly
    splits_rows: bool = False  # running text: a row longer than `max_length` is trained in pieces, nothing is cut

    def __post_init__(self) -> None:
        for name, most in _LIMITS.items():
            if not 1 <= getattr(self, name) <= most:
                raise EstimateError(name, f"{name} must be between 1 and {most:,}")
        if self.method not in _METHODS:
            raise EstimateError("method", f"method {self.method!r} is not lora, qlora or full")
        if self.optimizer not in _OPTIMIZERS:
            raise EstimateError("optimizer", f"optimizer {self.optimizer!r} is not known")
        if self.stack not in STACKS:
            raise EstimateError("stack", f"stack {self.stack!r} is not known; known: {', '.join(STACKS)}")
        if not 0 <= self.lora_dropout < 1:
            raise EstimateError("lora_dropout", "lora_dropout must be at least 0 and below 1")
        if not 1 <= self.lora_rank <= self.architecture.hidden_size:
            most = self.architecture.hidden_size
            raise EstimateError("lora_rank", f"lora_rank must be between 1 and hidden_size {most:,}")
        if self.method != Method.FULL and not any(name.strip() for name in self.target_modules):
            raise EstimateError("target_modules", "an adapter needs at least one module to adapt")
        if self.tokens < self.rows:
            raise EstimateError(
                "tokens", f"{self.rows:,} rows hold at least one token each, not {self.tokens:,} in all"
            )
        if self.trained_tokens > self.tokens:
            raise EstimateError("trained_tokens", "trained_tokens cannot exceed tokens")
        self._check_choices()

    @property
    def sequences_per_row(self) -> int:
        return 2 if self.is_preference else 1

    @property
    def mean_tokens(self) -> float:
        """Return the mean tokens of one sequence."""
        return self.tokens / (self.rows * self.sequences_per_row)

    @property
    def trained_share(self) -> float:
        return self.trained_tokens / self.tokens

    def _check_choices(self) -> None:
        for name in ("evaluations", "evaluation_tokens", "held_out_rows", "checkpoints"):
            if (getattr(self, name) or 0) < 0:
                raise EstimateError(name, f"{name} cannot be negative")
        micro = self.micro_batch_size
        if micro is not None and (micro < 1 or self.batch_size % micro):
            raise EstimateError("micro_batch_size", "micro_batch_size must divide batch_size")
        if self.use_dora and self.method == Method.FULL:
            raise EstimateError("use_dora", "DoRA is an adapter method")
        if self.cpu_offload and self.node_count > 1:
            raise EstimateError("cpu_offload", "cpu_offload divides the model, so it does not work on several machines")
        if self.cpu_offload and self.method == Method.QLORA and not STACKS[self.stack].offloads_quantized:
            raise EstimateError("cpu_offload", "4-bit weights stay on the GPU: offload LoRA or full fine-tuning")
        if self.is_preference and self.packing:
            raise EstimateError("packing", "pairs of answers are compared row by row, and not packed")
        if any(length < 1 or rows < 0 for length, rows in self.row_lengths):
            raise EstimateError("row_lengths", "row_lengths are pairs of a length of at least 1 and a number of rows")


class Correction(msgspec.Struct, frozen=True, kw_only=True):
    """A pool's correction from finished runs: measured / predicted, as factors on the physics.

    `beside_factor` is of the seconds that a run takes beside its training. The `p10` and `p90` factors are of the
    residual spread around the corrected figure. While the runs are too few for them, `time_low` and `time_high` are the
    least range of the time. `days` counts the days on which the runs ended. `origin` names, for pages, the data it was
    fitted on.
    """

    origin: str
    runs: int = 0
    version: int = 0
    time_factor: float = 1.0
    time_p10: float | None = None  # None: the physics' own interval
    time_p90: float | None = None
    time_low: float = 1.0
    time_high: float = 1.0
    days: int = 0
    memory_factor: float = 1.0
    memory_p10: float | None = None
    memory_p90: float | None = None
    beside_factor: float = 1.0
    beside_p10: float | None = None
    beside_p90: float | None = None


class PoolFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Current facts about a pool. The price is `price_nano` nano-USD per `price_per_seconds` of one GPU.

    `seconds_ahead` is the expected training time of the runs waiting or running before this one, over all workers.
    `gpus_per_worker` limits the GPUs of one job within a machine, `max_gpu_count` over machines. `download_bytes` are
    still to be fetched (0: cached).

    `bills_redone_work`: the renter of a spot GPU pays for the work that an interruption undid. A platform that bills
    only durable steps does not charge it. `minimum_seconds` of each GPU are billed at least, or the whole time from
    claim to end if that is less.

    `memory_factor` is a known error of the formula for this job: its rehearsed memory / computed.
    """

    gpu: Gpu
    probe: ProbeRow | None = None
    price_nano: int | None = None
    price_per_seconds: int = 3600
    live_workers: int = 0
    seconds_ahead: float = 0.0
    startup_seconds: float = 0.0
    gpus_per_worker: int = 1
    max_gpu_count: int | None = None  # None: gpus_per_worker
    node_bytes_per_second: float = 50e9  # between machines, each way and GPU: 400 Gbit/s InfiniBand
    host_memory_bytes: int | None = None  # of the smallest live worker; None: unknown
    worker_gpus: tuple[int, ...] = ()  # of each live worker; empty: unknown
    ahead_by_gpus: tuple[tuple[int, float], ...] = ()  # `seconds_ahead`, by the GPUs that the work needs
    free_gpus: tuple[int, ...] = ()  # of each live worker, if no run waits
    has_queue: bool = False  # a run waits
    further_gpus: tuple[int, ...] = ()  # of each worker that the pool is starting or may start
    start_seconds: float = 0.0  # from the request of such a worker until it can take a run
    is_spot: bool = False
    interruptions_per_hour: float = 0.0
    restart_seconds: float = 180.0
    checkpoint_seconds_apart: float = 600.0
    bills_redone_work: bool = True
    minimum_seconds: float = 0.0
    download_bytes: int = 0
    download_bytes_per_second: float = 200e6
    correction: Correction | None = None
    memory_factor: float = 1.0


def pieces_of(row_lengths: Iterable[tuple[int, int]], max_length: int) -> tuple[tuple[int, int], ...]:
    """Return (tokens, number) of the pieces into which rows of running text are split."""
    pieces = Counter[int]()
    for length, rows in row_lengths:
        whole, rest = divmod(length, max_length)
        pieces[max_length] += whole * rows
        pieces[rest] += rows
    return tuple(sorted((length, number) for length, number in pieces.items() if length and number))
