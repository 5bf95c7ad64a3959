"""Base models of a given shape with made-up weights, built on the device one layer at a time, without hub or disk.

Speed and memory depend on shapes alone, so a measurement of such a model holds for the real one.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from transformers.integrations.bitsandbytes import replace_with_bnb_linear

from apps.contracts.hyperparameters import Method
from gpu_workers.train.model.hardware import Engine
from gpu_workers.train.model.loading import Linear4bit, attention_implementation, quantization_config

_UNCONVERTED = ["lm_head"]  # transformers leaves it in 16 bit too


def write_folder(folder: Path, config: Mapping[str, object]) -> Path:
    """Write the trainer's input beside the weights, config.json and a tokenizer of two tokens; return the folder."""
    tokenizer = Tokenizer(WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>"))  # noqa: S106 - not a password
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")  # noqa: S106
    fast.save_pretrained(folder)
    AutoConfig.for_model(**config).save_pretrained(folder)
    return folder


def build_base(folder: Path, *, method: Method, engine: Engine) -> PreTrainedModel:
    """Return the model of the folder's config.json as the trainer would load it, in NF4 for QLoRA."""
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    dtype = engine.torch_dtype
    options = {"dtype": dtype, "attn_implementation": attention_implementation(engine), "trust_remote_code": False}
    if method is not Method.QLORA:
        with device:
            return AutoModelForCausalLM.from_config(config, **options)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, **options)
    model = replace_with_bnb_linear(model, _UNCONVERTED, quantization_config(dtype))
    for module in model.modules():
        _fill(model, module, device, dtype)
    model.tie_weights()
    model.is_loaded_in_4bit = True  # PEFT and TRL read it on a model that was loaded in NF4
    return model.eval()


def _fill(model: PreTrainedModel, module: torch.nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Give one module its own parameters and buffers on the device. At most one layer at a time is there in 16 bits."""
    if isinstance(module, Linear4bit):
        made_up = torch.randn(module.weight.shape, device=device, dtype=dtype) * model.config.initializer_range
        old = module.weight
        module.weight = type(old)(
            made_up,
            requires_grad=False,
            blocksize=old.blocksize,
            compress_statistics=old.compress_statistics,
            quant_type=old.quant_type,
            quant_storage=old.quant_storage,
            module=module,
        ).to(device)
        if module.bias is not None:
            module.bias = torch.nn.Parameter(torch.zeros_like(module.bias, device=device), requires_grad=False)
        return
    module.to_empty(device=device, recurse=False)
    model._init_weights(module)
