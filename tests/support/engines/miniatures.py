"""Base models of every architecture in miniature: true layer types and names, few of each, random weights by a seed.

Each has its family's special tokens behind the demo's vocabulary, and its family's form of a chat in a template that is
written here from a few strings.
"""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from apps.contracts.adapter_files import SUPPORT
from tests.support.engines.models import BASE_MODEL

SEED = 16
CONTEXT_TOKENS = 512
# A trained router is sure of its experts. One of random weights is not, and two engines that round differently would
# choose differently.
ROUTER_SCALE = 50.0
_ROUTER = re.compile(r"\.(gate|router|router\.layer)\.weight$")
_SPECIAL = re.compile(r"<[^<>\s]+>|\[/?[A-Z_]+\]|\[gMASK\]")


@dataclass(frozen=True, kw_only=True)
class Chat:
    """What stands before and after a message of each role; the answer's end is the token that ends a text."""

    user: tuple[str, str]
    assistant: tuple[str, str]
    system: tuple[str, str]
    first: str = ""
    end: str = ""  # if it is not what stands after an answer

    @property
    def template(self) -> str:
        roles = {"system": self.system, "user": self.user, "assistant": self.assistant}
        branches = "".join(
            f"{{%- {'elif' if number else 'if'} message['role'] == '{role}' -%}}"
            f"{{{{- {json.dumps(before)} + message['content'] + {json.dumps(after)} -}}}}"
            for number, (role, (before, after)) in enumerate(roles.items())
        )
        return (
            f"{{{{- {json.dumps(self.first)} -}}}}{{%- for message in messages -%}}{branches}"
            "{%- else -%}{{- raise_exception('Only the roles system, user and assistant are supported') -}}"
            "{%- endif -%}{%- endfor -%}"
            f"{{%- if add_generation_prompt -%}}{{{{- {json.dumps(self.assistant[0])} -}}}}{{%- endif -%}}"
        )

    @property
    def end_token(self) -> str:
        return self.end or self.assistant[1].strip()

    @property
    def special_tokens(self) -> list[str]:
        text = self.first + "".join("".join(pair) for pair in (self.system, self.user, self.assistant))
        return list(dict.fromkeys([*_SPECIAL.findall(text), self.end_token]))


def _turns(begin: str, end: str, *, first: str = "", assistant: str = "assistant") -> Chat:
    """Return a form of chat in which all roles look alike; `{}` stands for the role."""
    roles = {"user": "user", "assistant": assistant, "system": "system"}
    return Chat(**{role: (begin.format(name), end) for role, name in roles.items()}, first=first)


