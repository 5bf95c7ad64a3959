"""Finished runs leave a row beside their estimate; from the rows come versions, which an operator may undo."""

import msgspec
import pytest

from apps.contracts import runs as wire
from apps.contracts.failures import FailureCode
from apps.core.database.clock import db_now
from apps.core.errors import NotFound
from apps.core.models import AuditEntry
from apps.estimates.calibration import PHYSICS
from apps.finetuning.models import CalibrationPoint, FineTuningJob, GpuPool, PoolAccuracy, Worker
from apps.finetuning.pools import accuracy, calibrations, grid_points
from apps.finetuning.pools.operations import record_probe
from apps.finetuning.quotes.pool_facts import correction_of, newest_probes
from apps.interfaces.worker_api import probes
from tests.factories.accounts import make_organization
from tests.factories.finetuning import give_credit, make_job, probe_report
from tests.factories.outcomes import leave_queue, teach


def finish(job: FineTuningJob, claim, base_model, **fields) -> CalibrationPoint:
    claim().start().succeed(base_model, **fields)
    return CalibrationPoint.objects.get(run__job=job)


@pytest.fixture
def taught(floor) -> FineTuningJob:
    """A job that ran, and 24 runs of its pool that took 30 % longer than the physics said."""
    job = leave_queue(floor.job())
    teach(job, 24)
    return job


def test_a_finished_run_leaves_what_was_said_and_what_it_took(floor, claim, reload):
    job = floor.job()

    point = finish(job, claim, floor.base_model, seconds=20.0, tokens=4_000, peak_memory_bytes=3 * 10**9)

    job = reload(job)
    assert (point.organization_id, point.pool, point.outcome) == (job.organization_id, floor.pool, "succeeded")
    assert (point.family, point.method, point.attempts, point.physics) == ("llama", "lora", 1, PHYSICS)
    assert (point.actual_seconds, point.actual_tokens_per_second) == (20.0, 200.0)
    assert (point.actual_peak_bytes, point.actual_cost_nano) == (3 * 10**9, job.cost_nano)
    assert point.estimated_seconds == job.estimate["train_seconds_p50"]
    assert point.estimated_tokens_per_second == job.estimate["tokens_per_second"]
    assert (point.estimated_peak_bytes, point.estimated_cost_nano) == (
        job.estimate["peak_bytes"], job.estimate["cost_nano_p50"],
    )  # fmt: skip
    assert point.wall_seconds >= 0
    assert point.estimated_beside_seconds == job.estimate["beside_seconds_p50"]


def test_a_run_that_did_not_fit_is_kept_without_figures_it_never_had(floor, claim):
    job = floor.job()
    attempt = claim().start()

    attempt.finish(wire.Failed(code=FailureCode.OUT_OF_MEMORY, message="CUDA out of memory"))

    point = CalibrationPoint.objects.get(run__job=job)
    assert (point.outcome, point.actual_seconds, point.actual_peak_bytes) == ("out_of_memory", None, None)


def test_a_version_is_fitted_used_and_kept_with_what_it_was_fitted_on(taught):
    teach(taught, 1, attempts=2)
    teach(taught, 1, outcome="out_of_memory", actual_seconds=None)
    teach(taught, 1, physics="older")

    (version,) = calibrations.refit_pools(now=db_now())

    pool = GpuPool.objects.get(pk=taught.pool_id)
    correction = correction_of(pool=pool, family="llama", method="lora")
    assert (pool.calibration, version.number) == (version, 1)
    assert correction.time_factor == pytest.approx(1.3)
    assert correction.memory_factor == pytest.approx(1.0)
    assert (correction.version, correction.runs) == (1, 24)
    fitted_on = version.fitted_on
    assert (fitted_on["runs"], fitted_on["methods"]) == (24, {"lora": 24})
    assert (fitted_on["resumed"], fitted_on["out_of_memory"], fitted_on["other_physics"]) == (1, 1, 1)
    assert fitted_on["time"]["physics"] == pytest.approx(1 - 1 / 1.3)
    assert fitted_on["time"]["calibrated"] == pytest.approx(0.0, abs=1e-9)


def test_nothing_new_makes_no_version(taught):
    calibrations.refit_pools(now=db_now())

    assert calibrations.refit_pools(now=db_now()) == []
    teach(taught, 2)
    assert [version.number for version in calibrations.refit_pools(now=db_now())] == [2]


def test_a_correction_in_the_estimate_is_taken_out_before_fitting(taught):
    """Estimates that were right because they were corrected must not undo the correction."""
    CalibrationPoint.objects.all().delete()
    teach(taught, 24, time=1.0, time_factor=1.3)

    calibrations.refit_pools(now=db_now())

    pool = GpuPool.objects.get(pk=taught.pool_id)
    assert correction_of(pool=pool, family="llama", method="lora").time_factor == pytest.approx(1.3)


def test_an_operator_goes_back_to_a_version_or_to_none_and_it_stays(taught):
    calibrations.refit_pools(now=db_now())
    pool = GpuPool.objects.get(pk=taught.pool_id)

    calibrations.use_version(pool=pool, number=None, by="user_olga")
    teach(taught, 10, time=2.0)
    calibrations.refit_pools(now=db_now())

    pool.refresh_from_db()
    assert pool.calibration is None
    assert correction_of(pool=pool, family="llama", method="lora") is None
    assert [version.number for version in calibrations.list_versions(pool=pool)] == [2, 1]
    calibrations.use_version(pool=pool, number=1, by="user_olga")
    assert GpuPool.objects.get(pk=pool.pk).calibration.number == 1
    calibrations.follow_newest(pool=pool, by="user_olga")
    assert GpuPool.objects.get(pk=pool.pk).calibration.number == 2
    acts = AuditEntry.objects.filter(target=pool.pk, actor="user_olga").order_by("id")
    assert [(entry.action, entry.details["number"]) for entry in acts] == [
        ("calibration.pinned", 0), ("calibration.pinned", 1), ("calibration.followed", 2),
    ]  # fmt: skip


