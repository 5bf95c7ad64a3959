"""Suggestions for a failed job: a change in words, its effect on a new job, and its price.

For each code, `_REMEDIES` lists changes, best first. The suggestion is the first one that a pool accepts now. A change
without a price gives the reason. Nothing is written: prices use stored token counts.
"""

import datetime
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import msgspec
from django.utils.translation import gettext

from apps.catalog.models import BaseModel
from apps.contracts.adapter_files import MAX_RANK, MAX_SCALE, get_scale
from apps.contracts.failures import FailureCode
from apps.contracts.hyperparameters import Hyperparameters, Method, Objective
from apps.core.errors import DomainError
from apps.datasets.lifecycle import DatasetVersionStatus
from apps.datasets.models import DatasetVersion, TokenCount
from apps.datasets.queries import find_token_count
from apps.datasets.token_counts import LIMITS
from apps.datasets.validation.repair_estimate import estimate_repair
from apps.finetuning.jobs.files import InvalidTrainingFile, is_all_held_out, objectives_of
from apps.finetuning.models import FineTuningJob
from apps.finetuning.quotes.options import PoolQuote, split_key
from apps.finetuning.quotes.queries import counting_model, find_counted, quote_counted
from apps.finetuning.recipes.limits import MIN_LEARNING_RATE, target_modules
from apps.finetuning.recipes.stored_requests import recipe_of, stored_request
from apps.finetuning.recipes.training_data import Counted

_SHORTEST = 64  # tokens; training on shorter rows is not worth a run
_A_ROW = re.compile(r"^Line \d+: ")  # how messages name a refused row, here and in the worker
_NEW_FILE = "You'll see the price of another file after you upload it."


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """One way to start the job again: `recipe` holds hyperparameters, `repairs` the files to repair first.

    `no_price` explains why it cannot be started and priced here: the customer must decide something else first.
    """

    text: str
    recipe: dict[str, Any] = {}
    repairs: tuple[str, ...] = ()  # "training_file", "validation_file"
    without_validation: bool = False
    no_price: str = ""


class Suggestion(msgspec.Struct, frozen=True, kw_only=True):
    """A change with the estimate on the option `pool`, and the amount that starting it would hold.

    If it cannot be started from here, or not now, `hold_nano` is None and `obstacle` gives the reason. `price_nano` is
    None if there is no price.
    """

    change: Change
    price_nano: int | None = None
    hold_nano: int | None = None
    pool: str = ""
    obstacle: str = ""

    @property
    def text(self) -> str:
        return self.change.text

    @property
    def changes(self) -> dict[str, object]:
        """Return the job's changed values, as JSON under the API's names."""
        files = dict.fromkeys(self.change.repairs, "repair")
        unset = {"validation_file": None} if self.change.without_validation else {}
        recipe: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(self.change.recipe))
        return recipe | files | unset


def suggest(*, job: FineTuningJob, now: datetime.datetime) -> Suggestion:
    """Return the change to suggest for a failed job: the first that can start now, or else simply the first."""
    first: Suggestion | None = None
    for change in _changes(job):
        found = _priced(change, job, now)
        if found.hold_nano is not None:
            return found
        first = first or found
    assert first is not None, f"no remedy for {job.error_code}"
    return first


# --- the changes, by cause --------------------------------------------------------------------------------------------


def _changes(job: FineTuningJob) -> Iterator[Change]:
    """Yield the changes for the job's error. If we or a provider must fix the cause, there is nothing to change."""
    if remedy := _REMEDIES.get(job.error_code):
        yield from remedy(job)
    elif job.error_code in list(FailureCode):
        yield Change(text="You don't need to change anything: start the job again. The failed job is not billed.")
    else:
        yield Change(text=_ADVICE.get(job.error_code, "Fix what the message names, then start the job again."))


def _lower_rate(job: FineTuningJob) -> Iterator[Change]:
    rate = max(recipe_of(job).learning_rate / 10, MIN_LEARNING_RATE)
    yield Change(text=f"Lower the learning rate to {rate:g}.", recipe={"learning_rate": rate})


def _more_to_learn(job: FineTuningJob) -> Iterator[Change]:
    """Suggest for a loss of zero: train on tokens that are not trained yet, or stop earlier."""
    recipe = recipe_of(job)
    yield from _train_on_inputs(recipe)
    if _longest_row(job) > recipe.max_length:
        yield from _longer_rows(job)
    if recipe.epochs > 1:
        epochs = recipe.epochs // 2
        text = f"Train for {epochs} epoch{'s' if epochs > 1 else ''}: it ends before nothing is left to learn."
        yield Change(text=text, recipe={"epochs": epochs})
    yield Change(text="Train on other rows: the model has nothing left to learn from these.", no_price=_NEW_FILE)


