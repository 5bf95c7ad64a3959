"""The price that the first two steps show: the cheapest way to train the file with the model, as far as it is known."""

from collections.abc import Iterable
from dataclasses import dataclass

from apps.catalog.models import BaseModel
from apps.datasets.lifecycle import DatasetVersionStatus
from apps.datasets.models import DatasetVersion
from apps.interfaces.web.datasets.price import least_nano
from apps.interfaces.web.wizard.plan import Plan


@dataclass(frozen=True, kw_only=True)
class LeastPrice:
    """The median cost of the cheapest option, and what it is for: the form may choose something else meanwhile."""

    nano: int
    file: str
    model: str


def find_least_price(plan: Plan, *, version: DatasetVersion | None, model: str, title: str) -> LeastPrice | None:
    """Return the lowest price; return None if nothing is chosen, or as long as the tokens are not counted."""
    if version is None or version.status != DatasetVersionStatus.READY or not model:
        return None
    nano = least_nano(plan.organization, plan.draft.with_changes({"dataset": version.pk, "model": model}))
    return None if nano is None else LeastPrice(nano=nano, file=version.dataset.name, model=title)


def usual_model(plan: Plan, usable: Iterable[BaseModel]) -> tuple[BaseModel | None, bool]:
    """Return the model that is chosen first, and whether it is the project's default."""
    usable = list(usable)
    wished = plan.project.default_model if plan.project else ""
    preferred = next((model for model in usable if model.name == wished), None)
    return preferred or next(iter(usable), None), preferred is not None
