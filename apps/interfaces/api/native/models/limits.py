"""GET /api/v1/models/{model}/limits: the limits of a model's settings, and the defaults."""

from typing import Any, Literal, TypedDict

import msgspec
from rest_framework.request import Request

from apps.accounts.roles import Permission
from apps.catalog.models import BaseModel
from apps.contracts.hyperparameters import Method, Objective
from apps.finetuning.recipes.completion import choose
from apps.finetuning.recipes.limits import Limit, TrainingKind, get_limits
from apps.finetuning.recipes.start_points import find_start_point
from apps.interfaces.api.views import ApiView


class LimitsObject(TypedDict):
    """`kinds` are the ways to train the model, each with the settings chosen for it; `fixed` is an adapter's shape."""

    object: Literal["model.limits"]
    model: str
    base_model: str
    objectives: list[str]
    kinds: list[dict[str, Any]]
    hyperparameters: dict[str, dict[str, Any]]
    fixed: dict[str, Any]


class ModelLimits(ApiView):
    """The limits of a base model, or of a fine-tuned one to continue; then the adapter's shape limits the choice."""

    required_scope = {"GET": Permission.VIEW}

    def get(self, request: Request, model: str) -> LimitsObject:
        """Return what each hyperparameter of a model may be, and what is chosen for it."""
        beginning = find_start_point(organization=self.organization, model=model)
        limits = get_limits(base_model=beginning.base_model)
        return {
            "object": "model.limits",
            "model": model,
            "base_model": beginning.base_model.name,
            "objectives": list(limits.objectives),
            "kinds": [_kind_object(kind, beginning.base_model) for kind in limits.kinds],
            "hyperparameters": {limit.name: _limit_object(limit) for limit in limits.hyperparameters},
            "fixed": beginning.shape,
        }


def _kind_object(kind: TrainingKind, base_model: BaseModel) -> dict[str, object]:
    asked = {"use_dora": True} if kind.use_dora else {}
    chosen = {
        objective.value: {
            choice.name: {"value": choice.value, "reason": choice.reason}
            for choice in choose(
                base_model=base_model, method=Method(kind.method), asked=asked, objective=objective
            ).choices
        }
        for objective in Objective
    }
    return msgspec.to_builtins(kind) | {"auto": chosen}


def _limit_object(limit: Limit) -> dict[str, object]:
    shown = {"description": limit.text, "nullable": limit.is_nullable}
    if limit.options:
        return shown | {"type": "array" if limit.is_list else "enum", "options": list(limit.options)}
    kind = "integer" if limit.is_whole else "number"
    return shown | {"type": kind, "minimum": limit.minimum, "maximum": limit.maximum}
