"""What to change after each failure: at which price, or why none can be told; and starting it with one call."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from apps.billing.queries import get_balance
from apps.contracts.evaluation import EvaluationPlan
from apps.contracts.failures import FailureCode
from apps.contracts.hyperparameters import Objective
from apps.core.database.clock import db_now
from apps.core.errors import InvalidState
from apps.core.objects.store import store
from apps.datasets.inspection.comparisons import find_or_compare
from apps.datasets.models import DatasetVersion, TokenCount, VersionComparison
from apps.datasets.operations import count_tokens
from apps.datasets.tasks import validate
from apps.datasets.validation.repair_estimate import estimate_repair
from apps.finetuning.jobs.admission import CannotLaunch
from apps.finetuning.jobs.creation import create_job
from apps.finetuning.jobs.explanations import Explanation, explain
from apps.finetuning.jobs.requests import JobRequest
from apps.finetuning.jobs.retries import retry_job
from apps.finetuning.models import FineTuningJob
from apps.finetuning.recipes.stored_requests import stored_request
from apps.finetuning.runs.attempts import fail_job
from apps.finetuning.tasks import admit_waiting
from tests.factories.catalog import make_base_model
from tests.factories.chat import PAIR, TOOL_ROW
from tests.factories.datasets import chat_row, jsonl_of, make_ready_version, make_version
from tests.factories.finetuning import TrainingSetup

GOOD = [chat_row(f"Where is card {number}?") for number in range(40)]
NEW_FILE = "You'll see the price of another file after you upload it."


@dataclass(frozen=True)
class Failure:
    """A way for a job to end, what is suggested for it, and why that has no price where it has none."""

    code: FailureCode
    changes: dict[str, Any] = field(default_factory=dict)
    recipe: dict[str, Any] = field(default_factory=dict)
    message: str = ""
    spoil: Callable[[FineTuningJob], None] = lambda job: None
    obstacle: str = ""


def delete_file(job: FineTuningJob) -> None:
    DatasetVersion.objects.filter(pk=job.training_file_id).update(status="deleted")


def spoil_rows(job: FineTuningJob) -> None:
    """The file as it would be had its check found bad rows: no version of a job gets there but through validation."""
    spoiled = make_ready_version(job.organization, jsonl_of(*GOOD, {"messages": "none"}))
    FineTuningJob.objects.filter(pk=job.pk).update(training_file=spoiled)


def spoil_all(job: FineTuningJob) -> None:
    spoiled = make_ready_version(job.organization, b"\x00\x01\x02" * 50, filename="rows.parquet")
    FineTuningJob.objects.filter(pk=job.pk).update(training_file=spoiled)


def hold_out_all(job: FineTuningJob) -> None:
    FineTuningJob.objects.filter(pk=job.pk).update(validation_file=job.training_file)


def prefer(job: FineTuningJob) -> None:
    FineTuningJob.objects.filter(pk=job.pk).update(hyperparameters=job.hyperparameters | {"objective": Objective.DPO})


def pair(job: FineTuningJob) -> None:
    pairs = make_ready_version(job.organization, jsonl_of(PAIR) * 12)
    TokenCount.objects.filter(version=job.training_file_id).update(version=pairs)
    FineTuningJob.objects.filter(pk=job.pk).update(training_file=pairs)


def lengthen(tokens: int) -> Callable[[FineTuningJob], None]:
    """Say that the longest row has so many tokens."""

    def change(job: FineTuningJob) -> None:
        TokenCount.objects.filter(version=job.training_file_id).update(longest_row_tokens=tokens)

    return change


INVALID, OOM = FailureCode.INVALID_TRAINING_FILE, FailureCode.OUT_OF_MEMORY
TRAINED_ALL = {"train_on": "all"}
FAILURES = {
    "loss not finite": Failure(FailureCode.LOSS_NOT_FINITE, {"learning_rate": 0.001}, {"learning_rate": 0.01}),
    "loss zero": Failure(FailureCode.LOSS_IS_ZERO, {"train_on": "all"}),
    "loss zero, rows cut": Failure(
        FailureCode.LOSS_IS_ZERO, {"max_length": 256}, TRAINED_ALL | {"max_length": 64}, spoil=lengthen(200)
    ),
    "loss zero, all trained": Failure(FailureCode.LOSS_IS_ZERO, {"epochs": 2}, TRAINED_ALL | {"epochs": 4}),
    "loss zero, once": Failure(FailureCode.LOSS_IS_ZERO, recipe=TRAINED_ALL | {"epochs": 1}, obstacle=NEW_FILE),
    "no trained token": Failure(FailureCode.NO_TRAINABLE_TOKENS, {"max_length": 128}, {"max_length": 64}),
    "no trained token, longest known": Failure(
        FailureCode.NO_TRAINABLE_TOKENS, {"max_length": 256}, {"max_length": 16}, spoil=lengthen(200)
    ),
    "no trained token, at the context": Failure(
        FailureCode.NO_TRAINABLE_TOKENS, {"train_on": "all"}, {"max_length": 512}
    ),
    "no trained token at all": Failure(
        FailureCode.NO_TRAINABLE_TOKENS,
        recipe=TRAINED_ALL | {"max_length": 512},
        obstacle=f"You decide which rows to shorten. {NEW_FILE}",
    ),
    "bad rows": Failure(INVALID, {"training_file": "repair"}, spoil=spoil_rows),
    "no rows": Failure(INVALID, spoil=spoil_all, obstacle=NEW_FILE),
    "deleted": Failure(INVALID, spoil=delete_file, obstacle=NEW_FILE),
    "refused row": Failure(INVALID, {"training_file": "repair"}, message="Line 3: The template refused it."),
    "all held out": Failure(INVALID, {"validation_share": 0.0}, {"validation_share": 0.5}),
    "validation file holds all": Failure(INVALID, {"validation_file": None}, spoil=hold_out_all),
    "other rows": Failure(INVALID, {"objective": "supervised"}, spoil=prefer),
    "pairs": Failure(INVALID, {"objective": "dpo", "lora_dropout": 0.0}, spoil=pair),
    "too large": Failure(OOM, {"method": "qlora", "quantization": "nf4"}),
    "too large in four bits": Failure(
        OOM, {"max_length": 64}, {"method": "qlora", "max_length": 128}, spoil=lengthen(500)
    ),
    "too large, rows short": Failure(
        OOM, recipe={"method": "qlora"}, obstacle="You'll see each price when you choose it."
    ),
    "start deleted": Failure(FailureCode.START_DELETED, obstacle="You'll see the price when you choose it."),
    "not servable": Failure(
        FailureCode.ADAPTER_REJECTED,
        {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]},
        {"target_modules": ["q_proj"]},
    ),
}  # fmt: skip
# Faults of ours or of a provider: the same job again, at its price.
SAME_AGAIN = sorted(set(FailureCode) - {failure.code for failure in FAILURES.values()})
FAILURES |= {str(code): Failure(code) for code in SAME_AGAIN}


def validated(version_id: str) -> DatasetVersion:
    """Return the file after its task, which counts its tokens as well."""
    validate(version_id)
    return DatasetVersion.objects.get(pk=version_id)


@pytest.fixture
def fail(floor: TrainingSetup, reload):
    def end(failure: Failure) -> FineTuningJob:
        asked = dict(failure.recipe)
        job = floor.job(method=asked.pop("method", "lora"), hyperparameters=asked)
        failure.spoil(job)
        fail_job(job=reload(job), code=failure.code, message=failure.message, now=db_now())
        return reload(job)

    return end


def why_of(job: FineTuningJob) -> Explanation:
    found = explain(job=job, now=db_now())
    assert found is not None
    return found


def retry(job: FineTuningJob, **given: Any) -> FineTuningJob:
    return retry_job(job=job, by="user_1", now=db_now(), **given)


@pytest.mark.parametrize("name", [name for name, failure in FAILURES.items() if failure.obstacle])
def test_a_failure_without_a_change_says_why_it_has_none(fail, name):
    job = fail(FAILURES[name])

    advice = why_of(job).suggestion

    assert advice.text.endswith(".")
    assert (advice.obstacle, advice.price_nano, advice.hold_nano) == (FAILURES[name].obstacle, None, None)
    with pytest.raises(CannotLaunch, match=advice.text[:20]):
        retry(job)


def test_every_code_is_tried_and_only_what_is_no_customers_needs_no_change():
    assert {failure.code for failure in FAILURES.values()} == set(FailureCode)
    assert not any(code.blame == "customer" for code in SAME_AGAIN)


@pytest.mark.parametrize("name", [name for name, failure in FAILURES.items() if not failure.obstacle])
def test_each_failure_ends_in_a_change_that_one_call_starts_at_the_price_told(floor, fail, reload, name):
    job = fail(FAILURES[name])
    advice = why_of(job).suggestion
    assert advice.text.endswith(".")
    assert advice.changes == FAILURES[name].changes
    assert advice.obstacle == "" and advice.price_nano > 0 and advice.hold_nano >= advice.price_nano

    again = retry(job)

    if advice.change.repairs:
        assert (again.status, again.training_file.derived_from_id) == ("validating_files", job.training_file_id)
        assert validated(again.training_file_id).status == "ready"
        admit_waiting()
        again = reload(again)
    recipe = advice.change.recipe
    assert {key: again.hyperparameters[key] for key in recipe} == {key: advice.changes[key] for key in recipe}
    assert (again.status, again.pool.name, again.spend_cap_nano) == ("queued", advice.pool, advice.hold_nano)
    if not advice.change.repairs:
        assert again.estimate["cost_nano_p50"] == advice.price_nano
    assert get_balance(organization=floor.organization).held_nano == advice.hold_nano


@pytest.mark.slow
def test_bad_rows_are_repaired_or_left_out_and_trained_at_about_the_quoted_price(fail, reload):
    job = fail(FAILURES["bad rows"])
    told = why_of(job).suggestion.price_nano

    again = retry(job)
    repaired = validated(again.training_file_id)
    admit_waiting()

    assert (repaired.rows, repaired.repair) == (len(GOOD), "repair")
    assert reload(again).estimate["cost_nano_p50"] == pytest.approx(told, rel=0.1)


def test_the_price_of_a_repair_counts_a_bad_row_once(organization):
    """A repair may keep it."""
    version = make_ready_version(organization, jsonl_of(*GOOD, *[{"messages": "none"}] * 20))

    fixed, count = estimate_repair(version=version, base_model=make_base_model())

    assert fixed.rows == len(GOOD) + 20
    good = count_tokens(version=make_ready_version(organization, jsonl_of(*GOOD)), base_model=count.base_model)
    assert count.tokens == pytest.approx(good.tokens * 1.5, abs=1)


@pytest.mark.slow
def test_rows_that_the_models_template_refuses_are_left_out(floor, organization, reload):
    """The file is good as such; the demo's template knows no tools."""
    waiting = make_version(organization, jsonl_of(*GOOD[:20], TOOL_ROW, *GOOD[20:]))
    asked = JobRequest(base_model=floor.base_model.name, training_file=waiting.pk)
    job = create_job(organization=organization, request=asked, by="key_test", now=db_now())
    assert validated(waiting.pk).status == "ready"
    admit_waiting()
    job = reload(job)
    assert (job.status, job.error_code) == ("failed", "invalid_training_file") and "Line 21: " in job.error_message

    told = why_of(job).suggestion.price_nano
    again = retry(job)
    fitting = validated(again.training_file_id)
    admit_waiting()

    assert (fitting.rows, fitting.repair, fitting.layout.dropped) == (len(GOOD), "fit", 1)
    again = reload(again)
    assert again.status == "queued" and again.estimate["cost_nano_p50"] == pytest.approx(told, rel=0.1)


