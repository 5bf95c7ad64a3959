"""Corrections learned from finished runs.

A correction is a factor on the formulas ("physics") for a pool, a model family and a method, with a spread. Fits use
the logarithm of actual / physics, and medians in which the physics has some votes. So the physics counts until runs
outvote it, and one faulty run changes nothing. A level without runs (a new family) uses the levels above it.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median

import msgspec

from apps.contracts.adapter_files import adapted_modules
from apps.contracts.worker_api import PROBE_TRAINED_SHARE, ProbeReport
from apps.estimates.intervals import whole_job_factor
from apps.estimates.models import architectures
from apps.estimates.quote import Estimate, quote
from apps.estimates.requests import Correction, PoolFacts, QuoteRequest

# Version of the formulas that ratios refer to. Change it with the formulas: a ratio to other formulas is useless.
PHYSICS = "8"

_ROWS = 64  # an arbitrary number: rates do not depend on it

_FOLDS = 5  # of the cross-validation
_Z90 = 1.2816  # 90th percentile of the standard normal distribution

# Votes of the physics, in runs, chosen in the simulation of tests/bench/calibration.py. With fewer at the pool, some
# seed was a point worse than a correct physics for some runs. With more, 20 runs had less effect.
_POOL_VOTES = 6.0
_GROUP_VOTES = 6.0
# The physics loses votes if the median is more than this many standard errors away. The standard error is 1.2533 sigma
# / sqrt(n), sigma from the median deviation. Runs of one week share models and data, so they agree more than chance
# allows.
_CERTAIN_ERRORS = 4.0
_MEDIAN_ERROR = 1.2533
_MAD_TO_SIGMA = 1.4826
_MIN_SCATTER = 0.05  # the smallest scatter that a few agreeing runs may claim
# A run's weight halves after this many newer runs of its pool: drivers, clocks and neighbours change.
_HALF_LIFE_RUNS = 300
# An older run would weigh less than a sixteenth, and is left out.
MAX_RUNS = 1_200
# With fewer finished runs, a tenth cannot be measured, and the physics' own interval stands. Grid points do not count
# here, because they were measured alone and in order.
_MIN_RUNS_FOR_SPREAD = 10
# With fewer runs, their own spread does not even widen the range: one could be a fault.
_MIN_RUNS_TO_WIDEN = 3
# Spread (standard deviation of the logarithm) of the physics on uncalibrated hardware. _SPREAD_VOTES is its weight in
# runs, _NEIGHBOUR_VOTES the weight of the pool's other runs beside a group's own. In the same simulation, 80 to 86 % of
# runs then fall inside P10 to P90.
_SPREAD_VOTES = 2.0
_TIME_SPREAD = 0.30
_MEMORY_SPREAD = 0.08
_BESIDE_SPREAD = 0.54  # of the seconds beside training: half or twice at P10 and P90
_NEIGHBOUR_VOTES = 40.0
_SWEEPS = 2


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """Actual / physics of training time, of peak memory, and of the seconds beside training, where known.

    The source is a finished run, or a grid point measured on made-up weights.
    """

    family: str
    method: str
    time_ratio: float | None = None
    memory_ratio: float | None = None
    beside_ratio: float | None = None
    is_point: bool = False


class Band(msgspec.Struct, frozen=True):
    """The range of four fifths of the runs around their fitted factor, in logarithms."""

    low: float
    high: float


class Learned(msgspec.Struct, frozen=True, kw_only=True):
    """Offsets (logarithms) of a pool, its methods, families and pairs of them; a level without runs is absent."""

    runs: int = 0
    votes: float = 0.0  # of the runs, by their age
    pool: float = 0.0
    methods: dict[str, float] = {}
    families: dict[str, float] = {}
    pairs: dict[str, float] = {}
    bands: dict[str, Band] = {}


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """The corrections from one pool's runs.

    `number` counts the pool's versions, `physics` names the corrected formulas. `time_range` is the robust range of the
    runs around their corrected times, and `days` counts the days on which they ended.
    """

    time: Learned = Learned()
    memory: Learned = Learned()
    beside: Learned = Learned()
    number: int = 0
    physics: str = PHYSICS
    runs: int = 0
    points: int = 0
    time_range: Band = Band(0.0, 0.0)
    days: int = 0


class CrossValidation(msgspec.Struct, frozen=True, kw_only=True):
    """Median absolute error with and without a calibration; each run is predicted by a fit that did not see it."""

    runs: int
    physics: float | None
    calibrated: float | None


def fit(observations: Sequence[Observation], *, number: int = 0, days: int = 0) -> Calibration:
    """Fit a pool's runs, given oldest first. `days` counts the days on which they ended."""
    recent = observations[-MAX_RUNS:]
    time = _learn([(o.family, o.method, o.time_ratio) for o in recent])
    return Calibration(
        time=time,
        time_range=_robust_range(time, [o for o in recent if not o.is_point]),
        days=days,
        memory=_learn([(o.family, o.method, o.memory_ratio) for o in recent]),
        beside=_learn([(o.family, o.method, o.beside_ratio) for o in recent]),
        number=number,
        runs=sum(not o.is_point for o in recent),
        points=sum(o.is_point for o in recent),
    )


