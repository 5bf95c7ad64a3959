"""Samples: answers of the model in training to the same few prompts, before the first step and at each checkpoint."""

from collections.abc import Sequence
from typing import cast

import numpy as np
import peft
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from apps.contracts.hyperparameters import Hyperparameters, Objective
from apps.contracts.runs import MAX_SAMPLES, SAMPLE_CHARACTERS, Sample
from gpu_workers.train.data.encoding import TokenRow
from gpu_workers.train.data.examples import Example, ExampleReader
from gpu_workers.train.data.rows import PairRow, Rows, SomeRows
from gpu_workers.train.model.generation import write_answers

_MAX_PROMPT_TOKENS, _MAX_ANSWER_TOKENS = 1024, 64
_MAX_SECONDS = 10.0  # for one round of answers
_SEARCHED_ROWS = 50


class SampleWriter:
    """Answers the first questions of the rows, greedily. `prompts` is empty if they hold none, such as running text."""

    def __init__(self, rows: Rows | SomeRows, tokenizer: PreTrainedTokenizerBase, recipe: Hyperparameters) -> None:
        self._tokenizer = tokenizer
        reader = ExampleReader(tokenizer.backend_tokenizer, max_length=recipe.max_length)
        found = rows.items(np.arange(min(len(rows), _SEARCHED_ROWS)))
        examples = [_example(reader, row, recipe.objective) for row in found]
        self._asked = [row for row in examples if row.prompt and len(row.prompt) <= _MAX_PROMPT_TOKENS][:MAX_SAMPLES]
        self._end_ids = {tokenizer.eos_token_id} - {None}

    @property
    def prompts(self) -> list[list[int]]:
        return [row.prompt or [] for row in self._asked]

    def write(self, model: PreTrainedModel | peft.PeftModel) -> tuple[Sample, ...]:
        """Return the model's answers; a long one is cut. No random numbers are drawn, so a resume is not affected."""
        stop_ids = sorted({row.answer[-1] for row in self._asked if row.answer} | self._end_ids)
        was_training = model.training
        model.eval()
        try:
            answers = write_answers(
                model,
                self.prompts,
                stop_ids=stop_ids,
                pad_id=stop_ids[0],  # any id: padding is masked
                max_tokens=_MAX_ANSWER_TOKENS,
                is_over=lambda: False,
                max_seconds=_MAX_SECONDS,
            )
        finally:
            model.train(was_training)
        return tuple(
            Sample(
                prompt=self._text(row.prompt or [])[-SAMPLE_CHARACTERS:],
                reference=self._text((row.answer or [])[:-1])[:SAMPLE_CHARACTERS],
                answer=self._text(answer)[:SAMPLE_CHARACTERS],
            )
            for row, answer in zip(self._asked, answers, strict=True)
        )

    def _text(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=True).strip()


def _example(reader: ExampleReader, row: TokenRow | PairRow, objective: Objective) -> Example:
    if objective.is_preference:
        return reader.read_preferred(cast(PairRow, row))
    row = cast(TokenRow, row)
    return reader.read(row["input_ids"], row["labels"], can_be_asked=objective is Objective.SUPERVISED)
