"""LoRA layers without their elementwise overhead on a CPU.

PEFT computes `base(x) + lora_B(lora_A(dropout(x.float()))) * scaling`. On a CPU the casts, the scaling and the sums
cost as much as the products. Here the same terms are products that include the sum (`addmm`), in the dtype of the base
as under autocast. The adapter and its gradients stay in float32.
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


def _forward(layer: LoraLayer, x_BTI: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
    """Return the layer's output [B, T, O]; PEFT passes arguments of methods that a plain layer does not have."""
    name = layer.active_adapters[0]
    base = layer.get_base_layer()
    down_RI, up_OR, scale = layer.lora_A[name].weight, layer.lora_B[name].weight, layer.scaling[name]
    x_TI = x_BTI.reshape(-1, x_BTI.shape[-1])
    dropped_TI = layer.lora_dropout[name](x_TI)
    if dropped_TI is x_TI and type(base) is torch.nn.Linear:
        output_TO = _Product.apply(x_TI, base.weight, down_RI, up_OR, scale)
    else:
        low_TR = dropped_TI @ down_RI.to(x_TI.dtype).T
        output_TO = torch.addmm(base(x_TI), low_TR, up_OR.to(x_TI.dtype).T, alpha=scale)
    return output_TO.view(*x_BTI.shape[:-1], -1)


class _Product(torch.autograd.Function):
    """Computes x W' + scale · x A' B' for a frozen W."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TI: torch.Tensor,
        weight_OI: torch.Tensor,
        down_RI: torch.Tensor,
        up_OR: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        down_RI, up_OR = down_RI.to(x_TI.dtype), up_OR.to(x_TI.dtype)
        low_TR = x_TI @ down_RI.T
        ctx.save_for_backward(x_TI, weight_OI, down_RI, up_OR, low_TR)
        ctx.scale = scale
        return torch.addmm(x_TI @ weight_OI.T, low_TR, up_OR.T, alpha=scale)

    @staticmethod
    def backward(ctx: Any, grad_TO: torch.Tensor) -> tuple[torch.Tensor | None, None, torch.Tensor, torch.Tensor, None]:
        x_TI, weight_OI, down_RI, up_OR, low_TR = ctx.saved_tensors
        grad_TR = (grad_TO @ up_OR).mul_(ctx.scale)
        grad_TI = torch.addmm(grad_TO @ weight_OI, grad_TR, down_RI) if ctx.needs_input_grad[0] else None
        grad_RI = (grad_TR.T @ x_TI).float()
        grad_OR = (grad_TO.T @ low_TR).float().mul_(ctx.scale)
        return grad_TI, None, grad_RI, grad_OR, None