def correct(calibration: Calibration, *, family: str, method: str) -> Correction | None:
    """Return the correction of one job from a pool's runs; None if there is no evidence yet."""
    if calibration.physics != PHYSICS or not (calibration.time.runs or calibration.memory.runs):
        return None
    is_ranged = calibration.runs >= _MIN_RUNS_FOR_SPREAD
    time = _factors(calibration.time, family, method, _TIME_SPREAD if is_ranged else None)
    memory = _factors(calibration.memory, family, method, _MEMORY_SPREAD if is_ranged else None)
    beside = _factors(calibration.beside, family, method, _BESIDE_SPREAD if is_ranged else None)
    finished = f"{calibration.runs:,} finished run{'s' if calibration.runs > 1 else ''}"
    measured = f"{calibration.points:,} measured point{'s' if calibration.points > 1 else ''}"
    origin = f"{finished} of this pool" if calibration.runs else f"{measured} of this pool"
    if calibration.runs and calibration.points:
        origin = f"{finished} and {measured} of this pool"
    return Correction(
        origin=origin,
        runs=calibration.runs,
        version=calibration.number,
        time_factor=time[0],
        time_p10=time[1],
        time_p90=time[2],
        time_low=math.exp(calibration.time_range.low),
        time_high=math.exp(calibration.time_range.high),
        days=calibration.days,
        memory_factor=memory[0],
        memory_p10=memory[1],
        memory_p90=memory[2],
        beside_factor=beside[0],
        beside_p10=beside[1],
        beside_p90=beside[2],
    )


def _factors(
    learned: Learned, family: str, method: str, spread: float | None
) -> tuple[float, float | None, float | None]:
    """Return the factor, and P10 and P90 around it if a spread of the physics is given."""
    if spread is None or not learned.runs:
        return math.exp(_offset(learned, family, method)), None, None
    band = learned.bands[_band_key(learned, family, method)]
    share = learned.votes / (learned.votes + _SPREAD_VOTES)
    return (
        math.exp(_offset(learned, family, method)),
        math.exp(share * band.low - (1 - share) * _Z90 * spread),
        math.exp(share * band.high + (1 - share) * _Z90 * spread),
    )


def cross_validate(observations: Sequence[Observation], *, quantity: str) -> CrossValidation:
    """Return the cross-validated accuracy of a calibration. `quantity` is the name of one of the ratios."""
    known = [o for o in observations[-MAX_RUNS:] if getattr(o, quantity)]
    before, after = [], []
    for fold in range(_FOLDS):
        learned = _learn(
            [(o.family, o.method, getattr(o, quantity)) for index, o in enumerate(known) if index % _FOLDS != fold]
        )
        for observation in known[fold::_FOLDS]:
            ratio = getattr(observation, quantity)
            factor = math.exp(_offset(learned, observation.family, observation.method))
            before.append(abs(1 / ratio - 1))
            after.append(abs(factor / ratio - 1))
    return CrossValidation(
        runs=len(known), physics=median(before) if before else None, calibrated=median(after) if after else None
    )


