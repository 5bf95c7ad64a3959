"""Why a job cannot be quoted for several machines, and why an option of a quote cannot be launched now."""

from django.utils.translation import gettext

from apps.accounts.models import is_allowed
from apps.catalog.models import BaseModel
from apps.contracts.hyperparameters import Hyperparameters
from apps.core.errors import InvalidValue
from apps.estimates.machines import MAX_NODES
from apps.estimates.quote import Estimate
from apps.finetuning.quotes.pool_facts import PoolState


def require_node_count(node_count: int) -> None:
    """Raise InvalidValue for a number of machines that no job can have."""
    if not 1 <= node_count <= MAX_NODES:
        text = gettext("%(name)s must be a whole number from %(low)s to %(high)s.")
        raise InvalidValue(text % {"name": "node_count", "low": 1, "high": MAX_NODES}, param="compute.node_count")


def require_machines(recipe: Hyperparameters, node_count: int) -> None:
    """Raise InvalidValue for a number out of range, and for a recipe that several machines cannot share."""
    require_node_count(node_count)
    if node_count > 1 and recipe.cpu_offload:
        message = gettext(
            "Training on several machines does not work with cpu_offload: turn it off, or use one machine."
        )
        raise InvalidValue(message, param="compute.node_count")


def block_reason(state: PoolState, estimate: Estimate, base_model: BaseModel, node_count: int) -> str:
    """Return what stands against launching the option, "" for nothing."""
    if state.regions is not None and not is_allowed(state.regions, state.pool.region_id):
        regions, region = ", ".join(state.regions), state.pool.region_id
        return f"Your organization is limited to {regions}. This pool is in {region}."
    if not estimate.fits:
        return estimate.reason or "Does not fit."
    if not base_model.is_installed:
        return f"{base_model.display_name} is not installed on this platform: it can be quoted, not trained."
    if state.price is None:
        return "No price is set for this pool."
    if not state.live_workers and not state.starts_workers:
        return "No worker is online."
    gpus = estimate.gpu_count // node_count
    joining = sum(each >= gpus for each in state.joining_gpus)
    if node_count > 1 and joining < node_count:
        machines = f"The job needs {node_count} machines that can reach each other."
        if gpus > 1:
            machines = f"The job needs {node_count} machines with {gpus} GPUs that can reach each other."
        return f"{machines} This pool has {joining} now."
    if gpus > state.gpus_per_worker:
        return f"A worker of this pool has {state.gpus_per_worker} GPU{'s' if state.gpus_per_worker > 1 else ''}."
    if estimate.cost_nano_p90 is None:
        return f"No time estimate yet: {estimate.speed_source.text}"
    return ""
