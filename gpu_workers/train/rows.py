"""Rows of every objective as token ids: chat rows, running text, and pairs of answers.

A text row is `{"text": …}`. A preference row is `{"input": {"messages": […]}, "preferred_output": […],
"non_preferred_output": […]}`. Chat rows are read in `data`.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import msgspec
import numpy as np
from tokenizers import Tokenizer

from apps.contracts.chat import ChatRenderer, RenderedRow, RowError, parse_row, split_lines
from apps.contracts.failures import FailureCode
from apps.contracts.runs import Hyperparameters, Objective
from gpu_workers.train.data import Encoded, encode_file, load_renderer
from gpu_workers.train.failures import TrainingFailed

_CHUNK_BYTES = 1024 * 1024


class TextRow(msgspec.Struct, frozen=True):
    text: str


class PreferenceInput(msgspec.Struct, frozen=True):
    messages: tuple[dict[str, Any], ...]


class PreferenceRow(msgspec.Struct, frozen=True):
    input: PreferenceInput
    preferred_output: tuple[dict[str, Any], ...]
    non_preferred_output: tuple[dict[str, Any], ...]


class Pairs:
    """Preference rows of one file as token ids, in file order: a prompt and two answers each."""

    def __init__(self, rows: list[tuple[list[int], list[int], list[int]]], *, n_dropped: int, n_truncated: int) -> None:
        self.columns: dict[str, list[Any]] = {
            "prompt_ids": [prompt for prompt, _, _ in rows],
            "chosen_ids": [chosen for _, chosen, _ in rows],
            "rejected_ids": [rejected for _, _, rejected in rows],
        }
        self.lengths = np.array([len(p) + max(len(c), len(r)) for p, c, r in rows], dtype=np.int64)
        self.n_trained = sum(len(chosen) + len(rejected) for _, chosen, rejected in rows)
        self.n_dropped = n_dropped
        self.n_truncated = n_truncated

    def __len__(self) -> int:
        return len(self.lengths)

    def as_dataset(self) -> datasets.Dataset:
        """Return the columns that TRL's preference trainer reads."""
        return datasets.Dataset.from_dict(self.columns)

    def items(self, indices: np.ndarray) -> list[dict[str, Any]]:
        return [{name: column[i] for name, column in self.columns.items()} for i in indices]


Rows = Encoded | Pairs


def encode(path: Path, folder: Path, recipe: Hyperparameters, *, chat_template: str) -> Rows:
    """Read every row of the recipe's kind; raises TrainingFailed naming the first bad line or an empty result."""
    match recipe.objective:
        case Objective.TEXT:
            return encode_text(path, folder, max_length=recipe.max_length)
        case Objective.DPO:
            return encode_pairs(path, load_renderer(folder, chat_template), max_length=recipe.max_length)
        case _:
            return encode_file(path, load_renderer(folder, chat_template), max_length=recipe.max_length)


def encode_text(path: Path, folder: Path, *, max_length: int) -> Encoded:
    """Every token is trained; a long text becomes pieces of `max_length`, so nothing of it is lost."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()
    end = _end_of_text(folder, tokenizer)
    pieces = []
    for _, row in _decoded(path, TextRow):
        ids = [*tokenizer.encode(row.text).ids, *end]
        pieces += [_all_trained(ids[at : at + max_length]) for at in range(0, len(ids), max_length)]
    kept = [piece for piece in pieces if piece.n_trained]
    if not kept:
        raise TrainingFailed(FailureCode.NO_TRAINABLE_TOKENS, "No row has text to train on.")
    return Encoded(kept, n_dropped=len(pieces) - len(kept), n_truncated=0)


def encode_pairs(path: Path, renderer: ChatRenderer, *, max_length: int) -> Pairs:
    """Cut answers to what `max_length` leaves after the prompt; a row whose prompt fills it is left out."""
    kept, n_dropped, n_truncated = [], 0, 0
    for number, row in _decoded(path, PreferenceRow):
        prompt, chosen, rejected = _pair(row, renderer, number)
        room = max_length - len(prompt)
        if room <= 0:
            n_dropped += 1
            continue
        n_truncated += max(len(chosen), len(rejected)) > room
        kept.append((prompt, chosen[:room], rejected[:room]))
    if not kept:
        message = f"No row has an answer within the first {max_length} tokens; raise max_length or shorten the rows."
        raise TrainingFailed(FailureCode.NO_TRAINABLE_TOKENS, message)
    return Pairs(kept, n_dropped=n_dropped, n_truncated=n_truncated)


def _pair(row: PreferenceRow, renderer: ChatRenderer, number: int) -> tuple[list[int], list[int], list[int]]:
    chosen, first = _answer(row.input.messages, row.preferred_output, renderer, number)
    rejected, second = _answer(row.input.messages, row.non_preferred_output, renderer, number)
    limit = min(first, second)
    shared = next((i for i in range(limit) if chosen[i] != rejected[i]), limit)
    return chosen[:shared], chosen[shared:], rejected[shared:]


def _answer(
    before: tuple[dict[str, Any], ...], answer: tuple[dict[str, Any], ...], renderer: ChatRenderer, number: int
) -> tuple[list[int], int]:
    """Return the tokens up to the answer's end, and where the answer begins."""
    earlier = [message | ({"weight": 0} if message.get("role") == "assistant" else {}) for message in before]
    line = json.dumps({"messages": [*earlier, *answer]}).encode()
    try:
        rendered = renderer.render(parse_row(line, line_number=number))
    except RowError as error:
        raise _bad_line(number, f"{error.message} {error.fix}") from error
    begin = rendered.trained_mask.index(True)
    end = len(rendered.trained_mask) - rendered.trained_mask[::-1].index(True)
    return list(rendered.token_ids[:end]), begin


def _decoded(path: Path, kind: type[Any]) -> Iterator[tuple[int, Any]]:
    decoder = msgspec.json.Decoder(kind)
    with path.open("rb") as file:
        for line in split_lines(iter(lambda: file.read(_CHUNK_BYTES), b"")):
            try:
                yield line.number, decoder.decode(line.data)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise _bad_line(line.number, str(error)) from error


def _bad_line(number: int, what: str) -> TrainingFailed:
    return TrainingFailed(FailureCode.INVALID_TRAINING_FILE, f"Line {number}: {what}".strip())


def _all_trained(ids: list[int]) -> RenderedRow:
    """The first token has nothing before it to be predicted from."""
    mask = (False,) + (True,) * (len(ids) - 1)
    return RenderedRow(text="", segments=(), token_ids=tuple(ids), trained_mask=mask)


def _end_of_text(folder: Path, tokenizer: Tokenizer) -> list[int]:
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    token = config.get("eos_token")
    text = token.get("content") if isinstance(token, dict) else token
    found = tokenizer.token_to_id(text) if text else None
    return [] if found is None else [found]
