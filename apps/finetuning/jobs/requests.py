"""A customer's request for a job, and the recipe that it leads to."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from django.utils.translation import gettext

from apps.contracts.evaluation import EvaluationPlan
from apps.contracts.hyperparameters import Method, Objective
from apps.core.errors import InvalidValue
from apps.datasets.models import DatasetVersion
from apps.datasets.queries import find_token_count
from apps.finetuning.jobs.files import data_facts, require_objective, require_rows_to_train
from apps.finetuning.recipes import completion
from apps.finetuning.recipes.start_points import StartPoint

# Metadata of `anneal apply` and `anneal import`, which point an alias at the model of the newest job with it.
_MARKS = ("apply.", "imported_from", "imported_model")


def is_mark(name: str) -> bool:
    """Return whether a command of the customer's finds the job by this key of its metadata."""
    return name.startswith(_MARKS)


def unmarked(metadata: Mapping[str, str]) -> dict[str, str]:
    """Return the metadata for another job that no command must take for this one."""
    return {name: value for name, value in metadata.items() if not is_mark(name)}


@dataclass(frozen=True)
class JobRequest:
    """A customer's request for a job.

    `hyperparameters` may be partial, and `method` None is LoRA. `pool` and `gpu_count` None mean the cheapest, of
    `preferred_pool` if one there can run the job; `pool` may be the key of an option, which includes its GPUs.
    `gpu_count` counts those of all `node_count` machines. `base_model` may name an adapter version or a checkpoint to
    continue from. `objective` None follows the rows. A job whose maximum is above `shown_max_nano` is not launched.
    `project` is that of what a member starts, else the default; a key has its own.
    """

    base_model: str
    training_file: str
    validation_file: str | None = None
    method: Method | None = None
    objective: Objective | None = None
    hyperparameters: Mapping[str, object] = field(default_factory=dict)
    pool: str | None = None
    preferred_pool: str = ""
    gpu_count: int | None = None
    node_count: int = 1
    spend_cap_nano: int | None = None
    shown_max_nano: int | None = None
    suffix: str | None = None
    project: str = ""
    seed: int | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    integrations: Sequence[Mapping[str, object]] = ()
    evaluation: EvaluationPlan | None = None
    exports: Sequence[str] = ()
    idempotency_key: str | None = None
    fingerprint: str = ""
    is_retry: bool = False


def choose_recipe(
    start_point: StartPoint,
    request: JobRequest,
    *,
    training_file: DatasetVersion,
    validation_file: DatasetVersion | None,
) -> completion.Recipe:
    """Return the recipe of the request. Raises InvalidValue and InvalidTrainingFile."""
    method = request.method or Method.LORA
    chosen = completion.choose(
        base_model=start_point.base_model,
        method=method,
        asked=start_point.require_shape(asked_hyperparameters(request), method=method),
        objective=require_objective(request.objective, training_file, validation_file),
        data=data_facts(
            version=training_file,
            validation=validation_file,
            count=find_token_count(version=training_file, base_model=start_point.base_model),
        ),
        keeps_rank="lora_rank" in start_point.shape and method is not Method.FULL,
    )
    if validation_file is not None and chosen.hyperparameters.validation_share:
        message = gettext("Give a validation file or a share to hold out, not both.")
        raise InvalidValue(message, param="hyperparameters.validation_share")
    require_rows_to_train(training_file, validation_file)
    return chosen


def asked_hyperparameters(request: JobRequest) -> dict[str, object]:
    """Return the hyperparameters the customer set."""
    return dict(request.hyperparameters) | ({} if request.seed is None else {"seed": request.seed})
