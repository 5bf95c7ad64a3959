"""The lowest price of training on a file as its page shows it. Loaded after the page, because quotes take time."""

from collections.abc import Mapping

from apps.accounts.models import Organization
from apps.catalog.models import BaseModel
from apps.contracts.chat import TrainOn
from apps.core.errors import DomainError
from apps.interfaces.web.datasets.viewer import Address
from apps.interfaces.web.wizard.plan import Choices, Plan


def training_choices(address: Address, model: BaseModel | None) -> dict[str, str]:
    """Return the wizard's choices that train what the page shows."""
    chosen = {"dataset": address.version.pk}
    if model:
        chosen["model"] = model.name
        if address.limit != address.usual_limit:
            chosen["max_length"] = str(address.limit)
    if address.train_on is not TrainOn.ASSISTANT:
        chosen["train_on"] = address.train_on.value
    if address.against:
        chosen["validation"] = address.against
    elif address.share:
        chosen |= {"validation_share": str(address.split.share), "seed": str(address.seed)}
    return chosen


def wizard_url(chosen: Mapping[str, str]) -> str:
    """Return the wizard's address for these choices, at the base model step: the page's model is only for viewing."""
    return Choices(chosen).url(step="model")


def least_nano(organization: Organization, chosen: Mapping[str, str]) -> int | None:
    """Return the median cost of the cheapest option that can be launched now; return None if there is none."""
    plan = Plan(organization, Choices(chosen))
    try:
        quotes = plan.quotes_of_kinds(plan.form.kinds) if plan.form else {}
    except DomainError:
        return None  # the wizard shows the reason
    costs = [
        quoted.estimate.cost_nano_p50
        for of_kind in quotes.values()
        for quoted in of_kind
        if quoted.is_launchable and quoted.estimate.cost_nano_p50 is not None
    ]
    return min(costs, default=None)