def _reach_the_answers(job: FineTuningJob) -> Iterator[Change]:
    """Suggest for rows that were cut until no trained token was left."""
    yield from _longer_rows(job)
    yield from _train_on_inputs(recipe_of(job))
    text = "Shorten the rows: they are longer than the base model's context."
    yield Change(text=text, no_price=f"You decide which rows to shorten. {_NEW_FILE}")


def _longer_rows(job: FineTuningJob) -> Iterator[Change]:
    """Suggest first the limit that cuts no row, then the largest ones that might still fit."""
    limit, context, longest = recipe_of(job).max_length, job.base_model.context_length, _longest_row(job)
    usual = [length for length in (*LIMITS, context) if limit < length <= context]
    lengths = [length for length in usual if length >= longest > limit][:1]
    lengths += [length for length in reversed(usual) if lengths and length < lengths[0]]
    for length in lengths or ([min(2 * limit, context)] if limit < context else []):
        yield Change(text=f"Raise max_length to {length:,}.", recipe={"max_length": length})


def _train_on_inputs(recipe: Hyperparameters) -> Iterator[Change]:
    if recipe.objective is Objective.SUPERVISED and recipe.train_on != "all":
        text = "Train on the inputs too: they hold tokens that the model can learn from."
        yield Change(text=text, recipe={"train_on": "all"})


def _smaller(job: FineTuningJob) -> Iterator[Change]:
    recipe = recipe_of(job)
    if recipe.method is Method.LORA and not recipe.use_dora:
        text = "Train with QLoRA: the base model takes a quarter of the memory."
        yield Change(text=text, recipe={"method": Method.QLORA, "quantization": "nf4"})
    length = min(recipe.max_length, _longest_row(job) or recipe.max_length) // 2
    while length >= _SHORTEST:
        yield Change(text=f"Shorten rows to {length:,} tokens, or use a larger GPU.", recipe={"max_length": length})
        length //= 2
    text = "Choose a smaller base model or a larger GPU: the rows are short already."
    yield Change(text=text, no_price="You'll see each price when you choose it.")


def _servable(job: FineTuningJob) -> Iterator[Change]:
    """Suggest layers and a rank that every replica takes, and a lower alpha if its scale would be too large."""
    recipe, usual = recipe_of(job), Hyperparameters()
    changed: dict[str, Any] = {"target_modules": target_modules(base_model=job.base_model)[0]}
    if recipe.lora_rank > MAX_RANK:
        changed["lora_rank"] = usual.lora_rank
    shape = {"r": changed.get("lora_rank", recipe.lora_rank), "lora_alpha": recipe.lora_alpha}
    if get_scale(shape | {"use_rslora": recipe.use_rslora}) > MAX_SCALE:
        changed["lora_alpha"] = 2 * shape["r"]
    yield Change(text="Train the layers that the serving engine accepts.", recipe=changed)


def _repair_file(job: FineTuningJob) -> Iterator[Change]:
    """Suggest a change for a file error.

    The code has several causes; the files' state shows which, without reading the rows.
    """
    param = "validation_file" if job.error_param == "validation_file" and job.validation_file else "training_file"
    version = job.validation_file if param == "validation_file" else job.training_file
    assert version is not None
    if version.status == DatasetVersionStatus.DELETED:
        text = f"Choose another file: {version.filename} was deleted."
        yield Change(text=text, no_price=_NEW_FILE)
    elif version.status == DatasetVersionStatus.INVALID:
        yield from _repair(version, param)
    elif job.validation_file is not None and is_all_held_out(job.training_file, job.validation_file):
        text = "Train without that validation file: every row of the training file repeats one of its rows."
        yield Change(text=text, without_validation=True)
    elif recipe_of(job).objective not in objectives_of(job.training_file):
        yield from _other_objective(job)
    elif _A_ROW.match(job.error_message):  # the row may be in either file
        name = job.base_model.display_name
        text = f"Leave out the rows that {name} cannot read, and start on the version without them."
        files = ("training_file", "validation_file") if job.validation_file else ("training_file",)
        yield Change(text=text, repairs=files)
    else:
        if recipe_of(job).validation_share and job.validation_file is None:
            text = "Turn off the validation split: the file has too few different rows."
            yield Change(text=text, recipe={"validation_share": 0.0})
        yield from _reach_the_answers(job)


def _repair(version: DatasetVersion, param: str) -> Iterator[Change]:
    if version.has_bad_rows:
        rows = f"{version.error_count:,} bad row{'' if version.error_count == 1 else 's'}"
        text = f"Fix {rows} of {version.filename}, skip rows that cannot be fixed, and start on that version."
        yield Change(text=text, repairs=(param,))
    else:
        text = f"Upload {version.filename} again: it could not be read as rows, so there are none to fix."
        yield Change(text=text, no_price=_NEW_FILE)


