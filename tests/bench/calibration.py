"""What learning from finished runs is worth: `python -m tests.bench.calibration` (also `make bench-calibration`).

2,000 runs a seed on a simulated pool. Its runs differ from the physics by a factor of the pool, smaller ones of each
model family, method and pair of them, run-to-run noise, and runs that went wrong. A run is predicted before it is
learned from. At every refit the calibration is also tried on held-out jobs of the same pool, and the worst it ever did
beside the bare physics is kept. Prints a table and, last, one JSON line.
"""

import math
import random
import sys
from collections.abc import Sequence
from itertools import pairwise
from statistics import median

import msgspec

from apps.estimates.calibration import Calibration, Observation, correct, fit

SEEDS, RUNS, HELD_OUT = 50, 2_000, 400
# True time / physics: a pool that is slower or faster by 30 %, and pools of which the physics is (nearly) right.
EFFICIENCIES = (1.30, 1 / 1.30, 1.0, 1.05)
FAMILIES = ("llama", "qwen2", "gemma3", "mistral", "phi3", "olmo2")
METHODS = ("lora", "qlora", "dora", "full")
# How far groups differ (standard deviations of the logarithm): what one pool factor cannot say.
FAMILY_SPREAD, METHOD_SPREAD, PAIR_SPREAD = 0.03, 0.03, 0.02
# The same job twice. Repeats of one loop on this project's CPU probe lie within 5 %; shapes within a group add to it.
NOISE = 0.04
# Of a hundred runs, six shared their machine or throttled (30 % to 200 % slower), one was cut short or mis-timed.
SLOW_SHARE, FAST_SHARE = 0.06, 0.01


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """One seed at one efficiency; errors are absolute and relative to the actual value."""

    physics_error: float
    error_after_20: float
    error_of_later_runs: float
    worst_excess: float
    coverage: float


def main() -> None:
    table = {
        f"{efficiency:.2f}": [simulate(seed=seed, efficiency=efficiency) for seed in range(SEEDS)]
        for efficiency in EFFICIENCIES
    }
    line = {efficiency: _summary(results) for efficiency, results in table.items()}
    for efficiency, row in line.items():
        sys.stdout.write(f"true time {efficiency} x physics: " + ", ".join(f"{k} {v}" for k, v in row.items()) + "\n")
    sys.stdout.write(msgspec.json.encode({"seeds": SEEDS, "runs": RUNS, "efficiency": line}).decode() + "\n")


def simulate(*, seed: int, efficiency: float, runs: int = RUNS, held_out: int = HELD_OUT) -> Result:
    """Let one pool live: predict each run, then learn from it; judge every refit on the same held-out jobs."""
    pool = Pool(seed, efficiency)
    lived = [pool.run() for _ in range(runs)]
    judged = [pool.run() for _ in range(held_out)]
    physics_error = _median_error(Calibration(), judged)
    later: list[float] = []
    inside, excess, after_20 = 0, 0.0, physics_error
    for start, stop in pairwise([*_refits(runs), runs]):
        calibration = fit(lived[:start])
        error = _median_error(calibration, judged)
        excess = max(excess, error - physics_error)
        after_20 = error if start == 20 else after_20
        if start >= 20:
            later += [_error(calibration, run) for run in lived[start:stop]]
            inside += sum(_is_inside(calibration, run) for run in lived[start:stop])
    return Result(
        physics_error=physics_error,
        error_after_20=after_20,
        error_of_later_runs=median(later),
        worst_excess=excess,
        coverage=inside / len(later),
    )


class Pool:
    """Where the truth is known."""

    def __init__(self, seed: int, efficiency: float) -> None:
        self._random = random.Random(seed)
        draw = self._random.gauss
        self._base = math.log(efficiency)
        self._families = {family: draw(0, FAMILY_SPREAD) for family in FAMILIES}
        self._methods = {method: draw(0, METHOD_SPREAD) for method in METHODS}
        self._pairs = {(family, method): draw(0, PAIR_SPREAD) for family in FAMILIES for method in METHODS}

    def run(self) -> Observation:
        # Some families and methods are asked for far more often than others.
        family = self._random.choices(FAMILIES, weights=[2.0**-index for index in range(len(FAMILIES))])[0]
        method = self._random.choices(METHODS, weights=[2.0**-index for index in range(len(METHODS))])[0]
        offset = self._base + self._families[family] + self._methods[method] + self._pairs[family, method]
        return Observation(family=family, method=method, time_ratio=math.exp(offset + self._noise()))

    def _noise(self) -> float:
        luck = self._random.random()
        noise = self._random.gauss(0, NOISE)
        if luck < SLOW_SHARE:
            return noise + math.log(self._random.uniform(1.3, 3.0))
        if luck > 1 - FAST_SHARE:
            return noise - math.log(self._random.uniform(1.3, 3.0))
        return noise


def _refits(runs: int) -> list[int]:
    """After every run at first, then after each tenth more."""
    counts = list(range(min(runs, 31)))
    while counts[-1] * 1.1 < runs:
        counts.append(math.ceil(counts[-1] * 1.1))
    return counts


def _error(calibration: Calibration, run: Observation) -> float:
    assert run.time_ratio is not None
    correction = correct(calibration, family=run.family, method=run.method)
    return abs((correction.time_factor if correction else 1.0) / run.time_ratio - 1)


def _is_inside(calibration: Calibration, run: Observation) -> bool:
    correction = correct(calibration, family=run.family, method=run.method)
    assert run.time_ratio is not None and correction and correction.time_p10 and correction.time_p90
    residual = run.time_ratio / correction.time_factor
    return correction.time_p10 <= residual <= correction.time_p90


def _median_error(calibration: Calibration, runs: Sequence[Observation]) -> float:
    return median(_error(calibration, run) for run in runs)


def _summary(results: Sequence[Result]) -> dict[str, float]:
    after = [result.error_after_20 for result in results]
    figures = {
        "physics_median_error": median(result.physics_error for result in results),
        "after_20_runs_median": median(after),
        "after_20_runs_worst_seed": max(after),
        "later_runs_median": median(result.error_of_later_runs for result in results),
        "later_runs_worst_seed": max(result.error_of_later_runs for result in results),
        "worst_excess_over_physics": max(result.worst_excess for result in results),
        "coverage_p10_p90": sum(result.coverage for result in results) / len(results),
        "coverage_lowest": min(result.coverage for result in results),
        "coverage_highest": max(result.coverage for result in results),
    }
    return {name: round(value, 4) for name, value in figures.items()}


if __name__ == "__main__":
    main()