def test_asked_twice_it_starts_one_job(fail):
    job = fail(FAILURES["bad rows"])

    assert retry(job).pk == retry(job).pk
    assert DatasetVersion.objects.filter(repair="repair").count() == 1


@pytest.mark.usefixtures("metered")
def test_the_cap_named_is_what_is_held(fail):
    assert retry(fail(FAILURES["loss zero"]), spend_cap_nano=123_000_000).spend_cap_nano == 123_000_000


def test_everything_else_the_job_was_asked_for_comes_along(floor, reload):
    evaluation = EvaluationPlan(max_rows=7)
    job = floor.job(suffix="mine", metadata={"team": "a"}, evaluation=evaluation, exports=["merged_16bit"])
    fail_job(job=job, code=FailureCode.LOSS_IS_ZERO, message="", now=db_now())

    again = retry(reload(job))

    assert (again.suffix, again.metadata) == ("mine", {"team": "a"})
    requested = stored_request(again)
    assert (requested.evaluation, requested.exports) == (evaluation, ("merged_16bit",))
    unchanged = job.hyperparameters | {"train_on": "all"}
    assert again.hyperparameters == unchanged


def test_a_failure_without_a_free_worker_is_priced_and_says_what_is_in_the_way(floor, fail):
    job = fail(FAILURES["loss zero"])
    floor.worker.delete()

    advice = why_of(job).suggestion

    assert advice.price_nano > 0 and advice.hold_nano is None
    assert advice.obstacle == "local-cpu: No worker is online."


