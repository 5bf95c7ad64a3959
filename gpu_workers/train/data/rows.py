"""Rows of every objective as token ids: chat rows, running text, and pairs of answers. `encoding` reads chat rows."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NotRequired, TypedDict

import datasets
import numpy as np

from apps.contracts.chat import ChatRenderer, RenderedPair, RenderedRow, RowError, RowKind, TrainOn
from apps.contracts.failures import FailureCode
from apps.contracts.hyperparameters import Hyperparameters, Objective
from apps.contracts.runs import DatasetRef
from gpu_workers.train.data.encoding import Encoded, TokenRow, bad_row, encode_file, read_rows
from gpu_workers.train.failures import TrainingFailed

_KINDS = {
    Objective.SUPERVISED: RowKind.CHAT,
    Objective.TEXT: RowKind.TEXT,
    Objective.DPO: RowKind.PREFERENCE,
    Objective.ORPO: RowKind.PREFERENCE,
}


class PairRow(TypedDict):
    """A prompt and two answers for TRL's collator, with the reference model's log-probabilities once DPO has them."""

    prompt_ids: list[int]
    chosen_ids: list[int]
    rejected_ids: list[int]
    ref_chosen_logps: NotRequired[float]
    ref_rejected_logps: NotRequired[float]


class Pairs:
    """Preference rows of one file as token ids, in file order: a prompt and two answers each."""

    def __init__(self, rows: list[tuple[list[int], list[int], list[int]]], *, n_dropped: int, n_truncated: int) -> None:
        self.rows: list[PairRow] = [
            {"prompt_ids": prompt, "chosen_ids": chosen, "rejected_ids": rejected} for prompt, chosen, rejected in rows
        ]
        self.lengths = np.array([len(p) + max(len(c), len(r)) for p, c, r in rows], dtype=np.int64)
        self.n_trained = sum(len(chosen) + len(rejected) for _, chosen, rejected in rows)
        self.n_dropped = n_dropped
        self.n_truncated = n_truncated

    def __len__(self) -> int:
        return len(self.lengths)

    def as_dataset(self) -> datasets.Dataset:
        """Return the dataset with the columns that TRL's preference trainers read."""
        return datasets.Dataset.from_list(self.rows)

    def items(self, indices: Iterable[int]) -> list[PairRow]:
        return [self.rows[i] for i in indices]


Rows = Encoded | Pairs


class SomeRows:
    """A few of the rows, without a copy: values added to the rows later appear here too."""

    def __init__(self, rows: "Rows | SomeRows", indices: np.ndarray) -> None:
        self._rows = rows
        self._indices = indices
        self.lengths: np.ndarray = rows.lengths[indices]

    def __len__(self) -> int:
        return len(self._indices)

    def items(self, indices: np.ndarray) -> list[TokenRow] | list[PairRow]:
        return self._rows.items(self._indices[indices])


def kind_of(ref: DatasetRef, objective: Objective) -> RowKind:
    """Return the kind of the file's rows; raises TrainingFailed if it does not fit this objective."""
    kind = _KINDS[objective]
    if ref.kind not in (kind, RowKind.CHAT):
        message = f"The file holds {ref.kind} rows; {objective} training needs {kind} rows."
        raise TrainingFailed(FailureCode.INVALID_TRAINING_FILE, message)
    return kind


def encode(path: Path, renderer: ChatRenderer, recipe: Hyperparameters, *, keep: Sequence[bool] | None = None) -> Rows:
    """Read every row of the recipe's kind, or those that `keep` selects in file order.

    Raises TrainingFailed for the first bad line or an empty result.
    """
    match recipe.objective:
        case Objective.TEXT:
            return encode_text(path, renderer, max_length=recipe.max_length, keep=keep)
        case Objective.DPO | Objective.ORPO:
            return encode_pairs(path, renderer, max_length=recipe.max_length, keep=keep)
        case _:
            train_on = TrainOn(recipe.train_on)
            return encode_file(path, renderer, max_length=recipe.max_length, train_on=train_on, keep=keep)


def encode_text(path: Path, renderer: ChatRenderer, *, max_length: int, keep: Sequence[bool] | None = None) -> Encoded:
    """Return rows in which every token is trained. A long text becomes pieces of `max_length`, so no token is lost."""
    pieces = []
    try:
        for row in renderer.render_many(read_rows(path, RowKind.TEXT, keep=keep)):
            ids = row.token_ids
            for at in range(0, len(ids), max_length):
                piece = ids[at : at + max_length]
                # No token precedes the first, to predict it from.
                pieces.append(RenderedRow(text="", spans=(), token_ids=piece, trained=((1, len(piece)),)))
    except RowError as error:
        raise bad_row(error) from error
    kept = [piece for piece in pieces if piece.n_trained]
    if not kept:
        raise TrainingFailed(FailureCode.NO_TRAINABLE_TOKENS, "No row has text to train on.")
    return Encoded(kept, n_dropped=len(pieces) - len(kept), n_truncated=0)


def encode_pairs(path: Path, renderer: ChatRenderer, *, max_length: int, keep: Sequence[bool] | None = None) -> Pairs:
    """Return pairs with answers cut to fit after the prompt. A row whose prompt fills `max_length` is left out."""
    kept, n_dropped, n_truncated = [], 0, 0
    try:
        for pair in renderer.render_pairs(read_rows(path, RowKind.PREFERENCE, keep=keep)):
            prompt, chosen, rejected = _split(pair)
            room = max_length - len(prompt)
            if room <= 0:
                n_dropped += 1
                continue
            n_truncated += max(len(chosen), len(rejected)) > room
            kept.append((prompt, chosen[:room], rejected[:room]))
    except RowError as error:
        raise bad_row(error) from error
    if not kept:
        message = f"No row has an answer within the first {max_length} tokens; raise max_length or shorten the rows."
        raise TrainingFailed(FailureCode.NO_TRAINABLE_TOKENS, message)
    return Pairs(kept, n_dropped=n_dropped, n_truncated=n_truncated)


def _split(pair: RenderedPair) -> tuple[list[int], list[int], list[int]]:
    """Return the prompt that both conversations share, and the rest of each up to its answer's end."""
    (chosen, first), (rejected, second) = _answer(pair.chosen), _answer(pair.rejected)
    limit = min(first, second)
    shared = next((i for i in range(limit) if chosen[i] != rejected[i]), limit)
    return chosen[:shared], chosen[shared:], rejected[shared:]


def _answer(row: RenderedRow) -> tuple[list[int], int]:
    """Return the tokens up to the answer's end, and the index at which the answer begins."""
    begin, end = row.trained[0][0], row.trained[-1][1]
    return row.token_ids[:end], begin
