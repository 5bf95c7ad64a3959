"""Uncertainty of an estimate: factors for P10 and P90 around it, and their source.

The factors are quantiles of measured / predicted over published rows. Each row was predicted with constants fitted
without its own source. `python -m tests.bench.estimates` prints them, with the share of held-out rows inside.
"""

import math

import msgspec

from apps.estimates.durations import Duration
from apps.estimates.physics.throughput import ProbeRow
from apps.estimates.requests import PoolFacts


class PredictionInterval(msgspec.Struct, frozen=True, kw_only=True):
    """Factors for a predicted value. `origin` names their source in words for pages."""

    p10: float
    p50: float
    p90: float
    origin: str


# For memory, the weights are known: these factors apply to the rest.
MEMORY = PredictionInterval(p10=0.89, p50=1.0, p90=1.25, origin="160 published runs of other training loops")
TIME = PredictionInterval(
    p10=0.89, p50=1.0, p90=1.25, origin="324 published runs of other training loops, none of this pool"
)
# The stacks that these rows come from. The formulas are further from the runs of any other: its switches were read from
# code and documents, and no row has confirmed them. The factors are quantiles over publishers, each with the same
# weight and with one more publisher of unknown place, half of it at either end (`tests.bench.estimates.publishers`), of
# 24 publishers of memory and 17 of time. Rows of two of them are not kept here (without: 23 and 15, 0.55 to 2.04 and
# 0.78 to 1.86).
# For memory, ms-swift and LitGPT count as others too: three fifths of their own rows are inside the narrow interval.
MEASURED_STACKS = {
    "memory": frozenset({"qwen", "fsdp_qlora", "peft"}),
    "time": frozenset({"foundry", "qwen", "fsdp_qlora", "peft"}),
}
UNSEEN_MEMORY = PredictionInterval(p10=0.61, p50=1.0, p90=1.88, origin="published runs of other publishers")
UNSEEN_TIME = PredictionInterval(p10=0.78, p50=1.0, p90=1.81, origin="published runs of other publishers")
# A probe measures the pool itself; the remaining error comes from another model, length and batch. The factors are
# medians, over sources and GPU types, of the same quantiles, with each row predicted from another of its source and
# type.
PROBED = PredictionInterval(p10=0.81, p50=1.0, p90=1.23, origin="spread of this pool's benchmark, applied to this job")
# Repeats of one training loop on an otherwise idle machine still vary: clocks, allocator, data loader.
GPU_REPEATS = PredictionInterval(p10=0.98, p50=1.0, p90=1.02, origin="repeats of one training loop")
# On a CPU, a whole job shares its machine for minutes with this platform, the probe for seconds. Beside an idle
# platform, with a new probe before each, six LoRA jobs of the demo took 0.96 to 1.03 times the duration by their probe
# (0.98 in the median), and two QLoRA jobs 1.01 and 1.15 times. The range is wider: in earlier runs of the whole demo,
# other programs started or served requests meanwhile, and jobs took 0.87 to 1.20 times the duration.
CPU_REPEATS = PredictionInterval(p10=0.87, p50=1.0, p90=1.22, origin="spread of whole jobs on a CPU around its probe")
# A job runs on another day than its probe: with other clocks, temperatures and neighbours. GPUs of one model vary by
# 8 % in one cluster (arXiv 2208.11035, 18,800 hours on five clusters). On a CPU, other programs of the machine come and
# go: runs of the demo with a core kept busy took 1.15 and 1.22 times their quotes, and one took 1.6 times.
GPU_DAYS = PredictionInterval(p10=0.92, p50=1.0, p90=1.08, origin="variation between days")
CPU_DAYS = PredictionInterval(p10=0.92, p50=1.0, p90=1.25, origin="variation between days")
_ENOUGH_DAYS = 5  # of a pool's runs; their own spread then includes the variation between days
# A job may wait for cores as its probe did; the probe's speed excludes the waiting. Measured at a load of 14 on two
# cores: the probe waited 78 % of its time, and 86 of 626 steps took 4.5 = 1 / (1 - 0.78) times their P50. The limit is
# five times.
_MAX_WAITED = 0.8
# A probe ends once it has waited for at most the first share of its time. If it never does, the load lasts: waiting
# above this share counts in P50, up to the second share. With a core of two kept busy, probes waited about 10 % of
# their time, and fourteen jobs took 0.98 to 1.35 times the time by them alone, 1.11 times in the mean.
_PASSING, _MAX_LASTING = 0.02, 0.2
# On a CPU, resident memory was measured at 1.44 to 1.88 times the live memory; the reserve is the middle.
CPU_MEMORY = PredictionInterval(p10=0.82, p50=1.0, p90=1.10, origin="four jobs measured on a CPU")


# The seconds beside training depend on disks, networks and the model's size: without finished runs, half or twice.
BESIDE = PredictionInterval(p10=0.5, p50=1.0, p90=2.0, origin="phases of the demo's jobs, none of this pool")


