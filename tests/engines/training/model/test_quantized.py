"""What a 4-bit base holds in how many bits, once it is ready to be trained."""

import msgspec
import pytest
import torch
from bitsandbytes.nn import Params4bit
from transformers import AutoConfig, AutoModelForCausalLM

from apps.contracts.hyperparameters import Hyperparameters, Method
from apps.estimates.models.architectures import from_config
from apps.estimates.physics.memory import weight_bytes
from apps.estimates.physics.plans import TrainingPlan
from gpu_workers.train.model import loading
from gpu_workers.train.model.hardware import choose_engine, detect

DENSE = {
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 512,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512, "tie_word_embeddings": False,
}  # fmt: skip
MIXTURE = DENSE | {
    "model_type": "qwen3_moe", "head_dim": 64, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128,
}  # fmt: skip


@pytest.fixture(params=[DENSE, MIXTURE], ids=["dense", "mixture"])
def config(request):
    return request.param


@pytest.fixture
def ready(config, tmp_path):
    """Returns a base as a GPU would train it, in 4 bits and this compute type."""

    def load(dtype: str = "bfloat16"):
        recipe = Hyperparameters(method=Method.QLORA)
        engine = msgspec.structs.replace(choose_engine(detect(), recipe), is_gpu=True, dtype=dtype)
        kind = engine.torch_dtype
        AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=kind).save_pretrained(tmp_path)
        base = AutoModelForCausalLM.from_pretrained(
            tmp_path, quantization_config=loading.quantization_config(kind), dtype=kind
        )
        attention = tuple(f"{name}_proj" for name in "qkvo")
        loading.adapt(base, msgspec.structs.replace(recipe, target_modules=attention), engine)
        return base

    return load


@pytest.mark.parametrize(("dtype", "of_norms"), [("bfloat16", torch.bfloat16), ("float16", torch.float32)])
def test_norms_alone_are_float32_where_float16_is_too_short_and_the_base_is_not_trained(ready, dtype, of_norms):
    kinds = {name: each for name, each in ready(dtype).named_parameters() if "lora_" not in name}

    assert not any(parameter.requires_grad for parameter in kinds.values())
    assert {parameter.dtype for name, parameter in kinds.items() if "norm" in name} == {of_norms}
    whole = [each for name, each in kinds.items() if "norm" not in name and not isinstance(each, Params4bit)]
    assert {parameter.dtype for parameter in whole} == {getattr(torch, dtype)}


def test_an_estimate_counts_the_weights_as_they_are_held(config, ready):
    parameters = [each for name, each in ready().named_parameters() if "lora_" not in name]
    held = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
    linear = sum(parameter.numel() for parameter in parameters if isinstance(parameter, Params4bit)) * 2

    estimated = weight_bytes(architecture=from_config(config), plan=TrainingPlan(method="qlora", max_length=1))

    constants = linear / 64 + linear * 4 / (64 * 256)  # beside the parameters, in their quantisation state
    assert estimated == pytest.approx(held + constants, rel=1e-3)
