"""The speeds of an engine with continuous batching, fitted to requests that it answered.

In each step the engine writes one token of each running sequence and reads prompts. A step takes

    step_seconds + sequence_seconds * running sequences + prompt_token_seconds * prompt tokens that it reads

(Agrawal et al., "Taming Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve", OSDI 2024, section 3: a step
that decodes is bound by the weights that it loads, and one that reads prompts by their tokens). Two sums follow for a
request with p prompt tokens and n written ones. Until its first token, it waits for half a step of those that run, and
for the step that reads it. From then on it takes n - 1 steps, and reads of other prompts lengthen them.
"""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

import msgspec

MIN_REQUESTS = 50
_NAMES = ("fixed_seconds", "step_seconds", "sequence_seconds", "prompt_token_seconds")


class RecordedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request as it was metered. Times are seconds from any moment; `prompt_tokens` are those not in the cache."""

    at: float
    first_token_seconds: float  # from `at`
    seconds: float  # until its last token, from `at`
    prompt_tokens: int
    output_tokens: int


class EngineSpeeds(msgspec.Struct, frozen=True, kw_only=True):
    """How long a step of one replica takes, and what a request takes besides: gateway, network and tokenizer."""

    fixed_seconds: float
    step_seconds: float
    sequence_seconds: float
    prompt_token_seconds: float
    max_sequences: int = 256  # vLLM's --max-num-seqs
    tokens_per_step: int = 2048  # vLLM's --max-num-batched-tokens


class TooFewRequests(ValueError):
    """The recorded requests do not determine the speeds."""


def fit_speeds(requests: Sequence[RecordedRequest], **limits: int) -> EngineSpeeds:
    """Return the speeds that explain the requests of one replica best, by relative least squares; none is negative.

    `limits` are those of EngineSpeeds. Raises TooFewRequests below MIN_REQUESTS.
    """
    if len(requests) < MIN_REQUESTS:
        raise TooFewRequests(f"{len(requests)} requests were recorded, and {MIN_REQUESTS} are needed.")
    rows = list(_equations(requests))
    kept = list(range(len(_NAMES)))
    while True:
        values = _least_squares([([row[each] for each in kept], seconds) for row, seconds in rows])
        negative = [each for each, value in zip(kept, values, strict=True) if value < 0]
        if not negative:
            break
        kept = [each for each in kept if each not in negative]
    found = dict.fromkeys(_NAMES, 0.0) | {_NAMES[each]: value for each, value in zip(kept, values, strict=True)}
    if not found["step_seconds"]:
        raise TooFewRequests("The recorded requests are too much alike to tell what a step takes.")
    return msgspec.convert(found | limits, EngineSpeeds)


def _equations(requests: Sequence[RecordedRequest]) -> list[tuple[list[float], float]]:
    """Return rows of (factors of the four speeds, observed seconds): one for the first token, one for the others."""
    running = _Running(requests)
    rows: list[tuple[list[float], float]] = []
    for each in requests:
        first, end = each.at + each.first_token_seconds, each.at + each.seconds
        before = running.at(each.at)
        steps = 1.5 if before else 1.0
        rows.append(([1.0, steps, 1.0 + steps * before, each.prompt_tokens], each.first_token_seconds))
        if each.output_tokens > 1 and end > first:
            further = each.output_tokens - 1
            mean = running.mean(first, end)
            rows.append(([0.0, further, further * mean, running.prompts_between(first, end)], end - first))
    return rows


class _Running:
    """How many requests were between their first and last token at any time, and which prompts were read when."""

    def __init__(self, requests: Sequence[RecordedRequest]) -> None:
        changes = sorted(
            change
            for each in requests
            for change in ((each.at + each.first_token_seconds, 1), (each.at + each.seconds, -1))
        )
        self._times = [at for at, _ in changes]
        self._counts = list(accumulate(step for _, step in changes))
        spans = zip(self._times, self._times[1:], self._counts, strict=False)
        self._sums = list(accumulate(((until - since) * count for since, until, count in spans), initial=0.0))
        reads = sorted((each.at + each.first_token_seconds, each.prompt_tokens) for each in requests)
        self._read_at = [at for at, _ in reads]
        self._read_tokens = list(accumulate((tokens for _, tokens in reads), initial=0))

    def at(self, moment: float) -> int:
        place = bisect_left(self._times, moment)
        return self._counts[place - 1] if place else 0

    def mean(self, since: float, until: float) -> float:
        return (self._integral(until) - self._integral(since)) / (until - since)

    def _integral(self, moment: float) -> float:
        place = bisect_left(self._times, moment)
        if not place:
            return 0.0
        return self._sums[place - 1] + (moment - self._times[place - 1]) * self._counts[place - 1]

    def prompts_between(self, since: float, until: float) -> int:
        """Return the prompt tokens of the requests whose first token was written after `since` and before `until`."""
        after = bisect_left(self._read_at, since + 1e-9)
        return self._read_tokens[bisect_left(self._read_at, until)] - self._read_tokens[after]


def _least_squares(rows: Sequence[tuple[Sequence[float], float]]) -> list[float]:
    """Solve the normal equations of the rows, each divided by its observed value."""
    size = len(rows[0][0])
    matrix = [[0.0] * (size + 1) for _ in range(size)]
    for factors, seconds in rows:
        weight = 1.0 / max(seconds, 1e-6) ** 2
        for row in range(size):
            for column in range(size):
                matrix[row][column] += weight * factors[row] * factors[column]
            matrix[row][size] += weight * factors[row] * seconds
    for pivot in range(size):
        matrix[pivot][pivot] += 1e-12 * max(matrix[pivot][pivot], 1e-12)  # two columns may depend on each other
        for row in range(size):
            if row != pivot:
                factor = matrix[row][pivot] / matrix[pivot][pivot]
                matrix[row] = [left - factor * right for left, right in zip(matrix[row], matrix[pivot], strict=True)]
    return [matrix[row][size] / matrix[row][row] for row in range(size)]
