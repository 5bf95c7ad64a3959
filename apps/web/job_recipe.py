"""How a job was trained, in words and as the call that would train it again."""

import msgspec

from apps.contracts.runs import Hyperparameters, Method, Objective
from apps.finetuning.limits import kind_of
from apps.finetuning.models import FineTuningJob
from apps.web.code_samples import job_samples
from apps.web.forms.wizard import TRAINED


def recipe_lines(job: FineTuningJob) -> list[tuple[str, str]]:
    """Return (name, value) of what people ask about."""
    recipe = msgspec.convert(job.hyperparameters, Hyperparameters)
    kind = kind_of(base_model=job.base_model, recipe=recipe)
    rank = [("Rank, alpha", f"{recipe.lora_rank}, {recipe.lora_alpha}{' / √rank' if recipe.use_rslora else ''}")]
    return [
        ("Dataset", job.training_file.dataset.name),
        ("Base model", job.base_model.display_name),
        ("Method", f"{kind.name}, NF4" if recipe.quantization else kind.name),
        ("Trained", _trained(recipe)),
        *([] if recipe.method is Method.FULL else rank),
        ("Learning rate", f"{recipe.learning_rate:g}, {recipe.lr_scheduler}"),
        ("Batch", _batch(recipe)),
        ("Epochs", str(recipe.epochs)),
        ("Longest row", f"{recipe.max_length} tokens"),
        ("Seed", str(recipe.seed)),
    ]


def _trained(recipe: Hyperparameters) -> str:
    if recipe.objective.is_preference:
        return f"Preferences, {recipe.objective.upper()}"
    return "Every token" if recipe.objective is Objective.TEXT else dict(TRAINED)[recipe.train_on]


def _batch(recipe: Hyperparameters) -> str:
    parts = recipe.gradient_accumulation_steps
    return f"{recipe.batch_size} rows" + (f" in {parts} parts" if parts > 1 else "")


def job_calls(job: FineTuningJob) -> list[dict[str, str]]:
    """Return the same job as API calls, with what its owner set."""
    recipe, asked = msgspec.convert(job.hyperparameters, Hyperparameters), job.requested
    beginning = asked.get("start_from") or {}
    set_by_owner = {each["name"]: each["value"] for each in asked.get("choices", []) if not each["is_auto"]}
    return job_samples(
        model=beginning.get("model") or beginning.get("checkpoint") or job.base_model.name,
        training_file=job.training_file_id,
        validation_file=job.validation_file_id or "",
        suffix=job.suffix,
        method=recipe.method,
        objective=recipe.objective,
        recipe=set_by_owner,
        exports=asked.get("exports") or [],
        integrations=asked.get("integrations") or [],
    )
