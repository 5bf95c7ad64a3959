"""Chat templates, a tokenizer whose masks can be checked by eye, and rows of conversations."""

import json

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|start|>' + m['role'] + '<|stop|>\n\n' + m['content'] | trim + '<|eot|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant<|stop|>\n\n' }}{% endif %}"
)

MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant\n"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% else %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


PAIR = {
    "input": {"messages": [{"role": "user", "content": "Where is it?"}]},
    "preferred_output": [{"role": "assistant", "content": "On its way."}],
    "non_preferred_output": [{"role": "assistant", "content": "No idea."}],
}
TOOL_ROW = {
    "messages": [
        {"role": "user", "content": "Where is it?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "find", "arguments": "{}"}}],
        },
        {"role": "tool", "content": "{}", "tool_call_id": "call_1"},
        {"role": "assistant", "content": "Here"},
    ],
    "tools": [{"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}],
}


def byte_tokenizer() -> str:
    """A byte-level tokenizer: each byte a token, control tokens whole, so that masks can be checked by eye."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>", "<|start|>", "<|stop|>", "<|eot|>", "<s>"])
    return tokenizer.to_str()


TOKENIZER = byte_tokenizer()


def line(*messages: object, **extra: object) -> bytes:
    return json.dumps({"messages": list(messages), **extra}).encode()


def user(text: str = "hi", **extra: object) -> dict[str, object]:
    return {"role": "user", "content": text, **extra}


def assistant(text: str = "hello", **extra: object) -> dict[str, object]:
    return {"role": "assistant", "content": text, **extra}
