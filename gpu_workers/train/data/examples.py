"""Rows as questions with their answers."""

from collections.abc import Sequence

import msgspec
from tokenizers import Tokenizer

from gpu_workers.train.data.encoding import IGNORED
from gpu_workers.train.data.rows import PairRow


class Example(msgspec.Struct, frozen=True):
    """A held-out row. `prompt` and `answer` are None if no whole answer with an end token ends it, as in running text.

    The answer's last token is the one that ends it.
    """

    token_ids: list[int]
    labels: list[int]
    prompt: list[int] | None = None
    answer: list[int] | None = None


class ExampleReader:
    """Reads the question and the answer of rows that one tokenizer encoded."""

    def __init__(self, tokenizer: Tokenizer, *, max_length: int) -> None:
        self._tokenizer = tokenizer
        self._max_length = max_length
        self._special = {at for at, token in tokenizer.get_added_tokens_decoder().items() if token.special}

    def read(self, token_ids: Sequence[int], labels: Sequence[int], *, can_be_asked: bool) -> Example:
        """Return the row with its last trained stretch as the answer to the tokens before it.

        The first special token after the answer's text ends it. White space and further special tokens may follow. A
        row of `max_length` tokens may have been cut off, also right after a special token inside its answer.
        """
        trained = [label != IGNORED for label in labels]
        begin = after = len(trained) - trained[::-1].index(True)
        while begin and trained[begin - 1]:
            begin -= 1
        end = self._end(token_ids, begin)
        has_question = can_be_asked and 0 < begin < end <= after and len(token_ids) < self._max_length
        return Example(
            token_ids=list(token_ids),
            labels=list(labels),
            prompt=list(token_ids[:begin]) if has_question else None,
            answer=list(token_ids[begin:end]) if has_question else None,
        )

    def read_preferred(self, pair: PairRow) -> Example:
        """Return the preferred answer of a preference row: the one that should become likelier."""
        prompt, chosen = pair["prompt_ids"], pair["chosen_ids"]
        return self.read(prompt + chosen, [IGNORED] * len(prompt) + chosen, can_be_asked=True)

    def _end(self, token_ids: Sequence[int], begin: int) -> int:
        """Return where the row's last text ends, with its end token, or `begin` if no end token follows the text."""
        end = begin
        for at in range(len(token_ids) - 1, begin, -1):
            if token_ids[at] in self._special:
                end = at + 1
            elif self._tokenizer.decode([token_ids[at]]).strip():
                break
        return end
