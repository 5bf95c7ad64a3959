"""Tokenizer and chat template of a model's folder, read as `from_pretrained` reads them."""

import hashlib
import json
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer

TOKEN_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token")
_MARKED = Path(__file__).parents[1] / "templating" / "marked"
_MARKED_INDEX: dict[str, str] = json.loads((_MARKED / "index.json").read_bytes())


class InvalidChatTemplate(Exception):
    """The base model's template does not compile, or its tokenizer cannot be read."""


class ModelTexts(msgspec.Struct, frozen=True):
    """Chat template and special tokens of a model's folder."""

    chat_template: str
    tokens: dict[str, str]


def read_model_texts(folder: Path, chat_template: str = "") -> ModelTexts:
    """Return the chat template (unless given) and special tokens of a model's folder."""
    config = _read_json(folder / "special_tokens_map.json") | _read_json(folder / "tokenizer_config.json")
    tokens = {}
    for name in TOKEN_NAMES:
        token = config.get(name)
        tokens[name] = token.get("content", "") if isinstance(token, dict) else str(token or "")
    return ModelTexts(chat_template or read_chat_template(folder), tokens)


def read_chat_template(folder: Path) -> str:
    """Return the default chat template of a model's folder, "" when it has none."""
    file = folder / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8")
    template = _read_json(folder / "tokenizer_config.json").get("chat_template") or ""
    if isinstance(template, list):
        return next((item["template"] for item in template if item.get("name") == "default"), "")
    return template


def chat_template_sha256(chat_template: str) -> str:
    return hashlib.sha256(chat_template.encode()).hexdigest()


def marked_twin(chat_template: str) -> str:
    """Return the template with the same rendering that marks what the model writes, "" when none is known."""
    name = _MARKED_INDEX.get(chat_template_sha256(chat_template))
    return (_MARKED / name).read_text(encoding="utf-8") if name else ""


def read_tokenizer(tokenizer_json: str | bytes | Path) -> bytes:
    """Return the file's content. Raises InvalidChatTemplate."""
    if isinstance(tokenizer_json, Path):
        try:
            return tokenizer_json.read_bytes()
        except OSError as error:
            raise InvalidChatTemplate(f"The tokenizer cannot be read: {error.strerror}.") from error
    return tokenizer_json.encode() if isinstance(tokenizer_json, str) else tokenizer_json


def load_tokenizer(content: bytes) -> Tokenizer:
    """Return the tokenizer without truncation and padding. Raises InvalidChatTemplate."""
    try:
        tokenizer = Tokenizer.from_buffer(content)
    except ValueError as error:
        message = " ".join(str(error).split())[:200]
        raise InvalidChatTemplate(f"The tokenizer is not a tokenizers file: {message}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
