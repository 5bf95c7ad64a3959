"""The architecture of a decoder model, and its parameter counts.

`from_config` reads any Hugging Face `config.json` of the usual decoder families. Counts are exact for the text model;
vision towers are neither trained nor counted.
"""

from collections.abc import Mapping, Sequence

import msgspec

from apps.estimates.models.families import LLAMA_NAMES, NAMES, ArchitectureError, ModuleNames, read_config

ALL_LINEAR = "all-linear"  # PEFT's name for "every linear layer except the output head"


class Architecture(msgspec.Struct, frozen=True, kw_only=True):
    """All dimensions that memory and time depend on. `intermediate_size` is that of the dense MLP."""

    model_type: str
    n_layers: int
    hidden_size: int
    intermediate_size: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    vocab_size: int
    tie_word_embeddings: bool
    qkv_bias: bool = False
    n_experts: int | None = None
    experts_per_token: int | None = None
    moe_intermediate_size: int | None = None
    max_position_embeddings: int | None = None
    n_dense_layers: int = 0  # of a mixture of experts: layers that keep a plain MLP
    shared_expert_intermediate_size: int = 0
    output_bias: bool = False
    mlp_bias: bool = False
    lm_head_bias: bool = False
    norm_bias: bool = False
    norms_per_layer: int = 2
    keeps_norm_type: bool = False  # its norms return their input's type, even with weights in fp32
    qk_norm: str = ""  # "" | "head" (one vector of head_dim) | "full" (one vector of all heads)
    learned_positions: int = 0
    attention_sinks: bool = False
    has_score_cap: bool = False
    mlp_gated: bool = True
    sliding_window: int = 0  # tokens that attention reaches in `windowed_layers`
    windowed_layers: int = 0

    @property
    def has_own_attention(self) -> bool:
        """Return whether torch's fused kernels cannot compute its attention (gpu_workers/train/model/attention.py)."""
        return self.attention_sinks or self.has_score_cap

    @property
    def query_size(self) -> int:
        return self.n_heads * self.head_dim

    @property
    def key_value_size(self) -> int:
        return self.n_kv_heads * self.head_dim


class LinearLayer(msgspec.Struct, frozen=True):
    """One kind of linear layer. The model has `copies` of it; `active_copies` of them run for each token."""

    name: str
    in_features: int
    out_features: int
    copies: int
    active_copies: int
    has_bias: bool = False

    @property
    def weights(self) -> int:
        return self.in_features * self.out_features


def from_config(config: Mapping[str, object]) -> Architecture:
    """Read a Hugging Face config. Raises ArchitectureError naming the missing or unsupported field."""
    return msgspec.convert(read_config(config), Architecture)


def from_catalog_row(row: Mapping[str, object]) -> Architecture:
    """Read one row of the catalog's `models.json`; its vocabulary is the padded one of the weights."""
    names = {"num_hidden_layers": "n_layers", "num_attention_heads": "n_heads", "num_key_value_heads": "n_kv_heads"}
    config = {key: row[source] for key, source in names.items()}
    config |= {key: row[key] for key in ("model_type", "hidden_size", "head_dim", "tie_word_embeddings")}
    config |= {"vocab_size": row["vocab_size_padded"], "max_position_embeddings": row.get("max_position_embeddings")}
    config |= {"num_experts": row.get("n_experts"), "num_experts_per_tok": row.get("experts_per_token")}
    expert_size = row.get("moe_intermediate_size")
    config |= {"intermediate_size": row.get("intermediate_size") or expert_size, "moe_intermediate_size": expert_size}
    config |= {key: row[key] for key in ("no_bias", "learned_positions", "sliding_window") if key in row}
    return from_config(config)


def linear_layers(architecture: Architecture) -> tuple[LinearLayer, ...]:
    """Return every linear layer of the decoder blocks (not embeddings, head or expert router), one entry per kind."""
    return _attention_layers(architecture) + _mlp_layers(architecture)


def target_layers(architecture: Architecture, target_modules: Sequence[str]) -> tuple[LinearLayer, ...]:
    """Return the layers that LoRA adapts. Raises ArchitectureError for a name that this family does not have."""
    layers = linear_layers(architecture)
    if ALL_LINEAR in target_modules:
        return layers
    for target in target_modules:
        if not any(_is_target(layer, target) for layer in layers):
            names = ", ".join(dict.fromkeys(layer.name for layer in layers))
            raise ArchitectureError(
                "target_modules", f"{architecture.model_type} has no module {target!r}; it has {names}"
            )
    return tuple(layer for layer in layers if any(_is_target(layer, target) for target in target_modules))


def parameter_count(architecture: Architecture) -> int:
    """Return the exact number of parameters of the text model; tied weights count once."""
    return linear_parameter_count(architecture) + other_parameter_count(architecture)


def linear_parameter_count(architecture: Architecture) -> int:
    """Return the weights of the block linear layers: those that 4-bit quantisation stores in 4 bits."""
    return sum(layer.weights * layer.copies for layer in linear_layers(architecture))


