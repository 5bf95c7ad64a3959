"""Sums over a model's layers, as inputs of memory and time, computed once per model and set of adapters."""

import msgspec

from apps.estimates.models.architectures import (
    Architecture,
    LinearLayer,
    expert_parameter_count,
    head_parameter_count,
    linear_layers,
    module_names,
    other_parameter_count,
    target_layers,
)


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """Sums over the layers. Counts are of parameters; widths are values per token.

    "active" counts only the part that one token passes through.
    """

    architecture: Architecture
    n_layers: int
    hidden: int
    query: int
    key_value: int
    active_ff: int  # intermediate values of one token in one layer, over the experts it visits
    ff_copies: int  # intermediate tensors kept for the backward pass
    vocabulary: int
    linear: int
    active_linear: int
    experts: int  # the part of `linear` in routed experts
    head: int
    other: int  # embeddings, untied head, norms, biases, routers
    largest_linear: int
    layer: int  # parameters of one decoder layer
    adapter: int
    active_adapter: int
    adapter_modules: int  # adapted modules one token passes through, in the whole model
    adapted_inputs: int  # values entering adapted modules of one layer, each module counted
    adapted_outputs: int
    distinct_adapted_inputs: int  # values entering adapted modules of one layer, shared inputs counted once
    linear_inputs: int  # values entering linear layers of one layer, each counted
    has_adapted_down: bool  # the MLP's last matrix has an adapter
    has_fused_qkv: bool  # query, key and value are one matrix
    adapted_weights: int  # base weights of adapted modules
    active_modules: int  # linear modules one token passes through, in the whole model

    @property
    def total(self) -> int:
        return self.linear + self.other


def shape_of(architecture: Architecture, *, rank: int, target_modules: tuple[str, ...], use_dora: bool) -> Shape:
    """Return the sums over the model's layers; DoRA adds a magnitude for every output of an adapted module."""
    a, layers, names = architecture, linear_layers(architecture), module_names(architecture)
    targets = target_layers(architecture, target_modules)
    n, head, other = a.n_layers, head_parameter_count(a), other_parameter_count(a)
    linear = sum(layer.weights * layer.copies for layer in layers)
    embeddings = head * (1 if a.tie_word_embeddings else 2)
    inputs = sum(layer.active_copies * layer.in_features for layer in targets)
    return Shape(
        architecture=a,
        n_layers=n,
        hidden=a.hidden_size,
        query=a.query_size,
        key_value=a.key_value_size,
        active_ff=_active_ff(a),
        ff_copies=_ff_copies(a),
        vocabulary=a.vocab_size,
        linear=linear,
        active_linear=sum(layer.weights * layer.active_copies for layer in layers),
        experts=expert_parameter_count(a),
        head=head,
        other=other,
        largest_linear=max(layer.weights for layer in layers),
        layer=(linear + other - embeddings) // n,
        adapter=sum(_pair(layer, rank, use_dora) * layer.copies for layer in targets),
        active_adapter=sum(_pair(layer, rank, False) * layer.active_copies for layer in targets),
        adapter_modules=sum(layer.active_copies for layer in targets),
        adapted_inputs=inputs // n,
        adapted_outputs=sum(layer.active_copies * layer.out_features for layer in targets) // n,
        distinct_adapted_inputs=_distinct_inputs(targets) // n,
        linear_inputs=sum(layer.active_copies * layer.in_features for layer in layers) // n,
        has_adapted_down=any(layer.name.endswith(names.down) for layer in targets),
        has_fused_qkv=bool(names.fused_qkv),
        adapted_weights=sum(layer.weights * layer.copies for layer in targets),
        active_modules=sum(layer.active_copies for layer in layers),
    )


def _pair(layer: LinearLayer, rank: int, use_dora: bool) -> int:
    return rank * (layer.in_features + layer.out_features) + (layer.out_features if use_dora else 0)


def _distinct_inputs(targets: tuple[LinearLayer, ...]) -> int:
    """Return the distinct input values of the adapted modules.

    Query, key and value read one tensor, gate and up another; each other module has a separate input.
    """
    seen: dict[str, int] = {}
    for layer in targets:
        name = layer.name.rsplit(".", 1)[-1]
        group = "qkv" if name in ("q_proj", "k_proj", "v_proj") else name
        group = "up" if name in ("gate_proj", "up_proj", "w1", "w3") else group
        seen[group] = layer.active_copies * layer.in_features
    return sum(seen.values())


def _active_ff(a: Architecture) -> int:
    if not a.n_experts:
        return a.intermediate_size
    experts = (a.experts_per_token or 0) * (a.moe_intermediate_size or 0) + a.shared_expert_intermediate_size
    return max(experts, a.intermediate_size if a.n_dense_layers else 0)


def _ff_copies(a: Architecture) -> int:
    """Return how many values per intermediate value the MLP keeps.

    With a gate: its product, its activation and the other product. gpt-oss also keeps the clamped gate, its sigmoid,
    and the other product plus one.
    """
    return 6 if a.attention_sinks else 3 if a.mlp_gated else 2
