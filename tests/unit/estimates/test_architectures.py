"""Reading config.json of each family, and exact counts."""

import msgspec
import pytest

from apps.estimates.models.architectures import (
    ArchitectureError,
    from_catalog_row,
    from_config,
    lora_parameter_count,
    parameter_count,
)

SMALL = {"num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 320}
GROUPED = SMALL | {"intermediate_size": 160, "num_key_value_heads": 2}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 40}
# Totals counted by transformers 5.19 on models of these configurations (AutoModelForCausalLM on the meta device).
FAMILY_TOTALS = [
    ("llama", GROUPED, 170_432),
    (
        "llama",
        SMALL | {"intermediate_size": 160, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
        164_160,
    ),
    ("mistral", GROUPED, 170_432),
    ("mixtral", GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2}, 447_680),
    ("granite", GROUPED, 170_432),
    ("smollm3", GROUPED, 149_952),
    ("qwen2", GROUPED, 170_816),
    (
        "qwen2_moe",
        GROUPED | EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 80, "mlp_only_layers": [1]},
        202_176,
    ),
    ("qwen3", GROUPED | {"head_dim": 32}, 207_488),
    ("qwen3_moe", GROUPED | EXPERTS | {"head_dim": 32, "num_experts": 4}, 208_256),
    ("gemma", GROUPED | {"head_dim": 32}, 186_816),
    ("gemma2", GROUPED | {"head_dim": 32}, 187_200),
    ("gemma3_text", GROUPED | {"head_dim": 32}, 187_392),
    ("phi3", GROUPED, 170_432),
    ("phi", SMALL | {"intermediate_size": 160}, 153_824),
    ("gpt_neox", SMALL | {"intermediate_size": 160}, 153_888),
    ("falcon", SMALL, 150_016),
    ("falcon", SMALL | {"new_decoder_architecture": True, "num_kv_heads": 2}, 156_544),
    ("falcon", SMALL | {"multi_query": False, "parallel_attn": False, "bias": True}, 170_560),
    ("gpt2", {"n_layer": 3, "n_embd": 64, "n_head": 4, "vocab_size": 320, "n_positions": 128}, 178_752),
    ("mpt", {"n_layers": 3, "d_model": 64, "n_heads": 4, "vocab_size": 320}, 168_384),
    ("starcoder2", GROUPED, 120_928),
    ("stablelm", GROUPED | {"use_parallel_residual": True, "use_qkv_bias": True}, 170_880),
    ("cohere", GROUPED, 149_760),
    ("olmo2", GROUPED, 170_720),
    ("gpt_oss", GROUPED | {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2}, 452_888),
]


@pytest.mark.parametrize(("model_type", "config", "total"), FAMILY_TOTALS)
def test_every_family_has_exactly_the_parameters_transformers_creates(model_type, config, total):
    assert parameter_count(from_config({"model_type": model_type, **config})) == total


def test_every_catalog_row_has_exactly_its_published_total(catalog_rows):
    wrong = {row["name"] for row in catalog_rows if parameter_count(from_catalog_row(row)) != row["params_computed"]}

    assert wrong == set()


def test_a_nested_text_config_is_read_with_its_family_defaults():
    text = {"model_type": "gemma3_text", "num_hidden_layers": 34, "hidden_size": 2560, "intermediate_size": 10240}

    architecture = from_config({"model_type": "gemma3", "text_config": text, "vision_config": {"hidden_size": 1152}})

    assert (architecture.n_heads, architecture.n_kv_heads, architecture.head_dim) == (8, 4, 256)
    assert architecture.tie_word_embeddings


@pytest.mark.parametrize("field", ["num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size"])
def test_a_missing_field_is_named(field):
    config = {"model_type": "llama", **GROUPED}
    del config[field]

    with pytest.raises(ArchitectureError, match=field) as error:
        from_config(config)

    assert error.value.field == field


@pytest.mark.parametrize("model_type", ["bert", "t5", None])
def test_other_kinds_of_model_are_refused_by_name(model_type):
    with pytest.raises(ArchitectureError, match="not supported") as error:
        from_config({"model_type": model_type, **GROUPED})

    assert error.value.field == "model_type"


def test_a_field_of_the_wrong_type_is_refused():
    with pytest.raises(ArchitectureError, match="positive integer"):
        from_config({"model_type": "llama", **GROUPED, "hidden_size": "64"})


def test_lora_totals_match_what_peft_counts(models):
    # "num_trainable_params" of the PEFT method comparison: Llama-3.2-3B, rank 32, q_proj and v_proj (LoRA).
    trained = lora_parameter_count(models["Llama-3.2-3B"], rank=32, target_modules=("q_proj", "v_proj"))

    assert trained == 9_175_040


def test_all_linear_means_every_named_module(models):
    names = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

    totals = {
        lora_parameter_count(models["Qwen3-8B"], rank=16, target_modules=targets)
        for targets in (names, ("all-linear",))
    }

    assert len(totals) == 1


def test_an_unknown_target_module_is_refused_with_the_names_there_are(models):
    with pytest.raises(ArchitectureError, match="qkv_proj") as error:
        lora_parameter_count(models["Phi-3-mini-4k-instruct"], rank=8, target_modules=("q_proj",))

    assert error.value.field == "target_modules"


def test_an_architecture_survives_json(models):
    architecture = models["gpt-oss-20b"]

    assert msgspec.convert(msgspec.to_builtins(architecture), type(architecture)) == architecture


@pytest.mark.parametrize(("field", "value"), [
    ("num_hidden_layers", 10_001), ("hidden_size", 2**31), ("vocab_size", 10**400), ("n_positions", 2**31),
])  # fmt: skip
def test_a_dimension_beyond_any_model_is_refused_by_its_name(field, value):
    config = {"model_type": "gpt2", **SMALL, "intermediate_size": 160}

    with pytest.raises(ArchitectureError, match=f"{field} must be at most") as error:
        from_config(config | {field: value})

    assert error.value.field == field
