"""Parameter counts are exact: against the models that transformers builds (on the meta device, nothing allocated).

For every model of the catalogue, rebuilt from its dimensions; and for configurations made up at random, by a seed.
"""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from apps.contracts.adapter_files import MODEL_TYPES
from apps.estimates.models.architectures import (
    from_catalog_row,
    from_config,
    linear_layers,
    lora_parameter_count,
    parameter_count,
)

CATALOG = Path(__file__).resolve().parents[3] / "apps" / "catalog" / "data" / "models.json"
ROWS = msgspec.json.decode(CATALOG.read_bytes())["models"]
# Counted with their text model alone: the catalogue's name -> transformers' configuration class.
TEXT_ONLY = {"gemma3": "gemma3_text"}
SEEDS = range(12)
FAMILIES = (
    "llama", "mistral", "mixtral", "granite", "smollm3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gemma", "gemma2",
    "gemma3_text", "phi3", "phi", "gpt_neox", "falcon", "gpt2", "mpt", "starcoder2", "stablelm", "cohere", "olmo2",
    "gpt_oss", "ministral3", "granitemoe", "olmo3", "glm4", "cohere2",
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _no_initial_values() -> Iterator[None]:
    """Weights on the meta device have none, and to draw them took half of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.Linear, "reset_parameters", lambda layer: None)
        yield


def built(config: dict[str, Any]) -> torch.nn.Module:
    kind = config["model_type"]
    made = AutoConfig.for_model(kind, **{key: value for key, value in config.items() if key != "model_type"})
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(made)


def counted(model: torch.nn.Module) -> int:
    """Shared weights once, as `Module.parameters` yields them."""
    return sum(parameter.numel() for parameter in model.parameters())


def catalog_config(row: dict[str, Any]) -> dict[str, Any]:
    """A config.json of the row's dimensions."""
    kind = TEXT_ONLY.get(row["model_type"], row["model_type"])
    config = {
        "model_type": kind, "num_hidden_layers": row["n_layers"], "hidden_size": row["hidden_size"],
        "num_attention_heads": row["n_heads"], "num_key_value_heads": row["n_kv_heads"],
        "head_dim": row["head_dim"], "vocab_size": row["vocab_size_padded"], "pad_token_id": 0,
        "intermediate_size": row.get("intermediate_size") or row.get("moe_intermediate_size"),
        "tie_word_embeddings": row["tie_word_embeddings"],
    }  # fmt: skip
    if row.get("n_experts"):
        config["num_local_experts" if kind in ("mixtral", "gpt_oss") else "num_experts"] = row["n_experts"]
        config["num_experts_per_tok"] = row["experts_per_token"]
        config["moe_intermediate_size"] = row.get("moe_intermediate_size") or config["intermediate_size"]
        if kind in ("mixtral", "gpt_oss"):
            config["intermediate_size"] = config["moe_intermediate_size"]
    return config


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["name"])
def test_every_model_of_the_catalogue_has_the_parameters_transformers_creates(row: dict[str, Any]) -> None:
    assert parameter_count(from_catalog_row(row)) == counted(built(catalog_config(row)))


def invented(kind: str, seed: int) -> dict[str, Any]:
    """A small configuration of this family at random: head counts, sharing, widths, tying, biases, experts, windows."""
    rng = random.Random(f"{kind} {seed}")
    heads, size = rng.choice([2, 4, 8]), rng.choice([8, 16, 32])
    hidden, layers = heads * size, rng.randint(1, 5)
    if kind == "gpt2":
        return {"model_type": kind, "n_layer": layers, "n_embd": hidden, "n_head": heads,
                "vocab_size": rng.randint(50, 700), "n_positions": rng.choice([64, 128])}  # fmt: skip
    if kind == "mpt":
        return {"model_type": kind, "n_layers": layers, "d_model": hidden, "n_heads": heads,
                "vocab_size": rng.randint(50, 700), "expansion_ratio": rng.choice([2, 4])}  # fmt: skip
    config: dict[str, Any] = {
        "model_type": kind, "num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads,
        "intermediate_size": rng.choice([24, 56, 128]), "vocab_size": rng.randint(50, 700), "pad_token_id": 0,
        "tie_word_embeddings": rng.random() < 0.5,
    }  # fmt: skip
    if kind not in ("phi", "gpt_neox", "falcon"):
        config["num_key_value_heads"] = rng.choice([n for n in (1, 2, 4, 8) if heads % n == 0])
    if kind in (
        "qwen3",
        "qwen3_moe",
        "gemma",
        "gemma2",
        "gemma3_text",
        "llama",
        "gpt_oss",
        "mistral",
        "ministral3",
        "glm4",
    ):
        config["head_dim"] = rng.choice([8, 16, 32])
    if kind == "llama":
        config |= {"attention_bias": rng.random() < 0.5, "mlp_bias": rng.random() < 0.5}
    if kind in ("mistral", "gemma2", "gemma3_text", "qwen2", "starcoder2"):
        config["sliding_window"] = rng.choice([16, 4096])
    if kind in ("mixtral", "gpt_oss", "granitemoe"):
        config |= {"num_local_experts": rng.choice([2, 4]), "num_experts_per_tok": 2}
    if kind in ("qwen2_moe", "qwen3_moe"):
        config |= {"num_experts": rng.choice([2, 4]), "num_experts_per_tok": 2, "moe_intermediate_size": 40,
                   "decoder_sparse_step": rng.choice([1, 2]), "mlp_only_layers": rng.choice([[], [0]])}  # fmt: skip
    if kind == "qwen2_moe":
        config["shared_expert_intermediate_size"] = rng.choice([24, 80])
    if kind == "falcon":
        config |= rng.choice([{}, {"new_decoder_architecture": True, "num_kv_heads": 2},
                              {"multi_query": False, "parallel_attn": False, "bias": True}])  # fmt: skip
        config.pop("intermediate_size")
        config["tie_word_embeddings"] = True
    if kind == "stablelm":
        config |= {"use_parallel_residual": rng.random() < 0.5, "use_qkv_bias": rng.random() < 0.5}
    return config


@pytest.mark.slow
@pytest.mark.parametrize("kind", FAMILIES)
def test_configurations_made_up_at_random_have_the_parameters_transformers_creates(kind: str) -> None:
    wrong = {}
    for seed in SEEDS:
        config = invented(kind, seed)
        ours, theirs = parameter_count(from_config(config)), counted(built(config))
        if ours != theirs:
            wrong[seed] = (config, ours, theirs)

    assert wrong == {}


def test_adapters_have_the_parameters_peft_creates() -> None:
    config = invented("llama", 3) | {"num_hidden_layers": 3}
    for use_dora in (False, True):
        with torch.device("meta"):
            model = get_peft_model(built(config), LoraConfig(r=4, target_modules="all-linear", use_dora=use_dora))
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        plain = lora_parameter_count(from_config(config), rank=4, target_modules=("all-linear",))
        outputs = sum(layer.out_features * layer.copies for layer in linear_layers(from_config(config)))
        assert trained == plain + (outputs if use_dora else 0)


@pytest.mark.parametrize("kind", sorted(MODEL_TYPES))
def test_norms_in_float32_return_the_type_that_the_estimate_assumes(kind: str) -> None:
    config = invented(kind, 0)
    decoder = built(config).get_decoder()
    norm = decoder.norm.float()  # as over a base in 4 bits

    returned = norm(torch.empty(1, 2, config["hidden_size"], dtype=torch.bfloat16, device="meta")).dtype

    assert (returned is torch.bfloat16) == from_config(config).keeps_norm_type