class MemoryInterval(msgspec.Struct, frozen=True):
    """Factors of memory. `bounds` are (of the whole, of all except weights) at P10, P50 and P90."""

    bounds: tuple[tuple[float, float], tuple[float, float], tuple[float, float]]
    origin: str

    def amounts(self, peak: float, weights: float) -> tuple[int, int, int]:
        low, middle, high = (whole * (weights + rest * (peak - weights)) for whole, rest in self.bounds)
        return round(low), round(middle), round(high)

    @property
    def margin(self) -> tuple[float, float]:
        return self.bounds[2]


def is_measured(stack: str, kind: str) -> bool:
    """Return whether published rows of this stack are behind the narrow interval of "memory" or "time"."""
    return stack.partition("+")[0] in MEASURED_STACKS[kind]


def memory_interval(pool: PoolFacts) -> MemoryInterval:
    """Return the interval learned from finished runs; else the spread of the formulas."""
    base, learned = CPU_MEMORY if pool.gpu.is_cpu else MEMORY, pool.correction
    factor = pool.memory_factor
    if learned is None:
        return MemoryInterval(((factor, base.p10), (factor, 1.0), (factor, base.p90)), base.origin)
    factor *= learned.memory_factor
    low = (factor * learned.memory_p10, 1.0) if learned.memory_p10 else (factor, base.p10)
    high = (factor * learned.memory_p90, 1.0) if learned.memory_p90 else (factor, base.p90)
    return MemoryInterval((low, (factor, 1.0), high), learned.origin)


def time_interval(pool: PoolFacts, times: Duration) -> PredictionInterval:
    """Return the interval learned from finished runs; else the probe's spread; else that of the formulas alone.

    What runs have taught is relative to the P50 of the interval without them. While they are few, their spread only
    widens the range. While they are of a few days, the range is at least the variation between days.
    """
    base, learned = _probed(pool.probe, times, pool) if pool.probe is not None else TIME, pool.correction
    if learned is None:
        return base
    if learned.time_p10 and learned.time_p90:
        days = _days(pool)
        least = (1.0, 1.0) if learned.days >= _ENOUGH_DAYS else (days.p10, days.p90)
        low, high = min(learned.time_p10, least[0]), max(learned.time_p90, least[1])
    else:
        low, high = min(base.p10 / base.p50, learned.time_low), max(base.p90 / base.p50, learned.time_high)
    middle = learned.time_factor * base.p50
    return PredictionInterval(p10=low * middle, p50=middle, p90=high * middle, origin=learned.origin)


def beside_interval(pool: PoolFacts) -> PredictionInterval:
    """Return the interval of the seconds beside training: learned from finished runs, else a wide one."""
    learned = pool.correction
    if learned is None:
        return BESIDE
    middle = learned.beside_factor
    low, high = learned.beside_p10 or BESIDE.p10, learned.beside_p90 or BESIDE.p90
    return PredictionInterval(p10=low * middle, p50=middle, p90=high * middle, origin=learned.origin)


def whole_job_factor(pool: PoolFacts) -> float:
    """Return the expected seconds of a job for each second that its loop takes alone, as in a probe."""
    return _repeats(pool).p50 * math.exp(_lasting(pool.probe)) if pool.probe is not None else 1.0


def _lasting(probe: ProbeRow) -> float:
    """Return the logarithm of a job's expected time over its time without waiting for cores."""
    return -math.log(1 - min(max(probe.waited_share - _PASSING, 0.0), _MAX_LASTING))


def _repeats(pool: PoolFacts) -> PredictionInterval:
    return CPU_REPEATS if pool.gpu.is_cpu else GPU_REPEATS


def _days(pool: PoolFacts) -> PredictionInterval:
    return CPU_DAYS if pool.gpu.is_cpu else GPU_DAYS


def _probed(probe: ProbeRow, times: Duration, pool: PoolFacts) -> PredictionInterval:
    """Return the spread of the probe's repeats for its own job; it reaches the full spread at twice or half its work.

    The variation between days is added to both.
    The middle waits for cores as much as the probe did beyond `_PASSING`, up to `_MAX_LASTING`. Upwards, the interval
    includes a job that waits as much as the probe; downwards, one that does not wait.
    """
    low, high = probe.tokens_per_second_low, probe.tokens_per_second_high
    repeats = math.log(high / low) / 2 if low and high and high > low else 0.0
    share, least, days = min(1.0, times.probe_distance), _repeats(pool), _days(pool)
    down = math.hypot(max(repeats, math.log(least.p50 / least.p10)), share * math.log(PROBED.p10), math.log(days.p10))
    waiting, lasting = -math.log(1 - min(probe.waited_share, _MAX_WAITED)), _lasting(probe)
    slow = max(repeats, math.log(least.p90 / least.p50), waiting - lasting)
    up = math.hypot(slow, share * math.log(PROBED.p90), math.log(days.p90))
    origin = PROBED.origin if share > 0 else f"spread of the probe's repeats and the {days.origin}"
    middle = least.p50 * math.exp(lasting)
    return PredictionInterval(p10=least.p50 * math.exp(-down), p50=middle, p90=middle * math.exp(up), origin=origin)
