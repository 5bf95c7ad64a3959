"""The comparison of a new model with production: both answer the same rows in runs of an eval, paired row by row."""

import datetime
from collections import Counter
from contextlib import suppress

import msgspec
from django.utils.translation import gettext

from apps.contracts.evaluation import EvaluationPlan
from apps.contracts.evaluation.paired_shares import PairedShares, compare_pairs
from apps.core.database.transitions import advance
from apps.core.errors import InvalidState
from apps.datasets.models import DatasetVersion
from apps.finetuning.jobs.retraining.endings import finish
from apps.finetuning.jobs.retraining.launches import require_actor
from apps.finetuning.lifecycle import RETRAINING_TRANSITIONS, RetrainingCode, RetrainingStatus
from apps.finetuning.models import Retraining, RetrainingPlan
from apps.finetuning.recipes.stored_requests import stored_request
from apps.serving.evals.criteria import SentCriterion
from apps.serving.evals.lifecycle import ACTIVE, EvalRunStatus, ItemStatus
from apps.serving.evals.models import Eval, EvalRun
from apps.serving.evals.operations import create_eval, create_run, stop_run
from apps.serving.evals.sources import CompletionsSource, FileId, ItemReference, SamplingParams

MAX_LEFT_OUT_SHARE = 0.05  # of rows that have no answer of both models; above, the answers show nothing
_PASSED: dict[str, bool] = {ItemStatus.PASS: True, ItemStatus.FAIL: False}


class ComparisonFailed(Exception):
    """The runs of the comparison show nothing; the text says why."""


def ask(retraining: Retraining, *, file: DatasetVersion, to: RetrainingStatus, now: datetime.datetime) -> None:
    """Have the new model and production answer the rows of a file. Raises the errors of `create_run`."""
    require_actor(retraining, now)
    plan, job = retraining.plan, retraining.job
    assert job is not None and job.adapter_version is not None
    if plan.alias is None:
        raise InvalidState(gettext("The alias was deleted, so there is no production to compare with."))
    production = retraining.production or plan.alias.version
    is_last = to == RetrainingStatus.CHECKING or retraining.regression_file_id is None
    left = retraining.max_nano - job.cost_nano - retraining.comparison_nano
    limit = left // (2 if is_last else 4)  # the same for each run
    if limit <= 0:
        raise InvalidState(
            gettext("The job used all of the plan's maximum price. Raise it by the cost of the comparisons.")
        )
    new_run, production_run = (
        _run(retraining, file, name, limit) for name in (job.adapter_version.model_name, production.model_name)
    )
    advance(
        retraining,
        to=to,
        transitions=RETRAINING_TRANSITIONS,
        production=production,
        new_run=new_run,
        production_run=production_run,
        comparison_nano=retraining.comparison_nano + 2 * limit,
        attempts=0,
    )


def stop(retraining: Retraining, now: datetime.datetime) -> None:
    """Have its runs that have not ended ask nothing more."""
    for run in (retraining.new_run, retraining.production_run):
        if run is not None and run.status in ACTIVE:
            with suppress(InvalidState):  # it has just ended
                stop_run(run=run, by=retraining.created_by, now=now)


def decide_on_held_out(retraining: Retraining, now: datetime.datetime) -> None:
    """Go on with a model that passes more held-out rows than production, once both have answered."""
    found = _find_shares(retraining)
    if found is None:
        return
    plan, result = retraining.plan, msgspec.to_builtins(found)
    retraining.held_out_result = result
    retraining.save(update_fields=["held_out_result"])
    gain = 100 * found.difference.value
    if found.difference.low <= 0 or gain < plan.min_gain_points:
        wanted = f"at least {plan.min_gain_points:+g} points, and an interval above 0"
        reason = f"{_figures(found, 'held-out')} Wanted: {wanted}."
        finish(retraining, to=RetrainingStatus.KEPT, code=RetrainingCode.NOT_BETTER, reason=reason, now=now)
    elif retraining.regression_file is not None:
        ask(retraining, file=retraining.regression_file, to=RetrainingStatus.CHECKING, now=now)
    else:
        advance(retraining, to=RetrainingStatus.PROMOTING, transitions=RETRAINING_TRANSITIONS, attempts=0)


