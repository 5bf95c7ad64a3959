"""What workers say with their claims about training together with other machines."""

import msgspec

from apps.finetuning.models import Worker


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker said with its last claim: where others reach it, and what it could train."""

    address: str
    port: int
    free_gpus: int | None = None
    base_models: tuple[str, ...] | None = None

    def has_model(self, base_model: str) -> bool:
        return self.base_models is None or base_model in self.base_models


def read_offer(stored: object) -> Offer:
    """Return the offer that a worker's row holds."""
    return msgspec.convert(stored, Offer)


def could_join(worker: Worker, *, gpus: int, base_model: str) -> bool:
    """Return whether the worker, with nothing else to do, could train `base_model` with others on so many GPUs."""
    if worker.offer is None or worker.gpu_count < gpus:
        return False
    return read_offer(worker.offer).has_model(base_model)