def test_a_version_that_is_not_the_pools_is_refused(taught):
    with pytest.raises(NotFound, match="has no calibration"):
        calibrations.use_version(pool=taught.pool, number=7, by="user_olga")


def test_the_next_quote_is_made_with_the_version_in_use(taught, floor):
    calibrations.refit_pools(now=db_now())

    job = floor.job()

    assert job.estimate["correction"]["time_factor"] == pytest.approx(1.3)
    assert job.estimate["train_seconds_p50"] == pytest.approx(1.3 * taught.estimate["train_seconds_p50"])


def test_runs_teach_what_the_pool_needs_beside_training(taught, floor):
    """Their seconds are those from the claim to the end, without training."""
    CalibrationPoint.objects.all().delete()
    teach(taught, 24, time=1.0, beside=1.8)
    before = taught.estimate

    calibrations.refit_pools(now=db_now())

    after = floor.job().estimate
    assert after["correction"]["beside_factor"] == pytest.approx(1.8)
    assert after["beside_seconds_p50"] == pytest.approx(1.8 * before["beside_seconds_p50"])
    assert after["beside_seconds_p90"] / after["beside_seconds_p50"] < 1.2
    assert after["billed_seconds_p50"] > before["billed_seconds_p50"]


def test_everybody_sees_a_pool_only_above_the_floor_and_in_steps(taught, floor, charlie):
    rival = make_organization("Rival", owner=charlie)
    give_credit(rival)
    theirs = leave_queue(make_job(rival, floor.base_model))

    accuracy.refresh_public_reports(now=db_now())
    assert not PoolAccuracy.objects.exists()

    teach(theirs, 1, time=9.0)
    accuracy.refresh_public_reports(now=db_now())
    assert not PoolAccuracy.objects.exists(), "the 25th run is not in a whole step: one organization remains"

    teach(theirs, 8, time=1.3)
    accuracy.refresh_public_reports(now=db_now())
    report = PoolAccuracy.objects.get().report
    assert (report["runs"], report["time"]["runs"]) == (30, 30)
    assert report["time"]["median"] == pytest.approx(1 - 1 / 1.3)
    assert report["time"]["coverage"] == pytest.approx(29 / 30)
    assert [moment["runs"] for moment in report["running"]] == [20, 30]

    CalibrationPoint.objects.filter(organization=rival).delete()
    accuracy.refresh_public_reports(now=db_now())
    assert not PoolAccuracy.objects.exists()


def measure_grid(floor, *, factor: float, count: int) -> None:
    """Report points on made-up weights whose speed is the quoted one divided by `factor`."""
    config = {
        "model_type": "llama", "num_hidden_layers": 4, "hidden_size": 192, "intermediate_size": 512,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 4096, "tie_word_embeddings": True,
    }  # fmt: skip
    for rank in range(8, 8 + count):
        report = msgspec.structs.replace(
            probe_report(floor.base_model), base_model_id="", shape="small", config=config, lora_rank=rank
        )
        (predicted,) = (
            observation.time_ratio
            for observation in [grid_points._observe(report, floor.pool, newest_probes(pool=floor.pool)[0])]
        )
        slower = msgspec.structs.replace(report, tokens_per_second=report.tokens_per_second * predicted / factor)
        record_probe(
            worker=floor.worker, base_model=None, shape="small", method="lora", report=msgspec.to_builtins(slower)
        )


def test_a_measured_grid_teaches_before_the_first_run(floor):
    measure_grid(floor, factor=1.4, count=12)

    (version,) = calibrations.refit_pools(now=db_now())

    pool = GpuPool.objects.get(pk=floor.pool.pk)
    correction = correction_of(pool=pool, family="llama", method="lora")
    assert correction.time_factor == pytest.approx(1.4)
    assert (correction.time_p10, correction.time_p90) == (None, None), "points alone name no range"
    assert correction.origin == "12 measured points of this pool"
    assert (version.fitted_on["runs"], version.fitted_on["points"]) == (0, 12)
    assert calibrations.refit_pools(now=db_now()) == []


@pytest.mark.parametrize("dimensions", [
    {"num_hidden_layers": 2**40, "num_experts": 8, "num_experts_per_tok": 2},
    {"num_hidden_layers": 10**200},
    {"vocab_size": 10**310},
])  # fmt: skip
def test_a_measurement_of_weights_that_no_machine_holds_stops_no_calibration(taught, floor, dimensions):
    config = {
        "model_type": "qwen3_moe", "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128,
        "num_attention_heads": 4, "vocab_size": 1000, "moe_intermediate_size": 64,
    }  # fmt: skip
    report = msgspec.structs.replace(
        probe_report(floor.base_model), base_model_id="", shape="made up", config=config | dimensions
    )
    probes.record(worker=Worker.objects.get(), report=report)

    (version,) = calibrations.refit_pools(now=db_now())

    assert (version.fitted_on["runs"], version.fitted_on["points"]) == (24, 0)
