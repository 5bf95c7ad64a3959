"""Answers that a causal model writes: greedy, and without random numbers."""

from collections.abc import Callable, Sequence
from itertools import accumulate, takewhile

import numpy as np
import peft
import torch
from transformers import PreTrainedModel

from gpu_workers.common.pulse import beat

# A batch of answers: a step of more rows takes hardly longer, up to the memory of their keys and values.
_BATCH_TOKENS = 16_384  # padded, answers included
_MAX_BATCH = 64  # rows


@torch.no_grad()
def write_answers(
    model: PreTrainedModel | peft.PeftModel,
    prompts: Sequence[Sequence[int]],
    *,
    stop_ids: Sequence[int],
    pad_id: int,
    max_tokens: int,
    is_over: Callable[[], bool],
    max_seconds: float | None = None,
) -> list[list[int]]:
    """Return a greedy answer to each prompt, without its end token.

    There are fewer answers if `is_over` returns true between two batches. Answers are cut after `max_seconds` of a
    batch.
    """
    answers: list[list[int]] = []
    while len(answers) < len(prompts) and not is_over():
        batch = _next_batch(prompts[len(answers) :], max_tokens)
        answers += _write_batch(model, batch, stop_ids, pad_id, max_tokens, max_seconds)
    return answers


def _next_batch(prompts: Sequence[Sequence[int]], max_tokens: int) -> Sequence[Sequence[int]]:
    """Return the first prompts, as many as fit together with their answers into the batch's tokens."""
    widths = accumulate((len(prompt) for prompt in prompts), max)
    fits = takewhile(lambda at: at[0] * (at[1] + max_tokens) <= _BATCH_TOKENS, enumerate(widths, start=1))
    return prompts[: max(1, min(_MAX_BATCH, sum(1 for _ in fits)))]


def _write_batch(
    model: PreTrainedModel | peft.PeftModel,
    prompts: Sequence[Sequence[int]],
    stop_ids: Sequence[int],
    pad_id: int,
    max_tokens: int,
    max_seconds: float | None,
) -> list[list[int]]:
    width = max(len(prompt) for prompt in prompts)
    ids_BT = np.full((len(prompts), width), pad_id, dtype=np.int64)
    mask_BT = np.zeros((len(prompts), width), dtype=np.int64)
    for index, prompt in enumerate(prompts):
        ids_BT[index, width - len(prompt) :] = prompt
        mask_BT[index, width - len(prompt) :] = 1
    written_BT = model.generate(
        input_ids=torch.from_numpy(ids_BT).to(model.device),
        attention_mask=torch.from_numpy(mask_BT).to(model.device),
        do_sample=False,
        num_beams=1,
        temperature=None,
        top_p=None,
        top_k=None,
        max_new_tokens=max_tokens,
        max_time=max_seconds,
        eos_token_id=list(stop_ids),
        pad_token_id=pad_id,
        stopping_criteria=[_beat_per_token],
    )
    return [list(takewhile(lambda token: token not in stop_ids, row)) for row in written_BT[:, width:].tolist()]


def _beat_per_token(ids_BT: torch.Tensor, scores: object, **kwargs: object) -> torch.Tensor:
    """Return a criterion that stops no answer, but counts each token of a batch as work."""
    beat()
    return torch.zeros(len(ids_BT), dtype=torch.bool, device=ids_BT.device)
