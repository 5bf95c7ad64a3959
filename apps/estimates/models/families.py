"""Names and defaults of each family of decoder models that its config.json omits.

`FAMILIES` holds the defaults of each family's transformers configuration class and the layers its modelling code
creates. The resulting counts are checked against transformers' own models (tests/engines/estimates).
"""

from collections.abc import Mapping

import msgspec

from apps.estimates.errors import EstimateError


class ArchitectureError(EstimateError):
    """The configuration cannot be read as a decoder model. `field` names the missing or wrong field."""


class ModuleNames(msgspec.Struct, frozen=True):
    """Module names of a family, as PEFT's `target_modules` must spell them."""

    output: str
    up: str
    down: str
    gate: str = ""  # empty: not gated, or fused into `up`
    fused_qkv: str = ""
    fused_gate_up: bool = False


Traits = Mapping[str, int | str]  # fields of an Architecture that the family implies
# Far beyond any model. A trainer or the publisher of a model may write what is computed for hours, or is too large.
_MOST_LAYERS, _LARGEST = 10_000, 2**31 - 1

LLAMA_NAMES = ModuleNames(output="o_proj", gate="gate_proj", up="up_proj", down="down_proj")
_PHI3_NAMES = ModuleNames(
    output="o_proj", up="gate_up_proj", down="down_proj", fused_qkv="qkv_proj", fused_gate_up=True
)
_NEOX_NAMES = ModuleNames(output="dense", up="dense_h_to_4h", down="dense_4h_to_h", fused_qkv="query_key_value")
NAMES = {
    "phi3": _PHI3_NAMES,
    "gpt_neox": _NEOX_NAMES,
    "falcon": _NEOX_NAMES,
    "phi": ModuleNames(output="dense", up="fc1", down="fc2"),
    "starcoder2": ModuleNames(output="o_proj", up="c_fc", down="c_proj"),
    "gpt2": ModuleNames(output="attn.c_proj", up="c_fc", down="mlp.c_proj", fused_qkv="c_attn"),
    "mpt": ModuleNames(output="out_proj", up="up_proj", down="down_proj", fused_qkv="Wqkv"),
    "qwen": ModuleNames(output="attn.c_proj", gate="w2", up="w1", down="mlp.c_proj", fused_qkv="c_attn"),
    "mixtral": ModuleNames(output="o_proj", gate="w1", up="w3", down="w2"),
    "glm4": ModuleNames(output="o_proj", up="gate_up_proj", down="down_proj", fused_gate_up=True),
    # Only in published rows: no job trains these (not in FAMILIES).
    "opt": ModuleNames(output="out_proj", up="fc1", down="fc2"),
    "gptj": ModuleNames(output="out_proj", up="fc_in", down="fc_out"),
    "gpt_neo": ModuleNames(output="out_proj", up="c_fc", down="c_proj"),
    "bloom": _NEOX_NAMES,
    "chatglm": _NEOX_NAMES,
    "gpt_bigcode": ModuleNames(output="attn.c_proj", up="c_fc", down="mlp.c_proj", fused_qkv="c_attn"),
}

FAMILIES: dict[str, Traits] = {
    "llama": {},
    "mistral": {},
    "mixtral": {},
    "ministral3": {"head_dim": 128},
    "granite": {},
    "granitemoe": {},
    "smollm3": {"tie_word_embeddings": True},
    "qwen": {"qkv_bias": True},
    "qwen2": {"qkv_bias": True},
    "qwen2_moe": {"qkv_bias": True},
    "qwen3": {"qk_norm": "head", "head_dim": 128},
    "qwen3_moe": {"qk_norm": "head", "head_dim": 128},
    "gemma": {"keeps_norm_type": True, "tie_word_embeddings": True, "head_dim": 256},
    "gemma2": {
        "keeps_norm_type": True,
        "tie_word_embeddings": True,
        "head_dim": 256,
        "norms_per_layer": 4,
        "has_score_cap": True,
    },
    "gemma3_text": {
        "keeps_norm_type": True,
        "tie_word_embeddings": True,
        "head_dim": 256,
        "norms_per_layer": 4,
        "qk_norm": "head",
        "n_heads": 8,
        "n_kv_heads": 4,
        "vocab_size": 262208,
    },
    "phi3": {},
    "phi": {"all_biases": True, "norm_bias": True, "norms_per_layer": 1, "mlp_gated": False, "lm_head_bias": True},
    "gpt_neox": {"all_biases": True, "norm_bias": True, "mlp_gated": False},
    "falcon": {"norm_bias": True, "mlp_gated": False, "tie_word_embeddings": True},
    "gpt2": {"all_biases": True, "norm_bias": True, "mlp_gated": False, "tie_word_embeddings": True},
    "mpt": {"mlp_gated": False, "tie_word_embeddings": True},
    "starcoder2": {"all_biases": True, "norm_bias": True, "mlp_gated": False, "tie_word_embeddings": True},
    "stablelm": {"norm_bias": True},
    "cohere": {"keeps_norm_type": True, "norms_per_layer": 1, "tie_word_embeddings": True},
    "cohere2": {"keeps_norm_type": True, "norms_per_layer": 1, "tie_word_embeddings": True},
    "glm4": {"norms_per_layer": 4, "head_dim": 128, "qkv_bias": True, "output_bias": False},
    "olmo2": {"keeps_norm_type": True, "qk_norm": "full"},
    "olmo3": {"keeps_norm_type": True, "qk_norm": "full"},
    "gpt_oss": {
        "keeps_norm_type": True,
        "qkv_bias": True,
        "output_bias": True,
        "mlp_bias": True,
        "attention_sinks": True,
        "head_dim": 64,
    },
}
_ALIASES = {"gemma3": "gemma3_text", "mistral3": "mistral", "ministral": "mistral", "RefinedWebModel": "falcon"}