def decide_on_regression(retraining: Retraining, now: datetime.datetime) -> None:
    """Go on with a model that surely loses no more regression rows than the plan allows."""
    found = _find_shares(retraining)
    if found is None:
        return
    retraining.regression_result = msgspec.to_builtins(found)
    retraining.save(update_fields=["regression_result"])
    most = retraining.plan.max_loss_points or 0.0
    if 100 * found.difference.low < -most:
        reason = f"{_figures(found, 'regression')} Wanted: an interval above {-most:g}."
        finish(retraining, to=RetrainingStatus.KEPT, code=RetrainingCode.REGRESSION, reason=reason, now=now)
    else:
        advance(retraining, to=RetrainingStatus.PROMOTING, transitions=RETRAINING_TRANSITIONS, attempts=0)


def _find_shares(retraining: Retraining) -> PairedShares | None:
    """Return the outcome of the comparison, None while it goes on. Raises ComparisonFailed."""
    runs = [retraining.new_run, retraining.production_run]
    for run in runs:
        if run is None:
            raise ComparisonFailed("A run of the comparison was deleted.")
        if run.status in ACTIVE:
            return None
        if run.status != EvalRunStatus.COMPLETED:
            raise ComparisonFailed(str((run.error or {}).get("message") or "A run of the comparison was canceled."))
    new, old = (dict(run.items.values_list("number", "status")) for run in runs if run is not None)
    pairs = Counter(
        (_PASSED[new[number]], _PASSED[old[number]])
        for number in new.keys() & old.keys()
        if new[number] in _PASSED and old[number] in _PASSED
    )
    rows, answered = len(new.keys() | old.keys()), pairs.total()
    if not answered or rows - answered > MAX_LEFT_OUT_SHARE * rows:
        raise ComparisonFailed(f"Only {answered} of {rows} rows have a graded answer of both models.")
    return compare_pairs(
        both=pairs[True, True], only_new=pairs[True, False], only_old=pairs[False, True], neither=pairs[False, False]
    )


def _figures(found: PairedShares, kind: str) -> str:
    difference = found.difference
    return (
        f"The new model passes {found.new_passed} of {found.rows} {kind} rows and production {found.old_passed}: "
        f"{100 * difference.value:+.1f} points ({100 * difference.low:+.1f} to {100 * difference.high:+.1f} with 95 % "
        "confidence)."
    )


def _run(retraining: Retraining, file: DatasetVersion, model_name: str, limit_nano: int) -> EvalRun:
    asked = stored_request(retraining.plan.source_job).evaluation or EvaluationPlan()
    source = CompletionsSource(
        source=FileId(id=file.pk),
        input_messages=ItemReference(item_reference="item.input"),
        model=model_name,
        sampling_params=SamplingParams(max_completion_tokens=asked.max_answer_tokens, temperature=0.0, seed=1),
    )
    return create_run(
        evaluated=_eval_of(retraining.plan, by=retraining.created_by),
        name=f"{retraining.plan.name}: {file.filename}"[:200],
        data_source=msgspec.to_builtins(source),
        source=source,
        metadata={"retraining_plan": retraining.plan_id, "retraining": retraining.pk},
        cost_limit_nano=limit_nano,
        by=retraining.created_by,
    )


def _eval_of(plan: RetrainingPlan, *, by: str) -> Eval:
    """Return the plan's eval; a new one if it has none, or if that was deleted."""
    if plan.evaluated is None:
        plan.evaluated = create_eval(
            organization=plan.organization_id,
            name=f"Retraining plan {plan.name}",
            data_source_config={"type": "custom", "item_schema": {"type": "object"}, "include_sample_schema": True},
            criteria=msgspec.convert(plan.testing_criteria, list[SentCriterion]),
            metadata={"retraining_plan": plan.pk},
            by=by,
            project=plan.source_job.project_id,
        )
        plan.save(update_fields=["evaluated"])
    return plan.evaluated
