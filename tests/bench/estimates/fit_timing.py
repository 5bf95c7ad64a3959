"""Fit the constants of `apps.estimates.physics.timing`: `python -m tests.bench.estimates.fit_timing` prints them.

Coordinate descent on the mean absolute log error, each source weighing as the root of its rows, shrunk towards the
literature's figures and within bounds that physics allows. `leave_one_out` fits without one source at a time: what the
published figures are computed from.
"""

import math
import sys
from collections import defaultdict
from collections.abc import Sequence

import msgspec

from apps.estimates.physics.timing import Constants
from apps.estimates.published.predictions import Prepared, seconds_per_token
from apps.estimates.published.rows import TIME
from tests.bench.estimates.scored_rows import prepared_rows

# Where every fit starts: round figures from the literature, not from rows.
START = Constants(
    gemm=0.85, narrow=200.0, attention=0.7, elementwise=1.0, adapter=1.0, dequantization=0.6,
    launch_seconds=8e-6, exposed=0.5, link=0.7, micro_step_seconds=0.005,
)  # fmt: skip
_BOUNDS = {
    "gemm": (0.6, 1.0),
    "narrow": (50.0, 1000.0),
    "attention": (0.3, 1.0),
    "elementwise": (0.5, 4.0),
    "adapter": (0.1, 2.0),
    "dequantization": (0.3, 1.0),
    "launch_seconds": (4e-6, 25e-6),
    "exposed": (0.2, 0.9),
    "link": (0.5, 0.9),
}
_LARGEST_LOG_ERROR = 0.8  # a row of unknown cause pulls no further than this
_ROUNDS = 4
_PRIOR = 0.01  # pull of each constant towards its start, on the squared logarithm: few sources say much of each


def fit(jobs: Sequence[Prepared], start: Constants = START) -> Constants:
    best, constants, steps = loss(jobs, start), start, dict.fromkeys(_BOUNDS, 1.25)
    for _ in range(_ROUNDS):
        for name, (low, high) in _BOUNDS.items():
            for factor in (steps[name], 1 / steps[name]):
                while True:
                    value = min(max(getattr(constants, name) * factor, low), high)
                    changed = msgspec.structs.replace(constants, **{name: value})
                    error = loss(jobs, changed)
                    if error >= best - 1e-6:
                        break
                    best, constants = error, changed
            steps[name] = 1 + (steps[name] - 1) * 0.7
    return constants


def loss(jobs: Sequence[Prepared], constants: Constants) -> float:
    errors = defaultdict(list)
    for each in jobs:
        ratio = (seconds_per_token(each, constants) or math.inf) / each.job.measured
        errors[each.job.source].append(min(abs(math.log(ratio)), _LARGEST_LOG_ERROR))
    weights = {source: math.sqrt(len(values)) for source, values in errors.items()}
    means = sum(weights[source] * sum(values) / len(values) for source, values in errors.items())
    pull = sum(math.log(getattr(constants, name) / getattr(START, name)) ** 2 for name in _BOUNDS)
    return means / sum(weights.values()) + _PRIOR * pull


def leave_one_out(jobs: Sequence[Prepared]) -> dict[str, Constants]:
    """Constants by the source that they were fitted without."""
    sources = sorted({each.job.source for each in jobs})
    return {source: fit([each for each in jobs if each.job.source != source]) for source in sources}


if __name__ == "__main__":
    found = [each for each in prepared_rows() if each.job.kind == TIME]
    fitted = fit(found)
    sys.stdout.write(f"n={len(found)} loss={loss(found, fitted):.4f}\n{fitted}\n")