# --- fitting ------------------------------------------------------------------------------------------------------

Row = tuple[str, str, float | None]


def _learn(rows: Sequence[Row]) -> Learned:
    known = [(family, method, math.log(ratio)) for family, method, ratio in rows if ratio and ratio > 0]
    if not known:
        return Learned()
    weights = [0.5 ** (age / _HALF_LIFE_RUNS) for age in range(len(known) - 1, -1, -1)]
    learned = Learned(runs=len(known), votes=sum(weights))
    for _ in range(_SWEEPS):
        learned = _sweep(learned, known, weights)
    # A band for every result of `_band_key`, from residuals against only the levels that such a job has.
    alone = [_pair("", method) for method in learned.methods] + [_pair(family, "") for family in learned.families]
    both = [_pair(family, method) for family in learned.families for method in learned.methods]
    bands = {key: _band(key, learned, known, weights) for key in ["|", *alone, *both]}
    return msgspec.structs.replace(learned, bands=bands)


def _sweep(learned: Learned, rows: Sequence[tuple[str, str, float]], weights: Sequence[float]) -> Learned:
    """Fit each level on the residuals of the others."""
    pool = _voted_median([y - _offset(learned, f, m) + learned.pool for f, m, y in rows], weights, _POOL_VOTES)
    learned = msgspec.structs.replace(learned, pool=pool)
    for name, key in _LEVELS:
        present = getattr(learned, name)
        values: dict[str, list[float]] = defaultdict(list)
        votes: dict[str, list[float]] = defaultdict(list)
        for (family, method, y), weight in zip(rows, weights, strict=True):
            group = key(family, method)
            values[group].append(y - _offset(learned, family, method) + present.get(group, 0.0))
            votes[group].append(weight)
        fitted = {group: _voted_median(values[group], votes[group], _GROUP_VOTES) for group in values}
        learned = msgspec.structs.replace(learned, **{name: fitted})
    return learned


def _pair(family: str, method: str) -> str:
    return f"{family}|{method}"


_LEVELS = (("methods", lambda _, method: method), ("families", lambda family, _: family), ("pairs", _pair))


def _offset(learned: Learned, family: str, method: str) -> float:
    return (
        learned.pool
        + learned.methods.get(method, 0.0)
        + learned.families.get(family, 0.0)
        + learned.pairs.get(_pair(family, method), 0.0)
    )


def _voted_median(values: Sequence[float], weights: Sequence[float], physics_votes: float) -> float:
    """Return the weighted median of the values and of zero, the physics' value.

    Zero has `physics_votes`, or fewer if many runs clearly contradict it.
    """
    runs = sum(weights)
    plain = _median(values, weights)
    scatter = max(_MIN_SCATTER, _MAD_TO_SIGMA * _median([abs(value - plain) for value in values], weights))
    error = _MEDIAN_ERROR * scatter / math.sqrt(runs)
    doubt = min(1.0, (_CERTAIN_ERRORS * error / plain) ** 2) if plain else 1.0
    votes = physics_votes * max(doubt, min(1.0, physics_votes / runs))
    return _median([*values, 0.0], [*weights, votes])


def _median(values: Sequence[float], weights: Sequence[float]) -> float:
    """Return the weighted median: always one of the values, no interpolation."""
    pairs = sorted(zip(values, weights, strict=True))
    half, below = sum(weights) / 2, 0.0
    for value, weight in pairs:
        below += weight
        if below >= half:
            return value
    return pairs[-1][0]