# Families of which one in so many layers, or none, attends to all earlier tokens if config.json names a window alone.
_WINDOW_PATTERNS = {"gemma2": 2, "gemma3_text": 6, "cohere2": 4, "olmo3": 4, "gpt_oss": 2}
_ALL_WINDOWED = {"mistral", "mixtral", "phi3", "starcoder2"}

# Names of one quantity in different families' config.json.
_KEYS = {
    "n_layers": ("num_hidden_layers", "n_layer", "n_layers"),
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "intermediate_size": ("intermediate_size", "ffn_hidden_size", "n_inner"),
    "n_heads": ("num_attention_heads", "n_head", "n_heads"),
    "n_kv_heads": ("num_key_value_heads", "num_kv_heads"),
    "head_dim": ("head_dim",),
    "vocab_size": ("vocab_size",),
    "n_experts": ("num_local_experts", "num_experts"),
    "experts_per_token": ("num_experts_per_tok",),
    "moe_intermediate_size": ("moe_intermediate_size",),
    "max_position_embeddings": ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"),
}


def read_config(config: Mapping[str, object]) -> dict[str, object]:
    """Return the fields of an Architecture. Raises ArchitectureError naming the missing or unsupported field."""
    text = _text_config(config)
    family = str(text.get("model_type") or "")
    family = _ALIASES.get(family, family)
    if family not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise ArchitectureError("model_type", f"model_type {family or 'missing'!r} is not supported; known: {known}")
    traits = FAMILIES[family]
    n_heads = _required(text, traits, "n_heads")
    hidden_size = _required(text, traits, "hidden_size")
    return dict(
        model_type=family,
        n_layers=_required(text, traits, "n_layers"),
        hidden_size=hidden_size,
        intermediate_size=_intermediate_size(text, traits, family, hidden_size),
        n_heads=n_heads,
        n_kv_heads=_n_kv_heads(text, traits, family, n_heads),
        head_dim=_optional(text, traits, "head_dim") or _divided(hidden_size, n_heads),
        vocab_size=_required(text, traits, "vocab_size"),
        max_position_embeddings=_optional(text, traits, "max_position_embeddings"),
        **_experts(text, traits),
        **_windows(text, traits, family),
        **_family_traits(text, traits, family),
    )


def _text_config(config: Mapping[str, object]) -> Mapping[str, object]:
    nested = config.get("text_config")
    if not isinstance(nested, Mapping):
        return config
    inherited = {key: config[key] for key in ("tie_word_embeddings", "vocab_size") if key in config}
    return {**inherited, "model_type": config.get("model_type"), **nested}


def _optional(text: Mapping[str, object], traits: Traits, name: str) -> int | None:
    for key in _KEYS[name]:
        value = text.get(key)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ArchitectureError(key, f"{key} must be a positive integer, not {value!r}")
        most = _MOST_LAYERS if name == "n_layers" else _LARGEST
        if value > most:
            raise ArchitectureError(key, f"{key} must be at most {most:,}")
        return value
    default = traits.get(name)
    return default if default is None else int(default)


def _count(text: Mapping[str, object], key: str, default: int) -> int:
    """Return a number that may be zero; the default if it is missing or zero."""
    value = text.get(key) or default
    if not isinstance(value, int) or value < 0:
        raise ArchitectureError(key, f"{key} must be a whole number, not {value!r}")
    if value > _LARGEST:
        raise ArchitectureError(key, f"{key} must be at most {_LARGEST:,}")
    return value


def _required(text: Mapping[str, object], traits: Traits, name: str) -> int:
    value = _optional(text, traits, name)
    if value is None:
        field = _KEYS[name][0]
        raise ArchitectureError(field, f"it has no {field}")
    return value


def _divided(hidden_size: int, n_heads: int) -> int:
    if hidden_size % n_heads:
        raise ArchitectureError("head_dim", f"hidden_size {hidden_size} is not a multiple of {n_heads} heads")
    return hidden_size // n_heads


def _intermediate_size(text: Mapping[str, object], traits: Traits, family: str, hidden_size: int) -> int:
    size = _optional(text, traits, "intermediate_size")
    if family == "qwen" and size is not None:
        return size // 2  # the first Qwen counts gate and up together
    if size is None and family in {"gpt2", "falcon", "mpt"}:
        return 4 * hidden_size  # transformers' MPT does not read expansion_ratio either
    return size if size is not None else _required(text, traits, "intermediate_size")


