"""What trains and what serves, for each architecture: declared once for install, wizard, quote, worker and engine.

Reasons come from the sources of transformers 5.19, PEFT 0.21, bitsandbytes 0.50 and vLLM 0.32. `make family-matrix`
runs a miniature of every architecture on these engines, and `docs/models.md` has the results.
"""

from collections.abc import Mapping
from dataclasses import dataclass

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL_LINEAR = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
_PHI3 = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
_GLM = (*ATTENTION, "down_proj")
TARGET_MODULES = (*ALL_LINEAR, "qkv_proj", "gate_up_proj")  # of all architectures

_ALL = "All linear layers of a block."
_FUSED_BOTH = "All linear layers of a block; q, k, v and gate, up are one layer each, in vLLM too."
_FUSED_MLP = (
    "All linear layers except gate_up_proj: transformers has one layer there, but vLLM builds it from gate_proj and "
    "up_proj and cannot load an adapter for it."
)
_EXPERTS = (
    "Attention only: the experts of a layer are one tensor, which PEFT adapts only without dropout and DoRA, and vLLM "
    "serves only with kernels of some GPUs."
)
_EXPERTS_IN_16_BITS = (
    "Saves little memory: only linear layers are stored in 4 bits, and a layer's experts are one tensor in 16 bits."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Support:
    """What can be done with one architecture. `modules` are the layers that LoRA adapts, all of them by default."""

    family: str
    model_type: str
    modules: tuple[str, ...] = ALL_LINEAR
    modules_reason: str = _ALL
    qlora_note: str = ""  # how QLoRA differs from that of dense models


def _mixture(family: str, model_type: str) -> Support:
    return Support(
        family=family,
        model_type=model_type,
        modules=ATTENTION,
        modules_reason=_EXPERTS,
        qlora_note=_EXPERTS_IN_16_BITS,
    )


SUPPORT: Mapping[str, Support] = {
    "Qwen3ForCausalLM": Support(family="Qwen 3", model_type="qwen3"),
    "Qwen3MoeForCausalLM": _mixture("Qwen 3 MoE", "qwen3_moe"),
    "Qwen2ForCausalLM": Support(family="Qwen 2 and 2.5", model_type="qwen2"),
    "LlamaForCausalLM": Support(family="Llama 2 and 3", model_type="llama"),
    "Gemma3ForCausalLM": Support(family="Gemma 3 text", model_type="gemma3_text"),
    "Gemma2ForCausalLM": Support(family="Gemma 2", model_type="gemma2"),
    "GemmaForCausalLM": Support(family="Gemma", model_type="gemma"),
    "MistralForCausalLM": Support(family="Mistral", model_type="mistral"),
    "Ministral3ForCausalLM": Support(family="Ministral 3 text", model_type="ministral3"),
    "MixtralForCausalLM": _mixture("Mixtral", "mixtral"),
    "Phi3ForCausalLM": Support(family="Phi-3 and Phi-4", model_type="phi3", modules=_PHI3, modules_reason=_FUSED_BOTH),
    "GptOssForCausalLM": _mixture("gpt-oss", "gpt_oss"),
    "SmolLM3ForCausalLM": Support(family="SmolLM3", model_type="smollm3"),
    "Olmo2ForCausalLM": Support(family="OLMo 2", model_type="olmo2"),
    "Olmo3ForCausalLM": Support(family="OLMo 3", model_type="olmo3"),
    "GraniteForCausalLM": Support(family="Granite", model_type="granite"),
    "GraniteMoeForCausalLM": _mixture("Granite MoE", "granitemoe"),
    "Glm4ForCausalLM": Support(family="GLM-4", model_type="glm4", modules=_GLM, modules_reason=_FUSED_MLP),
    "CohereForCausalLM": Support(family="Command R", model_type="cohere"),
    "Cohere2ForCausalLM": Support(family="Command R7B and A", model_type="cohere2"),
}
MODEL_TYPES = frozenset(support.model_type for support in SUPPORT.values())
# Model types that people ask for, and why they are refused.
REFUSED = {
    "deepseek_v2": "Quotes have no formula for its compressed attention (MLA) and its experts.",
    "deepseek_v3": "Quotes have no formula for its compressed attention (MLA) and its experts.",
    "gemma3": "It is Gemma 3 with a vision tower, whose layers have the same names. Use a text model (gemma3_text).",
    "mistral3": "It has a vision tower, whose layers have the same names. Use a text model (mistral or ministral3).",
    "granitemoehybrid": "Quotes have no formula for its state-space layers.",
    "qwen3_next": "Quotes have no formula for its linear attention.",
}


def find_support(config: Mapping[str, object]) -> Support | None:
    """Return the declaration for a config.json, or for a catalogue row by its model type; None if there is none."""
    named = config.get("architectures")
    if isinstance(named, list):
        return SUPPORT.get(str(named[0])) if named else None
    return next((each for each in SUPPORT.values() if each.model_type == config.get("model_type")), None)


def adapted_modules(config: Mapping[str, object]) -> tuple[str, ...]:
    """Return the layers that an adapter of this model may change; Llama's for a model that is not declared."""
    support = find_support(config)
    return support.modules if support else ALL_LINEAR


def why_refused(model_type: str) -> str:
    """Return why no model of this type can be installed, as a sentence; "" if it can."""
    if model_type in MODEL_TYPES:
        return ""
    return REFUSED.get(model_type) or f"It must be one of {', '.join(sorted(MODEL_TYPES))}."
