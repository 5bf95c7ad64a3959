"""The lowest price of training on a file. The page loads it afterwards, because quotes take time."""

from apps.accounts.models import Organization
from apps.catalog.models import BaseModel
from apps.contracts.chat import TrainOn
from apps.core.errors import DomainError
from apps.interfaces.web.datasets.address import DEFAULT_SEED, Address
from apps.interfaces.web.wizard.draft import Draft
from apps.interfaces.web.wizard.plan import Plan


def training_draft(address: Address, model: BaseModel | None) -> Draft:
    """Return the wizard's draft for the file, model and limit that the page shows."""
    chosen = {"dataset": address.version.pk}
    if model:
        chosen["model"] = model.name
        if address.limit != address.usual_limit:
            chosen["max_length"] = str(address.limit)
    if address.train_on is not TrainOn.ASSISTANT:
        chosen["train_on"] = address.train_on.value
    if address.against:
        chosen["validation"] = address.against
    elif (address.share, address.seed) != (address.usual_share, DEFAULT_SEED):
        chosen |= {"validation_share": str(address.split.share), "seed": str(address.seed)}
    return Draft(chosen)


def least_nano(organization: Organization, draft: Draft) -> int | None:
    """Return the median cost of the cheapest option that can be launched now; return None if there is none."""
    plan = Plan(organization, draft)
    if plan.form is None or plan.is_uncounted or plan.is_uncompared:
        return None
    try:
        quotes = plan.quotes_of_kinds(plan.form.kinds)
    except DomainError:
        return None  # the wizard shows the reason
    costs = [
        quoted.estimate.cost_nano_p50
        for of_kind in quotes.values()
        for quoted in of_kind
        if quoted.is_launchable and quoted.estimate.cost_nano_p50 is not None
    ]
    return min(costs, default=None)
