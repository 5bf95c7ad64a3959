"""What finished runs teach: soon enough, never much worse than the physics, and not by one run that went wrong."""

import msgspec
import pytest

from apps.estimates.calibration import PHYSICS, Calibration, Observation, correct, cross_validate, fit
from tests.bench.calibration import simulate


def runs(*ratios: float, family: str = "llama", method: str = "lora") -> list[Observation]:
    return [Observation(family=family, method=method, time_ratio=ratio, memory_ratio=1.0) for ratio in ratios]


def time_factor(observations: list[Observation], family: str = "llama", method: str = "lora") -> float:
    correction = correct(fit(observations), family=family, method=method)
    return correction.time_factor if correction else 1.0


@pytest.mark.parametrize("efficiency", [1.3, 1 / 1.3, 1.0])
def test_a_pool_is_learned_from_twenty_runs_and_never_a_point_worse_than_the_physics(efficiency):
    results = [simulate(seed=seed, efficiency=efficiency, runs=60, held_out=200) for seed in range(4)]

    assert max(result.error_of_later_runs for result in results) < 0.06
    assert sorted(result.error_after_20 for result in results)[1] < 0.05
    assert max(result.worst_excess for result in results) < 0.01


def test_without_runs_there_is_nothing_to_correct():
    assert correct(fit([]), family="llama", method="lora") is None
    assert correct(Calibration(), family="llama", method="lora") is None


@pytest.mark.parametrize("outliers", [(9.0,), (9.0, 0.1), (5.0, 6.0, 7.0)])
def test_a_few_runs_that_went_wrong_move_nothing(outliers):
    assert time_factor(runs(*outliers)) == 1.0
    assert time_factor(runs(*[1.0] * 20, *outliers)) == pytest.approx(1.0)


def test_the_physics_is_outvoted_by_runs_that_agree():
    assert time_factor(runs(*[1.3] * 20)) == pytest.approx(1.3)


def test_a_family_without_runs_takes_what_its_pool_and_method_know():
    known = runs(*[1.3] * 30) + runs(*[1.6] * 30, method="qlora")

    assert time_factor(known, method="lora") == pytest.approx(1.3)
    assert time_factor(known, method="qlora") == pytest.approx(1.6)
    assert time_factor(known, family="gemma3", method="qlora") == pytest.approx(1.6, rel=0.05)
    assert 1.25 < time_factor(known, family="gemma3", method="full") < 1.65


def test_newer_runs_weigh_more_than_old_ones():
    """A driver made the pool a third faster."""
    assert time_factor(runs(*[1.5] * 400) + runs(*[1.0] * 400)) == pytest.approx(1.0)


def test_the_range_holds_four_fifths_and_narrows_with_runs():
    spread = [0.9, 0.95, 1.0, 1.05, 1.1]

    few, many = (correct(fit(runs(*spread * times)), family="llama", method="lora") for times in (2, 40))

    assert few.time_p10 < many.time_p10 < 1 < many.time_p90 < few.time_p90
    assert (many.time_p10, many.time_p90) == (pytest.approx(0.9, abs=0.03), pytest.approx(1.1, abs=0.03))


def test_below_ten_runs_the_range_stays_the_physics_own():
    correction = correct(fit(runs(*[1.3] * 9)), family="llama", method="lora")

    assert (correction.time_p10, correction.time_p90, correction.memory_p90) == (None, None, None)


def test_a_few_runs_that_took_longer_than_quoted_raise_the_least_range_and_one_fault_does_not():
    slow, faulty, single = (
        correct(fit(runs(*ratios), days=2), family="llama", method="lora")
        for ratios in ([1.6, 1.7, 1.6], [1.0, 1.02, 5.0, 0.98, 1.0], [1.6])
    )

    assert slow.time_factor * slow.time_high == pytest.approx(1.6, rel=0.15)
    assert faulty.time_high < 1.1
    assert (single.time_low, single.time_high, slow.days) == (1.0, 1.0, 2)


def test_memory_and_time_are_learned_apart():
    known = [Observation(family="llama", method="lora", time_ratio=None, memory_ratio=1.1) for _ in range(30)]

    correction = correct(fit(known, number=7), family="llama", method="lora")

    assert (correction.time_factor, correction.memory_factor) == (1.0, pytest.approx(1.1))
    assert (correction.version, correction.runs) == (7, 30)


def test_what_was_fitted_against_other_formulas_corrects_nothing():
    old = msgspec.structs.replace(fit(runs(*[1.3] * 30)), physics=f"{PHYSICS}-before")

    assert correct(old, family="llama", method="lora") is None


def test_a_calibration_survives_json():
    fitted = fit(runs(*[1.3, 1.2, 1.4] * 10))

    assert msgspec.convert(msgspec.to_builtins(fitted), Calibration) == fitted


def test_what_it_is_worth_is_checked_on_runs_it_did_not_see():
    found = cross_validate(runs(*[1.25] * 30), quantity="time_ratio")

    assert (found.runs, found.physics) == (30, pytest.approx(0.2))
    assert found.calibrated == pytest.approx(0.0, abs=1e-9)
    assert cross_validate([], quantity="time_ratio").physics is None
