"""Scores that a causal model gives to tokens."""

from collections.abc import Sequence

import msgspec
import torch

from gpu_workers.common.pulse import beat
from gpu_workers.train.data.encoding import IGNORED
from gpu_workers.train.data.examples import Example


class RowScore(msgspec.Struct, frozen=True):
    """The score over the trained tokens of one row: summed loss, correctly predicted tokens, and their number."""

    loss: float
    n_correct: int
    n_tokens: int


@torch.no_grad()
def score_row(model: torch.nn.Module, example: Example) -> RowScore:
    """Score one row by itself. Without padding, the numbers equal those of serving it alone."""
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
