"""The bill of a job at P10, P50 and P90: the seconds of training, those beside it, and what a minimum charge adds."""

import math

import msgspec

from apps.estimates.durations import Duration
from apps.estimates.intervals import PredictionInterval, beside_interval
from apps.estimates.requests import PoolFacts

# A run starts two processes that load the model: the trainer, and the one that evaluates and publishes its result.
_STARTS = 2
# A run also fetches its files, rehearses its memory, answers samples, and uploads its result. 23 jobs of the demo
# (SmolLM2-135M on two cores) took 6.5 s in the median from claim to training, and 13.5 s from the last step to the end,
# starts and evaluations included. Of five jobs with 20 rows, four were billed 11 to 17 s.
_HANDLING_SECONDS = 8.0


class Bill(msgspec.Struct, frozen=True):
    """Seconds of the job at P10, P50 and P90 and their cost.

    `whole` includes the time added by spot interruptions, `beside` is what a run takes beside its training.
    """

    seconds: tuple[float, float, float]
    whole: tuple[float, float, float]
    beside: tuple[float, float, float]
    billed: tuple[int, int, int]
    costs: tuple[int | None, int | None, int | None]
    interruptions: float
    redone: float


def bill_of(pool: PoolFacts, times: Duration, interval: PredictionInterval, gpu_count: int) -> Bill:
    """Return the bill.

    An interruption costs the restart and, on average, half of the time between two checkpoints.
    """
    lost = pool.checkpoint_seconds_apart / 2 + pool.restart_seconds
    rate = pool.interruptions_per_hour / 3600 if pool.is_spot else 0.0
    # Redone work can be interrupted again: a geometric series, which diverges if no run can ever finish.
    stretch = 1 / max(0.05, 1 - rate * lost)
    wanted = _scaled(times.train_seconds, interval)
    whole = (wanted[0] * stretch, wanted[1] * stretch, wanted[2] * stretch)
    seconds = whole if pool.bills_redone_work else wanted
    # A run's seconds beside training, as far as they are known without finished runs.
    around = download_seconds(pool) + _STARTS * pool.startup_seconds + _HANDLING_SECONDS
    known = around + times.reference_seconds + times.evaluation_seconds + times.checkpoint_seconds
    beside = _scaled(known, beside_interval(pool))
    held = [apart + training for apart, training in zip(beside, whole, strict=True)]
    due = [max(each, min(pool.minimum_seconds, least)) for each, least in zip(seconds, held, strict=True)]
    billed = (math.ceil(due[0]), math.ceil(due[1]), math.ceil(due[2]))
    costs = tuple(_cost(pool, each, gpu_count) for each in due)
    return Bill(seconds, whole, beside, billed, (costs[0], costs[1], costs[2]), whole[1] * rate, whole[1] - wanted[1])


def cost_nano(*, price_nano: int, price_per_seconds: int, seconds: int) -> int:
    """Return the price of these billed seconds in nano-USD, rounded half up."""
    return (2 * price_nano * seconds + price_per_seconds) // (2 * price_per_seconds)


def download_seconds(pool: PoolFacts) -> float:
    return pool.download_bytes / pool.download_bytes_per_second if pool.download_bytes else 0.0


def _scaled(seconds: float, interval: PredictionInterval) -> tuple[float, float, float]:
    return seconds * interval.p10, seconds * interval.p50, seconds * interval.p90


def _cost(pool: PoolFacts, seconds: float, gpu_count: int) -> int | None:
    """Return the cost of the seconds, in milliseconds as they are billed."""
    if pool.price_nano is None:
        return None
    ms = math.ceil(seconds * 1000) * gpu_count
    return cost_nano(price_nano=pool.price_nano, price_per_seconds=pool.price_per_seconds * 1000, seconds=ms)