def _other_objective(job: FineTuningJob) -> Iterator[Change]:
    version, other = job.training_file, job.validation_file
    objective = objectives_of(version)[0]
    text = f"Train by {objective}: the file holds {version.kind} rows."
    is_alike = other is None or other.kind in ("", version.kind)
    recipe = {"objective": objective} | ({"lora_dropout": 0.0} if objective.is_preference else {})
    yield Change(text=text, recipe=recipe, without_validation=not is_alike)


def _other_start(job: FineTuningJob) -> Iterator[Change]:
    text = "Choose another model to start from: the one that this job continued was deleted."
    yield Change(text=text, no_price="You'll see the price when you choose it.")


_REMEDIES: Mapping[str, Callable[[FineTuningJob], Iterator[Change]]] = {
    FailureCode.LOSS_NOT_FINITE: _lower_rate,
    FailureCode.LOSS_IS_ZERO: _more_to_learn,
    FailureCode.NO_TRAINABLE_TOKENS: _reach_the_answers,
    FailureCode.INVALID_TRAINING_FILE: _repair_file,
    FailureCode.OUT_OF_MEMORY: _smaller,
    FailureCode.ADAPTER_REJECTED: _servable,
    FailureCode.START_DELETED: _other_start,
    "job_too_large": _smaller,
}
# Refused at admission: nothing ran, so these are not failure codes of a run.
_TAKEN_NOW = "Start the job again on an option that accepts it now."
_ADVICE = {
    "insufficient_quota": "Add credit or raise the limit that the message names, then start the job again.",
    "cannot_launch": _TAKEN_NOW,
    "maximum_raised": "Check the new maximum, then start the job again.",
    "invalid_value": _TAKEN_NOW,
}


def _longest_row(job: FineTuningJob) -> int:
    """Return the tokens of the longest row, 0 if they were not counted."""
    count = find_token_count(version=job.training_file, base_model=job.base_model)
    return count.longest_row_tokens if count else 0


# --- their prices -----------------------------------------------------------------------------------------------------


def _priced(change: Change, job: FineTuningJob, now: datetime.datetime) -> Suggestion:
    """Return the change with the estimate of the job's own option, or of the cheapest that takes it now."""
    if change.no_price:
        return Suggestion(change=change, obstacle=change.no_price)
    wanted = stored_request(job)
    try:
        quotes = _quotes(change, job, now)
        name, gpu_count = split_key(wanted.pool or "", gpu_count=wanted.gpu_count)
    except DomainError as refused:
        return Suggestion(change=change, obstacle=refused.message)
    if not quotes:
        return Suggestion(change=change, obstacle="No GPU pool is open on this platform.")
    launchable = [quoted for quoted in quotes if quoted.is_launchable]
    asked = [each for each in launchable if each.pool.name == name and gpu_count in (None, each.gpu_count)]
    best = (asked or launchable or quotes)[0]
    price_nano = best.estimate.cost_nano_p50
    if not best.is_launchable:
        obstacle = f"{best.pool.name}: {best.block_reason}"
        return Suggestion(change=change, price_nano=price_nano, pool=best.key, obstacle=obstacle)
    own_cap = wanted.spend_cap_nano or 0
    least_nano = max(price_nano or 0, best.least_cap_nano or 0)
    hold_nano = best.maximum_nano(own_cap if price_nano is not None and own_cap >= least_nano else None)
    return Suggestion(change=change, price_nano=price_nano, hold_nano=hold_nano, pool=best.key)


def _quotes(change: Change, job: FineTuningJob, now: datetime.datetime) -> list[PoolQuote]:
    recipe = msgspec.structs.replace(recipe_of(job), **change.recipe)
    counted = _counted(change, job)
    [quotes] = quote_counted(
        base_model=job.base_model,
        counted=counted,
        recipes=[recipe],
        now=now,
        with_ways=False,
        node_count=stored_request(job).node_count,
    )
    return quotes


def _counted(change: Change, job: FineTuningJob) -> Counted:
    """Return the files as the change will leave them, repaired or not.

    Raises StillCounting, and InvalidTrainingFile if the repair may leave nothing.
    """
    counting, version = counting_model(job.base_model), job.training_file
    validation = None if change.without_validation else job.validation_file
    if "training_file" in change.repairs:
        repaired, count = _repaired(version, counting, "training_file")
        counted = Counted(version=repaired, count=count, validation=validation)
    else:
        kept = None if "validation_file" in change.repairs else validation
        counted = find_counted(version=version, validation=kept, counting=counting)
    if "validation_file" in change.repairs and validation is not None:
        repaired, count = _repaired(validation, counting, "validation_file")
        counted = replace(counted, validation=repaired, validation_count=count)
    return counted


def _repaired(version: DatasetVersion, counting: BaseModel, param: str) -> tuple[DatasetVersion, TokenCount]:
    found = estimate_repair(version=version, base_model=counting)
    if found is None:
        message = gettext("None of the first rows of %(filename)s is valid as it is: fix them and upload it again.") % {
            "filename": version.filename
        }
        raise InvalidTrainingFile(message, param=param)
    return found
