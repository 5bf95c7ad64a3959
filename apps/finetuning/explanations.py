"""Why a job failed: whose fault it is, the cause in one sentence, the evidence, and what to change at which price."""

import datetime
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from apps.contracts.failures import CAUSES, Blame, FailureCode
from apps.contracts.runs import Hyperparameters, Method
from apps.core.errors import DomainError
from apps.finetuning.job_quotes import get_quotes
from apps.finetuning.models import FineTuningJob

_GIB = 2**30


class Evidence(msgspec.Struct, frozen=True):
    """One fact that the cause follows from."""

    name: str
    value: str


class Suggestion(msgspec.Struct, frozen=True, kw_only=True):
    """What to change, in words and as fields of the recipe, and what the changed job is estimated to cost.

    Without `changes` the same job again is meant. The price is None where it cannot be told.
    """

    text: str
    changes: dict[str, Any] = {}
    price_nano: int | None = None
    pool: str = ""


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    code: str
    blame: Blame
    cause: str
    evidence: tuple[Evidence, ...]
    suggestion: Suggestion | None
    log_tail: str = ""  # the end of the last attempt's log; its worker took the secrets out


def explain(*, job: FineTuningJob, now: datetime.datetime) -> Explanation | None:
    """Return why the job failed; None unless it has."""
    if job.status != "failed":
        return None
    code = _failure_code(job.error_code)
    return Explanation(
        code=job.error_code,
        blame=code.blame if code else Blame.CUSTOMER,  # what is no run's failure was refused before anything ran
        cause=CAUSES[code] if code else job.error_message,
        evidence=tuple(_evidence(job)),
        suggestion=_suggestion(job, code, now),
        log_tail=job.runs.order_by("-attempt").values_list("log_tail", flat=True).first() or "",
    )


def _failure_code(code: str) -> FailureCode | None:
    try:
        return FailureCode(code)
    except ValueError:
        return None


def _evidence(job: FineTuningJob) -> list[Evidence]:
    found = [Evidence("Reported", job.error_message)]
    if job.total_steps and job.step:
        found.append(Evidence("Step", f"{job.step} of {job.total_steps}"))
    losses = [event.data.get("train_loss") for event in job.events.filter(type="metrics").order_by("-sequence")[:3]]
    shown = [f"{loss:.3f}" for loss in reversed(losses) if loss is not None]
    if shown:
        found.append(Evidence("Last losses", ", ".join(shown)))
    runs = list(job.runs.order_by("attempt"))
    peak = max((run.peak_memory_bytes or 0 for run in runs), default=0)
    if peak and job.estimate.get("capacity_bytes"):
        capacity = job.estimate["capacity_bytes"]
        found.append(Evidence("Peak memory", f"{peak / _GIB:.1f} of {capacity / _GIB:.1f} GiB"))
    if len(runs) > 1:
        codes = ", ".join(run.failure_code or run.status for run in runs)
        found.append(Evidence("Attempts", f"{len(runs)}: {codes}"))
    return found


def _suggestion(job: FineTuningJob, code: FailureCode | None, now: datetime.datetime) -> Suggestion | None:
    recipe = msgspec.convert(job.hyperparameters, Hyperparameters)
    if code is None:
        return _smaller(recipe, job, now) if job.error_code == "job_too_large" else None
    if code in _CHANGES:
        return _CHANGES[code](recipe, job, now)
    return _priced("Nothing of yours needs to change: start the job again.", recipe, {}, job, now)


def _lower_rate(recipe: Hyperparameters, job: FineTuningJob, now: datetime.datetime) -> Suggestion:
    rate = recipe.learning_rate / 10
    return _priced(f"Lower the learning rate to {rate:g}.", recipe, {"learning_rate": rate}, job, now)


def _longer_rows(recipe: Hyperparameters, job: FineTuningJob, now: datetime.datetime) -> Suggestion:
    longest = min(2 * recipe.max_length, job.base_model.context_length)
    if longest <= recipe.max_length:
        text = "Shorten the rows: the base model takes no longer ones."
        return Suggestion(text=text)
    return _priced(f"Raise max_length to {longest}.", recipe, {"max_length": longest}, job, now)


def _smaller(recipe: Hyperparameters, job: FineTuningJob, now: datetime.datetime) -> Suggestion:
    if recipe.method is Method.LORA and not recipe.use_dora:
        changes: dict[str, Any] = {"method": Method.QLORA, "quantization": "nf4"}
        return _priced("Train with QLoRA: the base model takes a quarter of the memory.", recipe, changes, job, now)
    half = max(recipe.max_length // 2, 64)
    return _priced(f"Shorten rows to {half} tokens, or use a larger GPU.", recipe, {"max_length": half}, job, now)


def _repair(recipe: Hyperparameters, job: FineTuningJob, now: datetime.datetime) -> Suggestion:
    return Suggestion(text="Repair the rows named, upload the file again and start a new job with it.")


def _check_answers(recipe: Hyperparameters, job: FineTuningJob, now: datetime.datetime) -> Suggestion:
    return Suggestion(text="Look at the trained tokens of the file: its answers hold nothing left to learn.")


def _servable(recipe: Hyperparameters, job: FineTuningJob, now: datetime.datetime) -> Suggestion:
    changes = {"target_modules": Hyperparameters().target_modules}
    return _priced("Train the layers that the serving engine takes.", recipe, changes, job, now)


_CHANGES: Mapping[FailureCode, Callable[[Hyperparameters, FineTuningJob, datetime.datetime], Suggestion]] = {
    FailureCode.LOSS_NOT_FINITE: _lower_rate,
    FailureCode.LOSS_IS_ZERO: _check_answers,
    FailureCode.NO_TRAINABLE_TOKENS: _longer_rows,
    FailureCode.INVALID_TRAINING_FILE: _repair,
    FailureCode.OUT_OF_MEMORY: _smaller,
    FailureCode.ADAPTER_REJECTED: _servable,
}


def _priced(
    text: str, recipe: Hyperparameters, changes: dict[str, Any], job: FineTuningJob, now: datetime.datetime
) -> Suggestion:
    """Return the suggestion with the estimate of the cheapest pool that takes the changed job now."""
    changed = msgspec.structs.replace(recipe, **changes)
    try:
        quotes = get_quotes(
            base_model=job.base_model,
            version=job.training_file,
            recipe=changed,
            now=now,
            validation=job.validation_file,
        )
    except DomainError:
        quotes = []
    found = next((quoted for quoted in quotes if quoted.is_launchable), None)
    return Suggestion(
        text=text,
        changes=msgspec.to_builtins(changes),
        price_nano=found.estimate.cost_nano_p50 if found else None,
        pool=found.pool.name if found else "",
    )