def expert_parameter_count(architecture: Architecture) -> int:
    """Return the weights of the routed experts alone, 0 without experts."""
    a = architecture
    copies = (a.n_experts or 0) * (a.n_layers - a.n_dense_layers)
    return sum(layer.weights * layer.copies for layer in _mlp(a, a.moe_intermediate_size or 0, copies, copies))


def active_linear_parameter_count(architecture: Architecture) -> int:
    """Return the weights of the block linear layers that one token passes through (all of them without experts)."""
    return sum(layer.weights * layer.active_copies for layer in linear_layers(architecture))


def head_parameter_count(architecture: Architecture) -> int:
    """Return the weights of the output head, whether tied to the embedding or not."""
    return architecture.vocab_size * architecture.hidden_size


def other_parameter_count(architecture: Architecture) -> int:
    """Return the parameters that stay unquantised: embeddings, untied head, norms, biases, routers."""
    a = architecture
    embeddings = head_parameter_count(a) * (1 if a.tie_word_embeddings else 2)
    embeddings += a.learned_positions * a.hidden_size + (a.vocab_size if a.lm_head_bias else 0)
    biases = sum(layer.out_features * layer.copies for layer in linear_layers(a) if layer.has_bias)
    norm_size = a.hidden_size * (2 if a.norm_bias else 1)
    norms = norm_size * (a.norms_per_layer * a.n_layers + 1) + _qk_norm_size(a) * a.n_layers
    sinks = a.n_heads * a.n_layers if a.attention_sinks else 0
    return embeddings + biases + norms + sinks + _router_parameters(a)


def lora_parameter_count(architecture: Architecture, *, rank: int, target_modules: Sequence[str]) -> int:
    """Return the trainable parameters of LoRA: rank x (in + out) for each adapted layer."""
    layers = target_layers(architecture, target_modules)
    return sum(
        lora_matrix_parameter_count(layer.in_features, layer.out_features, rank) * layer.copies for layer in layers
    )


def lora_matrix_parameter_count(in_features: int, out_features: int, rank: int) -> int:
    """Return the parameters of one pair of low-rank matrices A (rank x in) and B (out x rank)."""
    return rank * (in_features + out_features)


def module_names(architecture: Architecture) -> ModuleNames:
    """Return the names of the family's linear layers."""
    return NAMES.get(architecture.model_type, LLAMA_NAMES)


def _attention_layers(a: Architecture) -> tuple[LinearLayer, ...]:
    names, layers = module_names(a), a.n_layers
    output = LinearLayer(names.output, a.query_size, a.hidden_size, layers, layers, a.output_bias)
    if names.fused_qkv:
        width = a.query_size + 2 * a.key_value_size
        return (LinearLayer(names.fused_qkv, a.hidden_size, width, layers, layers, a.qkv_bias), output)
    widths = (("q_proj", a.query_size), ("k_proj", a.key_value_size), ("v_proj", a.key_value_size))
    return (*(LinearLayer(name, a.hidden_size, width, layers, layers, a.qkv_bias) for name, width in widths), output)


def _mlp_layers(a: Architecture) -> tuple[LinearLayer, ...]:
    if not a.n_experts:
        return _mlp(a, a.intermediate_size, a.n_layers, a.n_layers)
    sparse = a.n_layers - a.n_dense_layers
    experts = _mlp(a, a.moe_intermediate_size or 0, sparse * a.n_experts, sparse * (a.experts_per_token or 0))
    dense = _mlp(a, a.intermediate_size, a.n_dense_layers, a.n_dense_layers) if a.n_dense_layers else ()
    shared = _mlp(a, a.shared_expert_intermediate_size, sparse, sparse) if a.shared_expert_intermediate_size else ()
    return experts + dense + shared


def _mlp(a: Architecture, size: int, copies: int, active: int) -> tuple[LinearLayer, ...]:
    names = module_names(a)
    down = LinearLayer(names.down, size, a.hidden_size, copies, active, a.mlp_bias)
    up_width = 2 * size if names.fused_gate_up else size
    up = LinearLayer(names.up, a.hidden_size, up_width, copies, active, a.mlp_bias)
    if not (a.mlp_gated and names.gate):
        return (up, down)
    return (LinearLayer(names.gate, a.hidden_size, size, copies, active, a.mlp_bias), up, down)


def _is_target(layer: LinearLayer, target: str) -> bool:
    return layer.name == target or layer.name.endswith(f".{target}")


def _qk_norm_size(a: Architecture) -> int:
    match a.qk_norm:
        case "head":
            return 2 * a.head_dim
        case "full":
            return a.query_size + a.key_value_size
        case _:
            return 0


def _router_parameters(a: Architecture) -> int:
    if not a.n_experts:
        return 0
    per_layer = a.n_experts * a.hidden_size + (a.n_experts if a.mlp_bias else 0)
    per_layer += a.hidden_size if a.shared_expert_intermediate_size else 0  # the shared expert's own gate
    return per_layer * (a.n_layers - a.n_dense_layers)
