"""A customer's request for a job, as the job's row keeps it: the values that have no column."""

from typing import Any

import msgspec

from apps.contracts.evaluation import EvaluationPlan
from apps.contracts.hyperparameters import Hyperparameters, Objective
from apps.finetuning.models import FineTuningJob
from apps.finetuning.recipes.completion import RecipeChoice


class StartFrom(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The weights a job continues: an adapter version or a checkpoint, and the name it was requested by.

    All fields are empty if the job starts from the base model.
    """

    version: str = ""
    model: str = ""
    checkpoint: str = ""

    @property
    def name(self) -> str:
        """Return the value of a request's `model` that starts from here; "" for the base model."""
        return self.checkpoint or self.model

    @property
    def sent_name(self) -> str:
        """Return the value of `model` that the request had; "" for the base model."""
        return self.model or self.checkpoint


class TrackerProject(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Where a tracker shows the job: OpenAI's fields of Weights & Biases, used for MLflow as well."""

    project: str
    name: str | None = None
    entity: str | None = None
    tags: tuple[str, ...] = ()


class Integration(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One of a job's `integrations`, as OpenAI's API writes it: the tracker's type, and its project under that name."""

    type: str  # "wandb" | "mlflow"
    wandb: TrackerProject | None = None
    mlflow: TrackerProject | None = None

    @property
    def project(self) -> TrackerProject:
        found: TrackerProject = getattr(self, self.type)
        return found


class StoredRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What `FineTuningJob.requested` holds. `pool`, `gpu_count` and `spend_cap_nano` are None if we may choose.

    Rows are kept for good: a new field has a default, and a field never changes its meaning. Queries read `pool`,
    `fingerprint` and the members of `start_from` by these names.
    """

    pool: str | None = None
    preferred_pool: str = ""  # of the project: the cheapest option there, if one can run the job
    gpu_count: int | None = None
    node_count: int = 1
    spend_cap_nano: int | None = None
    shown_max_nano: int | None = None  # the maximum that its customer was shown; None if unknown
    fingerprint: str = ""  # of the request's body; "" if it did not come through the API
    start_from: StartFrom = StartFrom()
    asked: dict[str, Any] | None = None  # the hyperparameters as sent; None in jobs older than this field
    objective: Objective | None = None  # None follows the rows
    integrations: tuple[Integration, ...] = ()
    choices: tuple[RecipeChoice, ...] = ()
    evaluation: EvaluationPlan | None = None
    exports: tuple[str, ...] = ()
    suffix: str = ""  # as sent; the job's own is a part of the model's name


def recipe_of(job: FineTuningJob) -> Hyperparameters:
    """Return the hyperparameters that the job trains with."""
    return msgspec.convert(job.hyperparameters, Hyperparameters)


def stored_request(job: FineTuningJob) -> StoredRequest:
    """Return what the customer asked for."""
    return msgspec.convert(job.requested, StoredRequest)


def own_settings(job: FineTuningJob) -> dict[str, Any]:
    """Return the hyperparameters that the customer set, by name; all others were chosen by us."""
    return {choice.name: choice.value for choice in stored_request(job).choices if not choice.is_auto}
