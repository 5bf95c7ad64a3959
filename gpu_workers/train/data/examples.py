"""Rows as questions with their answers."""

from collections.abc import Sequence

import msgspec

from gpu_workers.train.data.encoding import IGNORED
from gpu_workers.train.data.rows import PairRow


class Example(msgspec.Struct, frozen=True):
    """A held-out row; `prompt` and `answer` are None if it contains no question (running text)."""

    token_ids: list[int]
    labels: list[int]
    prompt: list[int] | None = None
    answer: list[int] | None = None


def as_example(token_ids: Sequence[int], labels: Sequence[int], *, can_be_asked: bool) -> Example:
    """Return the row with its last trained stretch as the answer to the tokens before it."""
    trained = [label != IGNORED for label in labels]
    end = len(trained) - trained[::-1].index(True)
    begin = end
    while begin and trained[begin - 1]:
        begin -= 1
    has_question = can_be_asked and begin > 0 and end == len(trained)
    return Example(
        token_ids=list(token_ids),
        labels=list(labels),
        prompt=list(token_ids[:begin]) if has_question else None,
        answer=list(token_ids[begin:end]) if has_question else None,
    )


def preferred(pair: PairRow) -> Example:
    """Return the preferred answer of a preference row: the one that should become likelier."""
    prompt, chosen = pair["prompt_ids"], pair["chosen_ids"]
    return as_example(prompt + chosen, [IGNORED] * len(prompt) + chosen, can_be_asked=True)
