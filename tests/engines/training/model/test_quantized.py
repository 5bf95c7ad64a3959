"""What a 4-bit base holds in how many bits, once it is ready to be trained."""

import msgspec
import pytest
import torch
from bitsandbytes.nn import Params4bit
from transformers import AutoConfig, AutoModelForCausalLM

from apps.contracts.runs import Hyperparameters, Method
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
def ready(config, tmp_path, monkeypatch):
    """A base as a GPU would train it, in bfloat16 and 4 bits."""
    recipe = Hyperparameters(method=Method.QLORA)
    engine = msgspec.structs.replace(choose_engine(detect(), recipe), is_gpu=True, dtype="bfloat16")
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.bfloat16).save_pretrained(tmp_path)
    base = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=loading.quantization_config(torch.bfloat16), dtype=torch.bfloat16
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return loading._prepare_quantized(base, recipe, engine)


def test_norms_alone_are_float32_and_nothing_is_trained(ready):
    kinds = dict(ready.named_parameters())

    assert not any(parameter.requires_grad for parameter in kinds.values())
    assert {parameter.dtype for name, parameter in kinds.items() if "norm" in name} == {torch.float32}
    whole = [each for name, each in kinds.items() if "norm" not in name and not isinstance(each, Params4bit)]
    assert {parameter.dtype for parameter in whole} == {torch.bfloat16}
    assert all(parameter.numel() for parameter in kinds.values())


def test_an_estimate_counts_the_weights_as_they_are_held(config, ready):
    held = sum(parameter.numel() * parameter.element_size() for parameter in ready.parameters())
    norms = sum(parameter.numel() for parameter in ready.parameters() if parameter.dtype is torch.float32)
    linear = sum(parameter.numel() for parameter in ready.parameters() if isinstance(parameter, Params4bit)) * 2

    estimated = weight_bytes(architecture=from_config(config), plan=TrainingPlan(method="qlora", max_length=1))

    constants = linear / 64 + linear * 4 / (64 * 256)  # beside the parameters, in their quantisation state
    assert estimated == pytest.approx(held - 2 * norms + constants, rel=1e-3)
