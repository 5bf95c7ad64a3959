"""A model in shards on several processes (FSDP), and its weights gathered to be written as one.

Only the base is sharded: an adapter is small and stays whole on every process, and its gradients are averaged here.
With full training every weight is sharded. Offloaded shards stay in the host's memory and move to the GPU layer by
layer. The CPU runs their optimizer step. This also works with a single process.
"""

from pathlib import Path

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
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

_GATHERED = StateDictOptions(full_state_dict=True, cpu_offload=True)
_SCATTERED = StateDictOptions(full_state_dict=True, strict=False)


def shard_model(
    model: torch.nn.Module,
    base: PreTrainedModel,
    *,
    copies: int = 1,
    is_offloaded: bool = False,
    gathers_bf16: bool = False,
) -> torch.nn.Module:
    """Shard `base` inside `model` layer by layer, so that no process ever holds two whole layers; return `model`.

    Each of several `copies` is spread over consecutive processes, which are those of one machine (HSDP). An adapter's
    weights stay whole, on this process's device. `gathers_bf16`: float32 weights are sent and used in
    bfloat16, and their gradients are summed in float32.
    """
    adapter = set() if model is base else {parameter for parameter in model.parameters() if parameter.requires_grad}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for parameter in adapter:  # FSDP does not move the parameters that it ignores
        parameter.data = parameter.data.to(device)
    count = torch.distributed.get_world_size()
    shape, names = ((count,), ("shard",)) if copies == 1 else ((copies, count // copies), ("replicate", "shard"))
    options: dict[str, object] = {
        "mesh": init_device_mesh(device, shape, mesh_dim_names=names),
        "ignored_params": adapter,
        "offload_policy": CPUOffloadPolicy(pin_memory=device == "cuda") if is_offloaded else OffloadPolicy(),
    }
    if gathers_bf16:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in base.get_decoder().layers:
        fully_shard(layer, **options)
    fully_shard(base, **options)
    # With this mark, transformers' trainer leaves placement and gradients to the model.
    base._is_distributed_loading_by_transformers = True
    return model


def average_gradients(model: torch.nn.Module, accelerator: Accelerator) -> None:
    """Keep weights that are whole on every process equal: the same start values, and the mean of the gradients.

    transformers' own way uses an operation that only NCCL has.
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
    """Return whether the trained weights are sharded."""
    return any(isinstance(p, DTensor) for p in model.parameters() if p.requires_grad)


def gather_trained(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the whole trained weights on the first process; every process must call this."""
    return get_model_state_dict(model, options=_GATHERED)


def gather_optimizer(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, object]:
    return get_optimizer_state_dict(model, _bare(optimizer), options=_GATHERED)


def scatter_model(model: torch.nn.Module, file: Path) -> None:
    """Give every process its shard of whole weights."""
    set_model_state_dict(model, load_file(file), options=_SCATTERED)


def broadcast_model(model: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    """Give every process its shard of whole weights that only the first one has; every process must call this."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # the root stays gathered after an evaluation
    options = StateDictOptions(full_state_dict=True, strict=False, broadcast_from_rank0=True)
    set_model_state_dict(model, tensors if torch.distributed.get_rank() == 0 else {}, options=options)


def scatter_optimizer(model: torch.nn.Module, optimizer: torch.optim.Optimizer, file: Path) -> None:
    state = torch.load(file, map_location="cpu", weights_only=True)
    set_optimizer_state_dict(model, _bare(optimizer), optim_state_dict=state, options=_SCATTERED)


def whole(value: torch.Tensor) -> torch.Tensor:
    """Return a tensor gathered from its shards, if it has any; every process must call this."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def _bare(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer below accelerate's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)
