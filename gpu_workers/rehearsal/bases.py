"""Base models of fake tensors, as the trainer would load them: dense, or in NF4 with bitsandbytes' own layers."""

from pathlib import Path

import torch
from bitsandbytes.functional import QuantState
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.integrations.bitsandbytes import replace_with_bnb_linear

from apps.contracts.hyperparameters import Method
from gpu_workers.train.model.hardware import Engine
from gpu_workers.train.model.loading import Linear4bit, attention_implementation, quantization_config

_NF4_BLOCK, _SCALE_BLOCK = 64, 256  # weights of one scale, and scales of one scale of scales (QLoRA, section 3)


class Params4bit(FakeTensor):
    """A fake 4-bit weight. PEFT recognises bitsandbytes' weights by the name of their class."""

    def detach(self) -> "Params4bit":
        return self._like(super().detach())

    def __deepcopy__(self, memo: dict[int, object]) -> "Params4bit":
        return self._like(torch.nn.Parameter(torch.empty(self.shape, dtype=self.dtype), requires_grad=False))

    def _like(self, other: torch.Tensor) -> "Params4bit":
        other.__class__ = Params4bit
        other.__dict__ |= {name: value for name, value in self.__dict__.items() if name in _ATTRIBUTES}
        return other


_ATTRIBUTES = (
    "quant_state", "blocksize", "compress_statistics", "quant_type", "quant_storage", "bnb_quantized", "module",
)  # fmt: skip


def build_fake_base(folder: Path, *, method: Method, engine: Engine) -> PreTrainedModel:
    """Return the model of the folder's config.json with fake weights. Call it under a fake mode."""
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    options = {"dtype": engine.torch_dtype, "attn_implementation": attention_implementation(engine)}
    with _disable_current_modes(), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False, **options)
        if method is Method.QLORA:
            model = replace_with_bnb_linear(model, ["lm_head"], quantization_config(engine.torch_dtype))
    for module in model.modules():
        if isinstance(module, Linear4bit):
            _quantize(module, engine.torch_dtype)
        else:
            module.to_empty(device="cpu", recurse=False)
    model.tie_weights()
    model.is_loaded_in_4bit = method is Method.QLORA  # PEFT and TRL read it
    return model.eval()


def _quantize(module: Linear4bit, dtype: torch.dtype) -> None:
    """Give the layer the tensors of an NF4 weight with double quantisation."""
    count = module.weight.numel()
    scales = -(-count // _NF4_BLOCK)
    weight = torch.nn.Parameter(torch.empty((count + 1) // 2, 1, dtype=torch.uint8), requires_grad=False)
    outer = QuantState(
        absmax=torch.empty(-(-scales // _SCALE_BLOCK), dtype=torch.float32),
        code=torch.empty(256),
        blocksize=_SCALE_BLOCK,
        dtype=torch.float32,
    )
    weight.quant_state = QuantState(
        absmax=torch.empty(scales, dtype=torch.uint8),
        shape=torch.Size((module.out_features, module.in_features)),
        code=torch.empty(16),
        blocksize=_NF4_BLOCK,
        quant_type="nf4",
        dtype=dtype,
        offset=torch.empty(()),
        state2=outer,
    )
    weight.blocksize, weight.compress_statistics, weight.quant_type = _NF4_BLOCK, True, "nf4"
    weight.quant_storage, weight.bnb_quantized, weight.module = torch.uint8, True, module
    weight.__class__ = Params4bit
    module.weight = weight
    module.quant_state = weight.quant_state
    if module.bias is not None:
        module.bias = torch.nn.Parameter(torch.empty(module.out_features, dtype=dtype), requires_grad=False)
