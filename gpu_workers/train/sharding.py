"""A model that lies in shards on several processes (FSDP), and its weights gathered to be written as one.

The base is sharded before an adapter is added: the adapter stays whole on every process, small as it is, and the
trainer averages its gradients. With full training every weight is a shard.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

if TYPE_CHECKING:
    from gpu_workers.train.running import RunTrainer

_GATHERED = StateDictOptions(full_state_dict=True, cpu_offload=True)
_SCATTERED = StateDictOptions(full_state_dict=True, strict=False)


def shard_model(base: PreTrainedModel) -> PreTrainedModel:
    """Shard layer by layer, so that no process ever holds two whole layers, and tell the trainer so."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(device, (torch.distributed.get_world_size(),))
    for layer in base.get_decoder().layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(base, mesh=mesh)
    # By this name transformers' trainer knows a model that takes care of placement and gradients itself.
    base.is_distributed_loading_by_transformers = True
    return base


def is_sharded(trainer: "RunTrainer") -> bool:
    """Whether what is trained lies in shards."""
    return any(isinstance(p, DTensor) for p in trainer.model.parameters() if p.requires_grad)


def gather_trained(trainer: "RunTrainer") -> dict[str, torch.Tensor]:
    """Return what is trained, whole, on the first process; every process must call this."""
    return get_model_state_dict(trainer.model, options=_GATHERED)


def gather_optimizer(trainer: "RunTrainer") -> dict[str, Any]:
    return get_optimizer_state_dict(trainer.model, _bare(trainer.optimizer), options=_GATHERED)


def scatter_model(trainer: "RunTrainer", file: Path) -> None:
    """Give every process its shard of whole weights."""
    set_model_state_dict(trainer.model, load_file(file), options=_SCATTERED)


def scatter_optimizer(trainer: "RunTrainer", file: Path) -> None:
    state = torch.load(file, map_location="cpu", weights_only=True)
    set_optimizer_state_dict(trainer.model, _bare(trainer.optimizer), optim_state_dict=state, options=_SCATTERED)


def whole(value: Any) -> Any:
    """Return a number that may lie in shards; every process must call this."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def _bare(optimizer: Any) -> torch.optim.Optimizer:
    """Return the optimizer below accelerate's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)
