"""A job's recipe, in words for its page and as the API call that would create the job again."""

import msgspec
from django.utils.translation import gettext, ngettext

from apps.contracts.hyperparameters import Hyperparameters, Method, Objective
from apps.core.money import usd_decimal
from apps.finetuning.jobs.requests import unmarked
from apps.finetuning.models import FineTuningJob
from apps.finetuning.recipes.limits import kind_of
from apps.finetuning.recipes.stored_requests import own_settings, recipe_of, stored_request
from apps.interfaces.web.shell.code_samples import job_samples
from apps.interfaces.web.wizard.after_training_forms import grader_field
from apps.interfaces.web.wizard.forms import ADAPTER_FIELDS, RECIPE_FIELDS, TRAINED
from apps.interfaces.web.wizard.recipe_words import ChosenValue, machine_words, value_in_words, values_in_words

_OFF_BY_DEFAULT = ("use_rslora", "cpu_offload")


def method_words(job: FineTuningJob) -> str:
    """Return how the job trains, such as "QLoRA, rank 16"."""
    recipe = recipe_of(job)
    name = kind_of(base_model=job.base_model, recipe=recipe).name
    return (
        name
        if recipe.method is Method.FULL
        else gettext("%(method)s, rank %(rank)s") % {"method": name, "rank": recipe.lora_rank}
    )


def recipe_lines(job: FineTuningJob) -> list[tuple[str, str]]:
    """Return (name, value) pairs of the settings people ask about."""
    recipe = recipe_of(job)
    kind = kind_of(base_model=job.base_model, recipe=recipe)
    scaled = " / √rank" if recipe.use_rslora else ""
    time_parts = [(part["key"], part["seconds"]) for part in job.estimate.get("time_parts", ())]
    adapter = [(gettext("Rank, alpha"), f"{recipe.lora_rank}, {recipe.lora_alpha}{scaled}")]
    return [
        (gettext("Dataset"), job.training_file.dataset.name),
        (gettext("Base model"), job.base_model.display_name),
        (gettext("Method"), f"{kind.name}, NF4" if recipe.quantization else kind.name),
        (gettext("Trained"), _trained(recipe)),
        *([] if recipe.method is Method.FULL else adapter),
        (gettext("Learning rate"), f"{recipe.learning_rate:g}, {recipe.lr_scheduler}"),
        (gettext("Batch"), _batch(recipe)),
        (gettext("Epochs"), str(recipe.epochs)),
        (gettext("Longest row"), gettext("%(max_length)s tokens") % {"max_length": f"{recipe.max_length:,}"}),
        (gettext("Early stopping"), value_in_words("early_stopping_patience", recipe.early_stopping_patience)),
        (gettext("Seed"), str(recipe.seed)),
        *([(gettext("Machines"), machine_words(job.node_count, time_parts))] if job.node_count > 1 else []),
    ]


def recipe_reasons(job: FineTuningJob) -> list[ChosenValue]:
    """Return every value with the reason given for it at creation."""
    return values_in_words(stored_request(job).choices, recipe_of(job))


def recipe_samples(job: FineTuningJob, *, model: str) -> list[dict[str, str]]:
    """Return the job as API calls to copy, with the values of its run. `model` names the model that it began with."""
    recipe, asked = recipe_of(job), stored_request(job)
    return job_samples(
        model=model,
        training_file=job.training_file_id,
        validation_file=job.validation_file_id or "",
        suffix=job.suffix,
        method=recipe.method,
        objective=recipe.objective,
        recipe=_values(job, recipe),
        grader=grader_field(asked.evaluation.grader) if asked.evaluation else None,
        exports=asked.exports,
        metadata=unmarked(job.metadata),
        integrations=[msgspec.to_builtins(each) for each in asked.integrations],
        pool=job.pool.name if job.pool and asked.pool else "",
        gpu_count=job.gpu_count,
        node_count=job.node_count,
        cap_usd=usd_decimal(asked.spend_cap_nano) if asked.spend_cap_nano else "",
    )


def _values(job: FineTuningJob, recipe: Hyperparameters) -> dict[str, object]:
    left_out = {name for name in _OFF_BY_DEFAULT if not getattr(recipe, name)}
    left_out |= set(ADAPTER_FIELDS) if recipe.method is Method.FULL else set()
    left_out |= {"validation_share"} if job.validation_file_id else set()
    values = {name: getattr(recipe, name) for name in RECIPE_FIELDS}
    return {name: value for name, value in (own_settings(job) | values).items() if name not in left_out} | (
        {"use_dora": True} if recipe.use_dora else {}
    )


def _trained(recipe: Hyperparameters) -> str:
    if recipe.objective.is_preference:
        return gettext("Preferences, %(objective)s") % {"objective": recipe.objective.upper()}
    return gettext("Every token") if recipe.objective is Objective.TEXT else dict(TRAINED)[recipe.train_on]


def _batch(recipe: Hyperparameters) -> str:
    parts = recipe.gradient_accumulation_steps
    if parts > 1:
        return gettext("%(rows)s rows in %(parts)s parts") % {"rows": recipe.batch_size, "parts": parts}
    return ngettext("%(rows)s row", "%(rows)s rows", recipe.batch_size) % {"rows": recipe.batch_size}