def test_what_was_refused_before_it_ran_is_started_again_at_its_price(floor, reload):
    job = floor.job()
    FineTuningJob.objects.filter(pk=job.pk).update(status="failed", error_code="cannot_launch", finished_at=db_now())

    advice = why_of(reload(job)).suggestion

    assert advice.price_nano > 0 and advice.changes == {}


@pytest.mark.parametrize("missing", [TokenCount, VersionComparison])
def test_a_suggestion_is_read_without_a_write_and_started_once_its_files_are_counted(
    floor, organization, fail, reload, missing
):
    """They may be uncounted: a model that is installed again can have another tokenizer."""
    job = fail(FAILURES["loss zero"])
    FineTuningJob.objects.filter(pk=job.pk).update(validation_file=make_ready_version(organization, jsonl_of(*GOOD)))
    find_or_compare(version=job.training_file, other=reload(job).validation_file)
    missing.objects.all().delete()

    with CaptureQueriesContext(connection) as captured:
        advice = why_of(reload(job)).suggestion
    again = retry(reload(job))

    assert {query["sql"].split()[0] for query in captured} == {"SELECT"}
    assert (advice.price_nano, advice.hold_nano) == (None, None)
    assert "yet." in advice.obstacle and job.training_file_id in advice.obstacle
    assert again.estimate["cost_nano_p50"] > 0


def test_only_a_failed_job_is_started_again(floor):
    with pytest.raises(InvalidState):
        retry(floor.job())


def test_a_refused_row_of_either_file_is_left_out(floor, organization, reload):
    """Which of the two holds it is not told."""
    job = floor.job(validation_file=make_ready_version(organization, jsonl_of(*GOOD, TOOL_ROW)).pk)
    fail_job(job=job, code=INVALID, message="Line 41: The template refused it.", now=db_now())

    again = retry(reload(job))
    fitting = validated(again.validation_file_id)

    assert (fitting.rows, again.training_file.repair, again.validation_file.repair) == (len(GOOD), "fit", "fit")


def test_a_file_that_is_gone_from_the_store_is_no_broken_page(fail):
    job = fail(FAILURES["bad rows"])
    store().delete(job.training_file.data_key)

    advice = why_of(job).suggestion

    assert advice.hold_nano is None and "upload it again" in advice.obstacle