_CHATML = _turns("<|im_start|>{}\n", "<|im_end|>\n")
_LLAMA3 = _turns("<|start_header_id|>{}<|end_header_id|>\n\n", "<|eot_id|>", first="<|begin_of_text|>")
_GEMMA = Chat(
    first="<bos>",
    system=("<start_of_turn>user\n", "<end_of_turn>\n"),
    user=("<start_of_turn>user\n", "<end_of_turn>\n"),
    assistant=("<start_of_turn>model\n", "<end_of_turn>\n"),
)
_MISTRAL = Chat(
    first="<s>",
    system=("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    user=("[INST]", "[/INST]"),
    assistant=("", "</s>"),
)
_PHI = _turns("<|{}|>", "<|end|>")
_HARMONY = Chat(
    system=("<|start|>developer<|message|>", "<|end|>"),
    user=("<|start|>user<|message|>", "<|end|>"),
    assistant=("<|start|>assistant<|channel|>final<|message|>", "<|return|>"),
)
_GRANITE = _turns("<|start_of_role|>{}<|end_of_role|>", "<|end_of_text|>\n")
_COHERE = Chat(
    first="<BOS_TOKEN>",
    system=("<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>", "<|END_OF_TURN_TOKEN|>"),
    user=("<|START_OF_TURN_TOKEN|><|USER_TOKEN|>", "<|END_OF_TURN_TOKEN|>"),
    assistant=("<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>", "<|END_OF_TURN_TOKEN|>"),
)
_GLM = Chat(
    first="[gMASK]<sop>",
    system=("<|system|>\n", ""),
    user=("<|user|>\n", ""),
    assistant=("<|assistant|>\n", "<|endoftext|>"),
)
_DEEPSEEK = Chat(
    first="<｜begin▁of▁sentence｜>",
    system=("", ""),
    user=("<｜User｜>", ""),
    assistant=("<｜Assistant｜>", "<｜end▁of▁sentence｜>"),
)
_OLMO = _turns("<|{}|>\n", "<|endoftext|>", first="<|endoftext|>")


@dataclass(frozen=True, kw_only=True)
class Miniature:
    """One family: the class of transformers, what its configuration has beyond the common sizes, its form of chat."""

    architecture: str
    chat: Chat
    config: dict[str, Any] = field(default_factory=dict)
    example: str  # a model of the family


_SIZES = {
    "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": CONTEXT_TOKENS,
}  # fmt: skip
_HEADS_OF_32 = {"head_dim": 32}
_FOUR_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_WINDOW = 16  # less than a row has, so that both kinds of layers differ
_BOTH_KINDS = {"sliding_window": _WINDOW, "layer_types": ["sliding_attention", "full_attention"]}

_SCALED_LOGITS = {"logit_scale": 0.7}  # with the usual 0.0625, gradients of random weights are too small to learn

# In the order of popularity.
MINIATURES: dict[str, Miniature] = {
    "qwen3": Miniature(
        architecture="Qwen3ForCausalLM", chat=_CHATML, example="Qwen3-8B",
        config=_HEADS_OF_32 | {"tie_word_embeddings": True},
    ),
    "qwen2.5": Miniature(architecture="Qwen2ForCausalLM", chat=_CHATML, example="Qwen2.5-7B-Instruct"),
    "llama3": Miniature(
        architecture="LlamaForCausalLM", chat=_LLAMA3, example="Llama-3.1-8B-Instruct",
        config=_HEADS_OF_32 | {"rope_parameters": {
            "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 128,
        }},
    ),
    "qwen3-moe": Miniature(
        architecture="Qwen3MoeForCausalLM", chat=_CHATML, example="Qwen3-30B-A3B",
        config=_HEADS_OF_32 | {
            "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True,
            "num_hidden_layers": 3, "mlp_only_layers": [1],
        },
    ),
    "gemma3": Miniature(
        architecture="Gemma3ForCausalLM", chat=_GEMMA, example="gemma-3-1b-it",
        config=_HEADS_OF_32 | _BOTH_KINDS | {"query_pre_attn_scalar": 32},
    ),
    "mistral": Miniature(
        architecture="MistralForCausalLM", chat=_MISTRAL, example="Mistral-7B-Instruct-v0.3",
        config=_HEADS_OF_32 | {"sliding_window": None},
    ),
    "deepseek-distill": Miniature(
        architecture="Qwen2ForCausalLM", chat=_DEEPSEEK, example="DeepSeek-R1-Distill-Qwen-7B",
        config={"num_key_value_heads": 1},
    ),
    "phi4": Miniature(
        architecture="Phi3ForCausalLM", chat=_PHI, example="Phi-4-mini-instruct",
        # Heads of 128: vLLM's kernel for CPUs turns a multiple of 16 pairs, of which 0.75 of 32 has none.
        config={"partial_rotary_factor": 0.75, "tie_word_embeddings": True, "hidden_size": 256,
                "num_attention_heads": 2, "num_key_value_heads": 1},
    ),
    "gpt-oss": Miniature(
        architecture="GptOssForCausalLM", chat=_HARMONY, example="gpt-oss-20b",
        config=_HEADS_OF_32 | _BOTH_KINDS | _FOUR_EXPERTS | {"rope_parameters": {
            "rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "original_max_position_embeddings": 16,
            "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        }},
    ),
    "mixtral": Miniature(
        architecture="MixtralForCausalLM", chat=_MISTRAL, example="Mixtral-8x7B-Instruct-v0.1", config=_FOUR_EXPERTS,
    ),
    "ministral3": Miniature(
        architecture="Ministral3ForCausalLM", chat=_MISTRAL, example="text model of Ministral-3-8B-Instruct",
        config=_HEADS_OF_32 | {"rope_parameters": {
            "type": "yarn", "rope_theta": 1000000.0, "factor": 16.0, "original_max_position_embeddings": 32,
            "max_position_embeddings": CONTEXT_TOKENS, "beta_fast": 32.0, "beta_slow": 1.0, "mscale_all_dim": 1.0,
            "mscale": 1.0, "llama_4_scaling_beta": 0.1,
        }},
    ),
    "smollm3": Miniature(
        architecture="SmolLM3ForCausalLM", chat=_CHATML, example="SmolLM3-3B",
        config={"num_hidden_layers": 4, "no_rope_layer_interval": 4, "tie_word_embeddings": True},
    ),
    "olmo2": Miniature(architecture="Olmo2ForCausalLM", chat=_OLMO, example="OLMo-2-1124-7B-Instruct"),
    "olmo3": Miniature(
        architecture="Olmo3ForCausalLM", chat=_CHATML, example="Olmo-3-7B-Instruct", config=_BOTH_KINDS,
    ),
    "granite": Miniature(
        architecture="GraniteForCausalLM", chat=_GRANITE, example="granite-3.3-8b-instruct",
        config={"tie_word_embeddings": True, "embedding_multiplier": 12.0, "logits_scaling": 4.0,
                "residual_multiplier": 0.22, "attention_multiplier": 0.1767766952966369},
    ),
    "granite-moe": Miniature(
        architecture="GraniteMoeForCausalLM", chat=_GRANITE, example="granite-3.1-3b-a800m-instruct",
        config=_FOUR_EXPERTS | {"tie_word_embeddings": True, "embedding_multiplier": 12.0, "logits_scaling": 4.0,
                                "residual_multiplier": 0.22, "attention_multiplier": 0.1767766952966369},
    ),
    "gemma2": Miniature(
        architecture="Gemma2ForCausalLM", chat=_GEMMA, example="gemma-2-9b-it",
        config=_HEADS_OF_32 | _BOTH_KINDS | {"query_pre_attn_scalar": 32},
    ),
    "glm4": Miniature(architecture="Glm4ForCausalLM", chat=_GLM, example="GLM-4-9B-0414", config=_HEADS_OF_32),
    "cohere2": Miniature(
        architecture="Cohere2ForCausalLM", chat=_COHERE, example="c4ai-command-r7b-12-2024",
        config=_BOTH_KINDS | _SCALED_LOGITS,
    ),
    "cohere": Miniature(
        architecture="CohereForCausalLM", chat=_COHERE, example="c4ai-command-r-v01", config=_SCALED_LOGITS,
    ),
    "gemma": Miniature(architecture="GemmaForCausalLM", chat=_GEMMA, example="gemma-7b-it", config=_HEADS_OF_32),
}  # fmt: skip


def is_mixture(name: str) -> bool:
    """Return whether it is a mixture of experts."""
    return bool(SUPPORT[MINIATURES[name].architecture].qlora_note)


def build_model(name: str, *, vocabulary: int, **tokens: int) -> PreTrainedModel:
    """Return the miniature on torch's present device, in its random state."""
    made = MINIATURES[name]
    support = SUPPORT[made.architecture]
    config = AutoConfig.for_model(support.model_type, **_SIZES | made.config, vocab_size=vocabulary, **tokens)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    assert type(model).__name__ == made.architecture
    return model


def write_miniature(name: str, folder: Path) -> Path:
    """Write the miniature as a base model's folder: weights, configuration, tokenizer and template."""
    folder.mkdir(parents=True)
    chat = MINIATURES[name].chat
    tokenizer = Tokenizer.from_file(str(BASE_MODEL / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in chat.special_tokens])
    tokenizer.save(str(folder / "tokenizer.json"))
    end = tokenizer.token_to_id(chat.end_token)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<|pad|>",
        "eos_token": chat.end_token,
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONTEXT_TOKENS,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
    (folder / "chat_template.jinja").write_text(chat.template)
    torch.manual_seed(SEED)
    vocabulary = -(-tokenizer.get_vocab_size() // 64) * 64
    model = build_model(name, vocabulary=vocabulary, eos_token_id=end, pad_token_id=0, bos_token_id=None)
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if _ROUTER.search(key) and is_mixture(name):
                weight.normal_(0, 0.02).mul_(ROUTER_SCALE)
    model.save_pretrained(folder)
    return folder
