"""LoRA layers without their elementwise overhead on a CPU.

PEFT computes `base(x) + lora_B(lora_A(dropout(x.float()))) * scaling`. On a CPU the casts, the scaling and the sums
cost as much as the products. Here the same terms are products that include the sum (`addmm`), in the dtype of the base
as under autocast; the adapter and its gradients stay in float32.
"""

import types
from typing import Any

import torch
from peft.tuners.lora import LoraLayer

from gpu_workers.train.model.loading import Linear4bit


def speed_up_lora(model: torch.nn.Module) -> int:
    """Replace the forward of every plain LoRA layer on a dense or NF4 matrix; return the number of layers."""
    layers = [module for module in model.modules() if isinstance(module, LoraLayer) and _is_plain(module)]
    for layer in layers:
        layer.forward = types.MethodType(_forward, layer)
    return len(layers)


def _is_plain(layer: LoraLayer) -> bool:
    base = layer.get_base_layer()
    has_one_adapter = list(layer.active_adapters) == list(layer.lora_A)
    is_known = type(base) in (torch.nn.Linear, Linear4bit) and base.bias is None
    return is_known and has_one_adapter and not any(layer.use_dora.values())


def _forward(layer: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    name = layer.active_adapters[0]
    base = layer.get_base_layer()
    down, up, scale = layer.lora_A[name].weight, layer.lora_B[name].weight, layer.scaling[name]
    flat = x.reshape(-1, x.shape[-1])
    dropped = layer.lora_dropout[name](flat)
    if dropped is flat and type(base) is torch.nn.Linear:
        output = _Product.apply(flat, base.weight, down, up, scale)
    else:
        low = dropped @ down.to(flat.dtype).T
        output = torch.addmm(base(flat), low, up.to(flat.dtype).T, alpha=scale)
    return output.view(*x.shape[:-1], -1)


class _Product(torch.autograd.Function):
    """Computes x W' + scale · x A' B' for a frozen W."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, down: torch.Tensor, up: torch.Tensor, scale: float
    ) -> torch.Tensor:
        down, up = down.to(x.dtype), up.to(x.dtype)
        low = x @ down.T
        ctx.save_for_backward(x, weight, down, up, low)
        ctx.scale = scale
        return torch.addmm(x @ weight.T, low, up.T, alpha=scale)

    @staticmethod
    def backward(
        ctx: Any, gradient: torch.Tensor
    ) -> tuple[torch.Tensor | None, None, torch.Tensor, torch.Tensor, None]:
        x, weight, down, up, low = ctx.saved_tensors
        low_gradient = (gradient @ up).mul_(ctx.scale)
        x_gradient = torch.addmm(gradient @ weight, low_gradient, down) if ctx.needs_input_grad[0] else None
        down_gradient = (low_gradient.T @ x).float()
        up_gradient = (gradient.T @ low).float().mul_(ctx.scale)
        return x_gradient, None, down_gradient, up_gradient, None
