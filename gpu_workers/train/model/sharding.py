"""A model that lies in shards on several processes (FSDP), and its weights gathered to be written as one.

The base alone is sharded: an adapter stays whole on every process, small as it is, and its gradients are averaged
here. With full training every weight is a shard. Offloaded, the shards rest in the host's memory, visit the GPU layer
by layer, and are stepped by the CPU; a single process does this too.
"""

from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

_GATHERED = StateDictOptions(full_state_dict=True, cpu_offload=True)
_SCATTERED = StateDictOptions(full_state_dict=True, strict=False)


def shard_model(
    model: torch.nn.Module, base: PreTrainedModel, *, is_offloaded: bool = False, gathers_bf16: bool = False
) -> torch.nn.Module:
    """Shard `base` inside `model` layer by layer, so that no process ever holds two whole layers; return `model`.

    What belongs to an adapter stays whole, on this process's device. `gathers_bf16`: weights kept in float32 travel
    and compute in bfloat16, and their gradients are summed in float32.
    """
    adapter = set() if model is base else {parameter for parameter in model.parameters() if parameter.requires_grad}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for parameter in adapter:  # what FSDP ignores it does not move either
        parameter.data = parameter.data.to(device)
    options: dict[str, Any] = {
        "mesh": init_device_mesh(device, (torch.distributed.get_world_size(),)),
        "ignored_params": adapter,
        "offload_policy": CPUOffloadPolicy(pin_memory=device == "cuda") if is_offloaded else OffloadPolicy(),
    }
    if gathers_bf16:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in base.get_decoder().layers:
        fully_shard(layer, **options)
    fully_shard(base, **options)
    # By this mark transformers' trainer knows a model that takes care of placement and gradients itself.
    base._is_distributed_loading_by_transformers = True
    return model


def average_gradients(model: torch.nn.Module, accelerator: Accelerator) -> None:
    """Keep what is trained whole on every process the same on all: one start, and the mean of the gradients.

    transformers' own does it by an operation that only NCCL has.
    """

    def average(parameter: torch.Tensor) -> None:
        if accelerator.sync_gradients and parameter.grad is not None:
            torch.distributed.all_reduce(parameter.grad)
            parameter.grad /= torch.distributed.get_world_size()

    for parameter in model.parameters():
        if parameter.requires_grad and not isinstance(parameter, DTensor):
            torch.distributed.broadcast(parameter.data, src=0)
            parameter.register_post_accumulate_grad_hook(average)


def is_sharded(model: torch.nn.Module) -> bool:
    """Whether what is trained lies in shards."""
    return any(isinstance(p, DTensor) for p in model.parameters() if p.requires_grad)


def gather_trained(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return what is trained, whole, on the first process; every process must call this."""
    return get_model_state_dict(model, options=_GATHERED)


def gather_optimizer(model: torch.nn.Module, optimizer: Any) -> dict[str, Any]:
    return get_optimizer_state_dict(model, _bare(optimizer), options=_GATHERED)


def scatter_model(model: torch.nn.Module, file: Path) -> None:
    """Give every process its shard of whole weights."""
    set_model_state_dict(model, load_file(file), options=_SCATTERED)


def scatter_optimizer(model: torch.nn.Module, optimizer: Any, file: Path) -> None:
    state = torch.load(file, map_location="cpu", weights_only=True)
    set_optimizer_state_dict(model, _bare(optimizer), optim_state_dict=state, options=_SCATTERED)


def whole(value: Any) -> Any:
    """Return a number that may lie in shards; every process must call this."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def _bare(optimizer: Any) -> torch.optim.Optimizer:
    """Return the optimizer below accelerate's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)
