"""Scores that a causal model gives to tokens, and answers that it writes. Greedy, and without random numbers."""

from collections.abc import Callable, Sequence
from itertools import accumulate, takewhile

import msgspec
import numpy as np
import peft
import torch
from transformers import PreTrainedModel

from gpu_workers.common.pulse import beat
from gpu_workers.train.data.encoding import IGNORED

# A batch of answers: a step of more rows takes hardly longer, up to the memory of their keys and values.
_BATCH_TOKENS = 16_384  # padded, answers included
_MAX_BATCH = 64  # rows


class Example(msgspec.Struct, frozen=True):
    """A held-out row; `prompt` and `answer` are None if it contains no question (running text)."""

    token_ids: list[int]
    labels: list[int]
    prompt: list[int] | None = None
    answer: list[int] | None = None


class RowScore(msgspec.Struct, frozen=True):
    """The score over the trained tokens of one row: summed loss, correctly predicted tokens, and their number."""

    loss: float
    n_correct: int
    n_tokens: int


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


@torch.no_grad()
def score_row(model: torch.nn.Module, example: Example) -> RowScore:
    """Score one row by itself: without padding, the numbers equal those of serving it alone."""
    return score_logits(_logits(model, example.token_ids), example)


def score_logits(logits_TV: torch.Tensor, example: Example) -> RowScore:
    """Return a row's score from the logits after each of its tokens."""
    labels = torch.tensor(example.labels[1:])
    selected = labels != IGNORED
    logits_NV = logits_TV[:-1][selected.to(logits_TV.device)].float()
    targets = labels[selected].to(logits_NV.device)
    loss = torch.nn.functional.cross_entropy(logits_NV, targets, reduction="sum")
    n_correct = int((logits_NV.argmax(-1) == targets).sum())
    return RowScore(loss=float(loss), n_correct=n_correct, n_tokens=len(targets))


@torch.no_grad()
def token_logprobs(model: torch.nn.Module, token_ids: Sequence[int]) -> tuple[float, ...]:
    """Return the log-probability of every token but the first, given the tokens before it."""
    return logprobs_of(_logits(model, token_ids), token_ids)


def logprobs_of(logits_TV: torch.Tensor, token_ids: Sequence[int]) -> tuple[float, ...]:
    """Return the log-probability of every token but the first, from the logits after each token."""
    logprobs_TV = torch.log_softmax(logits_TV[:-1].float(), dim=-1)
    targets = torch.tensor(token_ids[1:], device=logprobs_TV.device)
    return tuple(logprobs_TV.gather(1, targets[:, None])[:, 0].tolist())


def _logits(model: torch.nn.Module, token_ids: Sequence[int]) -> torch.Tensor:
    """Return the logits [T, V] after each token."""
    beat()
    return model(input_ids=torch.tensor([list(token_ids)], device=model.device), use_cache=False).logits[0]


@torch.no_grad()
def write_answers(
    model: PreTrainedModel | peft.PeftModel,
    prompts: Sequence[Sequence[int]],
    *,
    stop_ids: Sequence[int],
    pad_id: int,
    max_tokens: int,
    is_over: Callable[[], bool],
) -> list[list[int]]:
    """Return a greedy answer to each prompt, without its end token; fewer answers if time runs out."""
    answers: list[list[int]] = []
    while len(answers) < len(prompts) and not is_over():
        batch = _next_batch(prompts[len(answers) :], max_tokens)
        answers += _write_batch(model, batch, stop_ids, pad_id, max_tokens)
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
        eos_token_id=list(stop_ids),
        pad_token_id=pad_id,
        stopping_criteria=[_beat_per_token],
    )
    return [list(takewhile(lambda token: token not in stop_ids, row)) for row in written_BT[:, width:].tolist()]


def _beat_per_token(ids_BT: torch.Tensor, scores: object, **kwargs: object) -> torch.Tensor:
    """Stop no answer; count each token of a batch as work."""
    beat()
    return torch.zeros(len(ids_BT), dtype=torch.bool, device=ids_BT.device)
