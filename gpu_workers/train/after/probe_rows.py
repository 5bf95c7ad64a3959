"""The fixed rows of the parity certificate: a few training rows, one long row, and one chat for the template."""

import hashlib
import importlib.metadata
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from apps.contracts.chat import ChatRenderer, parse_row, split_lines
from apps.contracts.parity import MAX_CHAT_CHARACTERS, ParityChat, ParityProbe, ParityRow
from gpu_workers.train.after.scoring import token_logprobs
from gpu_workers.train.data.examples import Example

_ROWS = 6
_ROW_TOKENS = 256
_LONG_ROW_TOKENS = 2_000
_SPARE_TOKENS = 8
_CHUNK_BYTES = 1024 * 1024


def choose_rows(examples: Sequence[Example], *, context_length: int) -> list[list[int]]:
    """Return token ids: the first rows, and one row of all rows joined, up to about 2,000 tokens."""
    room = context_length - _SPARE_TOKENS
    short = [row.token_ids[: min(_ROW_TOKENS, room)] for row in examples[:_ROWS]]
    joined: list[int] = []
    for example in examples:
        joined += example.token_ids
        if len(joined) >= _LONG_ROW_TOKENS:
            break
    return [row for row in [*short, joined[: min(_LONG_ROW_TOKENS, room)]] if len(row) > 1]


def score_rows(model: torch.nn.Module, rows: Sequence[Sequence[int]]) -> list[tuple[float, ...]]:
    return [token_logprobs(model, row) for row in rows]


def build_probe(
    rows: Sequence[Sequence[int]],
    *,
    base: Sequence[tuple[float, ...]],
    tuned: Sequence[tuple[float, ...]],
    chat: ParityChat | None,
    chat_template: str,
    dtype: torch.dtype,
) -> ParityProbe:
    return ParityProbe(
        rows=tuple(
            ParityRow(token_ids=tuple(ids), tuned=after, base=before)
            for ids, before, after in zip(rows, base, tuned, strict=True)
        ),
        chat=chat,
        chat_template_sha256=hashlib.sha256(chat_template.encode()).hexdigest(),
        dtype=str(dtype).removeprefix("torch."),
        software={name: importlib.metadata.version(name) for name in ("torch", "transformers", "peft")},
    )


def first_chat(path: Path, renderer: ChatRenderer, tokenizer: Tokenizer) -> ParityChat | None:
    """Return the first plain chat of a file up to its answer, with the tokens that ask for one, or None.

    Long ones are left out, because every engine that loads the adapter renders them again.
    """
    with path.open("rb") as file:
        for line in split_lines(iter(lambda: file.read(_CHUNK_BYTES), b"")):
            messages = _plain_messages(line.data)
            if messages and sum(len(message["content"]) for message in messages) <= MAX_CHAT_CHARACTERS // 2:
                row = parse_row(line.data, line_number=line.number)
                text = renderer.render_prompt(row.messages[:-1])
                token_ids = tokenizer.encode(text, add_special_tokens=False).ids
                return ParityChat(messages=tuple(messages), token_ids=tuple(token_ids))
    return None


def _plain_messages(data: bytes) -> list[dict[str, str]] | None:
    row: Any = json.loads(data)
    found = row.get("messages") if isinstance(row, dict) else None
    if not isinstance(found, list) or "tools" in row:
        return None
    before = found[:-1]
    is_plain = all(
        set(message) <= {"role", "content", "weight"}
        and message.get("role") in ("system", "user", "assistant")
        and isinstance(message.get("content"), str)
        for message in before
    )
    return [{"role": m["role"], "content": m["content"]} for m in before] if before and is_plain else None
