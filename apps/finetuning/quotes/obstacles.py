"""Why an option of a quote cannot be launched now."""

import msgspec

from apps.catalog.models import BaseModel
from apps.estimates.quote import Estimate
from apps.finetuning.quotes.pool_facts import PoolState


def block_reason(state: PoolState, estimate: Estimate, base_model: BaseModel, node_count: int) -> str:
    """Return what stands against launching the option, "" for nothing."""
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
        machines = f"The job needs {node_count} machines that reach each other."
        if gpus > 1:
            machines = f"The job needs {node_count} machines with {gpus} GPUs that reach each other."
        return f"{machines} This pool has {joining} now."
    if gpus > state.gpus_per_worker:
        return f"A worker of this pool has {state.gpus_per_worker} GPU{'s' if state.gpus_per_worker > 1 else ''}."
    if estimate.cost_nano_p90 is None:
        return f"No time estimate yet: {estimate.speed_source.text}"
    return ""


def on_machines(estimate: Estimate, node_count: int) -> Estimate:
    """Refuse what does not run on several machines: each GPU must hold the whole model."""
    if node_count == 1 or not estimate.fits or estimate.parallelism == "ddp":
        return estimate
    reason = "Training on several machines needs the whole model on each GPU, and it does not fit there."
    return msgspec.structs.replace(estimate, fits=False, reason=reason)