def _n_kv_heads(text: Mapping[str, object], traits: Traits, family: str, n_heads: int) -> int:
    if family == "falcon" and not text.get("new_decoder_architecture"):
        return 1 if text.get("multi_query", True) else n_heads
    shared = _optional(text, traits, "n_kv_heads") or n_heads
    if n_heads % shared:
        field = next((key for key in _KEYS["n_kv_heads"] if text.get(key)), "num_attention_heads")
        raise ArchitectureError(field, f"{n_heads} attention heads cannot share {shared} key and value heads evenly")
    return shared


def _experts(text: Mapping[str, object], traits: Traits) -> dict[str, object]:
    n_experts = _optional(text, traits, "n_experts")
    if n_experts is None:
        return {}
    per_token = _required(text, traits, "experts_per_token")
    if per_token > n_experts:
        field = _KEYS["experts_per_token"][0]
        raise ArchitectureError(field, f"{per_token} experts a token are more than the {n_experts} there are")
    size = _optional(text, traits, "moe_intermediate_size") or _required(text, traits, "intermediate_size")
    step, plain = _count(text, "decoder_sparse_step", 1), text.get("mlp_only_layers") or []
    if not isinstance(plain, list):
        raise ArchitectureError("mlp_only_layers", f"mlp_only_layers must be a list of layers, not {plain!r}")
    layers, named = range(_required(text, traits, "n_layers")), {one for one in plain if isinstance(one, int)}
    return {
        "n_experts": n_experts,
        "experts_per_token": per_token,
        "moe_intermediate_size": size,
        "n_dense_layers": sum(1 for layer in layers if layer in named or (layer + 1) % step),
        "shared_expert_intermediate_size": _count(text, "shared_expert_intermediate_size", 0),
    }


def _windows(text: Mapping[str, object], traits: Traits, family: str) -> dict[str, object]:
    """Return the window of attention and how many layers have it."""
    window, layers = _count(text, "sliding_window", 0), _required(text, traits, "n_layers")
    if not window:
        return {}
    kinds = text.get("layer_types")
    if isinstance(kinds, list):
        windowed = min(kinds.count("sliding_attention"), layers)
    elif pattern := _count(text, "sliding_window_pattern", _WINDOW_PATTERNS.get(family, 0)):
        windowed = layers - layers // pattern  # the last of each so many layers is without
    elif text.get("use_sliding_window"):
        windowed = max(layers - _count(text, "max_window_layers", 0), 0)
    else:
        windowed = layers if family in _ALL_WINDOWED else 0
    return {"sliding_window": window, "windowed_layers": windowed} if windowed else {}


def _family_traits(text: Mapping[str, object], traits: Traits, family: str) -> dict[str, object]:
    direct = (
        "qk_norm", "mlp_gated", "norm_bias", "norms_per_layer", "keeps_norm_type", "lm_head_bias", "attention_sinks"
    )  # fmt: skip
    values: dict[str, object] = {key: traits[key] for key in direct if key in traits}
    values["tie_word_embeddings"] = bool(text.get("tie_word_embeddings", traits.get("tie_word_embeddings", False)))
    biased = bool(text.get("use_bias", True)) if traits.get("all_biases") else False
    attention_bias = bool(text.get("attention_bias", text.get("use_qkv_bias", False)))
    values["qkv_bias"] = biased or traits.get("qkv_bias", attention_bias)
    values["output_bias"] = biased or traits.get("output_bias", bool(text.get("attention_bias", False)))
    values["mlp_bias"] = biased or traits.get("mlp_bias", bool(text.get("mlp_bias", False)))
    values["has_score_cap"] = bool(text.get("attn_logit_softcapping", traits.get("has_score_cap", False)))
    values["learned_positions"] = _count(text, "n_positions", 1024) if family == "gpt2" else 0
    return values | _exceptions(text, family)


def _exceptions(text: Mapping[str, object], family: str) -> dict[str, object]:
    """Return the fields of families whose layers depend on more than their name."""
    match family:
        case "falcon":
            bias, parallel = bool(text.get("bias", False)), bool(text.get("parallel_attn", True))
            one_norm = parallel and not text.get("new_decoder_architecture")
            norms = _count(text, "num_ln_in_parallel_attn", 1 if one_norm else 2)
            return {"qkv_bias": bias, "output_bias": bias, "mlp_bias": bias, "norms_per_layer": norms}
        case "mpt":
            bias, positions = not text.get("no_bias", True), _count(text, "learned_positions", 0)
            every = dict.fromkeys(("qkv_bias", "output_bias", "mlp_bias", "norm_bias"), bias)
            return {**every, "learned_positions": positions}
        case "stablelm" if text.get("use_parallel_residual"):
            return {"norms_per_layer": 1}
        case "cohere" if text.get("use_qk_norm"):
            raise ArchitectureError("use_qk_norm", "Cohere models with query/key norms are not supported yet")
        case "gpt_neox":
            return {
                "qkv_bias": bool(text.get("attention_bias", True)),
                "output_bias": bool(text.get("attention_bias", True)),
            }
        case _:
            return {}
