"""How far a predicted time may be off: factors for p10, p50 and p90, and where they come from."""

import math
from collections.abc import Sequence
from statistics import quantiles

import msgspec

from apps.estimates.throughput import ProbeRow, Throughput

_Z90 = 1.2816  # 90th percentile of the standard normal distribution

# Spread (of the logarithm of predicted / measured time; four fifths lie within p10 to p90) when a speed is carried from
# one measurement to another on the same GPU type, leave-one-out over the published bf16 rows, as printed by
# `python -m tests.bench.estimate_error`: "time, same stack", single GPU, n = 67; "time, other stack", all, n = 293.
TRANSFER_SPREAD_SAME_STACK = 0.44
TRANSFER_SPREAD_OTHER_STACK = 0.50
# Repeats of one training loop on an otherwise idle machine still vary: clocks, allocator, data loader.
_LEAST_REPEAT_SPREAD = 0.02
_LEAST_FINISHED_RUNS = 10


class Interval(msgspec.Struct, frozen=True, kw_only=True):
    """Multiply a predicted time by these. `origin` says, in words for people, what they were fitted on."""

    p10: float
    p50: float
    p90: float
    origin: str


def time_interval(*, probe: ProbeRow, throughput: Throughput, method: str, ratios: Sequence[float] = ()) -> Interval:
    """The interval of a time scaled from `probe`. `ratios` are measured / predicted times of the pool's finished runs;
    ten of them replace every assumption."""
    if len(ratios) >= _LEAST_FINISHED_RUNS:
        return interval_from_ratios(ratios)
    if probe.source.kind != "probe":
        origin = "spread between published measurements of one GPU type, carried over from another stack"
        return interval_from_spread(spread=TRANSFER_SPREAD_OTHER_STACK, origin=origin)
    repeats, transfer = _repeat_spread(probe), _transfer_spread(probe, throughput, method)
    origin = "spread of the probe's repeats"
    if transfer > 0:
        origin += ", and of carrying a speed to another model, method or length"
    return interval_from_spread(spread=math.hypot(repeats, transfer), origin=origin)


def interval_from_spread(*, spread: float, origin: str) -> Interval:
    """A log-normal interval around 1 of this standard deviation of the logarithm."""
    return Interval(p10=math.exp(-_Z90 * spread), p50=1.0, p90=math.exp(_Z90 * spread), origin=origin)


def interval_from_ratios(ratios: Sequence[float]) -> Interval:
    """Empirical deciles of measured / predicted times."""
    deciles = quantiles(ratios, n=10, method="inclusive")
    return Interval(
        p10=deciles[0], p50=deciles[4], p90=deciles[8], origin=f"this pool's last {len(ratios)} finished runs"
    )


def _repeat_spread(probe: ProbeRow) -> float:
    """The probe's fastest and slowest repeats, read as its 10th and 90th percentile."""
    low, high = probe.tokens_per_second_low, probe.tokens_per_second_high
    if not low or not high or high <= low:
        return _LEAST_REPEAT_SPREAD
    return max(_LEAST_REPEAT_SPREAD, math.log(high / low) / (2 * _Z90))


def _transfer_spread(probe: ProbeRow, throughput: Throughput, method: str) -> float:
    """None for the probe's own job, growing to the measured spread at twice or half its work per token, or at a
    quarter or four times its tokens per micro-step (their fixed time is rarely known)."""
    work = abs(math.log2(throughput.flops_per_token / throughput.probe_flops_per_token))
    tokens = abs(math.log2(throughput.tokens_per_micro_step / probe.tokens_per_micro_step)) / 2
    share = 1.0 if method != probe.method else min(1.0, max(work, tokens))
    return TRANSFER_SPREAD_SAME_STACK * share