def _quantile(values: Sequence[float], weights: Sequence[float], share: float) -> float:
    """Return the weighted quantile: each value is at the middle of its weight, linear between values."""
    pairs = sorted(zip(values, weights, strict=True))
    wanted = share * sum(weights)
    middle = pairs[0][1] / 2
    for (value, weight), (following, next_weight) in pairwise(pairs):
        step = (weight + next_weight) / 2
        if wanted <= middle + step:
            return value + (following - value) * max(0.0, (wanted - middle) / step)
        middle += step
    return pairs[-1][0]


# --- spread -------------------------------------------------------------------------------------------------------


def _band_key(learned: Learned, family: str, method: str) -> str:
    """Return the key of the job's band.

    It is the pair, its method or family alone, or neither ("|"): the part of the job that the pool has seen.
    """
    if _pair(family, method) in learned.pairs:
        return _pair(family, method)
    return _pair(family if family in learned.families else "", method if method in learned.methods else "")


def _band(key: str, learned: Learned, rows: Sequence[tuple[str, str, float]], weights: Sequence[float]) -> Band:
    family, _, method = key.partition("|")
    own = [(not family or f == family) and (not method or m == method) for f, m, _ in rows]
    levels = _levels_of(learned, family, method)
    residuals = [y - _offset(levels, f, m) for f, m, y in rows]
    others = sum(weight for weight, is_own in zip(weights, own, strict=True) if not is_own)
    share = min(1.0, _NEIGHBOUR_VOTES / others) if others else 0.0
    votes = [weight if is_own else weight * share for weight, is_own in zip(weights, own, strict=True)]
    # Finite-sample correction of conformal prediction: one additional run is assumed beyond each end.
    reach = min(1.0, 0.9 * (learned.votes + 1) / learned.votes)
    return Band(min(0.0, _quantile(residuals, votes, 1 - reach)), max(0.0, _quantile(residuals, votes, reach)))


def _robust_range(learned: Learned, runs: Sequence[Observation]) -> Band:
    """Return the range of four fifths of the runs, from medians: one faulty run does not widen it."""
    residuals = [math.log(o.time_ratio) - _offset(learned, o.family, o.method) for o in runs if o.time_ratio]
    if len(residuals) < _MIN_RUNS_TO_WIDEN:
        return Band(0.0, 0.0)
    middle = median(residuals)
    reach = _Z90 * _MAD_TO_SIGMA * median(abs(residual - middle) for residual in residuals)
    return Band(min(0.0, middle - reach), max(0.0, middle + reach))


def _levels_of(learned: Learned, family: str, method: str) -> Learned:
    """Return only the levels that a job of this key has offsets from; without a family, no run's family counts."""
    nothing: Mapping[str, float] = {}
    return msgspec.structs.replace(
        learned,
        methods=learned.methods if method else nothing,
        families=learned.families if family else nothing,
        pairs=learned.pairs if _pair(family, method) in learned.pairs else nothing,
    )


def predict_point(report: ProbeReport, *, pool: PoolFacts) -> tuple[Estimate, float]:
    """Return the estimate of a grid point as a job, and the tokens a second of its loop alone, as it was measured.

    The speed is 0 without a time. Raises EstimateError.
    """
    estimate = quote(request=_request(report), pool=pool)
    return estimate, whole_job_factor(pool) * (estimate.tokens_per_second or 0.0)


def _request(report: ProbeReport) -> QuoteRequest:
    tokens = _ROWS * report.micro_batch_size * report.sequence_length
    return QuoteRequest(
        architecture=architectures.from_config(report.config or {}),
        method=report.method,
        max_length=report.sequence_length,
        batch_size=report.micro_batch_size,
        epochs=1,
        rows=_ROWS * report.micro_batch_size,
        tokens=tokens,
        trained_tokens=max(1, round(tokens * PROBE_TRAINED_SHARE)),
        longest_row_tokens=report.sequence_length,
        row_lengths=((report.sequence_length, _ROWS * report.micro_batch_size),),
        lora_rank=report.lora_rank,
        target_modules=adapted_modules(report.config or {}),
        lora_dropout=0.0,
        checkpoints=0,
        micro_batch_size=report.micro_batch_size,
        gradient_checkpointing=report.gradient_checkpointing,
    )
