"""A replay of recorded requests on any number of replicas, step by step, in virtual time."""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

import msgspec

from apps.estimates.physics.engine_speeds import EngineSpeeds, RecordedRequest


class ServingEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """What so many replicas would have done with the requests. Times to the first token are in seconds."""

    replicas: int
    first_token_p50: float
    first_token_p95: float
    busy_share: float  # of the replicas' time, from the first request to the last answer


@dataclass
class _SteppedEngine:
    """One engine. `steps` counts its steps; a running sequence is the number of the step that writes its last token."""

    speeds: EngineSpeeds
    now: float = 0.0
    busy_seconds: float = 0.0
    steps: int = 0
    running: list[int] = field(default_factory=list)  # a heap
    waiting: deque[list[int]] = field(default_factory=deque)  # index of the request, prompt tokens left, output tokens

    @property
    def load(self) -> int:
        return len(self.running) + len(self.waiting)

    def add(self, index: int, request: RecordedRequest) -> None:
        self.now = max(self.now, request.at) if not self.load else self.now
        self.waiting.append([index, max(request.prompt_tokens, 1), max(request.output_tokens, 1)])

    def advance(self, until: float, first_tokens: dict[int, float]) -> None:
        """Take every step that begins before `until`; note when each request gets its first token."""
        while self.load and self.now < until:
            if self.waiting and len(self.running) < self.speeds.max_sequences:
                self._read_prompts(first_tokens)
            else:
                self._write(until)

    def _read_prompts(self, first_tokens: dict[int, float]) -> None:
        """Take one step that reads prompts, oldest first, beside a token of each running sequence."""
        speeds, done = self.speeds, []
        budget = max(speeds.tokens_per_step - len(self.running), 1)
        read = sequences = 0
        while self.waiting and read < budget and len(self.running) + sequences < speeds.max_sequences:
            request = self.waiting[0]
            chunk = min(request[1], budget - read)
            request[1] -= chunk
            read, sequences = read + chunk, sequences + 1
            if not request[1]:
                done.append(self.waiting.popleft())
        self._take(1, len(self.running) + sequences, read)
        for index, _, output_tokens in done:
            first_tokens[index] = self.now
            if output_tokens > 1:
                heappush(self.running, self.steps + output_tokens - 1)

    def _write(self, until: float) -> None:
        """Take as many equal steps as there are until a sequence ends or `until`."""
        seconds = self._seconds_of(len(self.running), 0)
        left, possible = self.running[0] - self.steps, (until - self.now) / seconds
        count = left if possible >= left else math.ceil(possible)
        self._take(count, len(self.running), 0)

    def _take(self, count: int, sequences: int, prompt_tokens: int) -> None:
        seconds = count * self._seconds_of(sequences, prompt_tokens)
        self.now += seconds
        self.busy_seconds += seconds
        self.steps += count
        while self.running and self.running[0] <= self.steps:
            heappop(self.running)

    def _seconds_of(self, sequences: int, prompt_tokens: int) -> float:
        speeds = self.speeds
        writing = speeds.step_seconds + speeds.sequence_seconds * sequences
        return writing + speeds.prompt_token_seconds * prompt_tokens


def replay(requests: Sequence[RecordedRequest], speeds: EngineSpeeds, *, replicas: int) -> list[float]:
    """Return each request's seconds to its first token. A request goes to the replica with the fewest requests."""
    return _replay(requests, speeds, replicas)[0]


def _replay(
    requests: Sequence[RecordedRequest], speeds: EngineSpeeds, replicas: int
) -> tuple[list[float], Sequence[_SteppedEngine]]:
    engines = [_SteppedEngine(speeds) for _ in range(replicas)]
    first_tokens: dict[int, float] = {}
    for index in sorted(range(len(requests)), key=lambda each: requests[each].at):
        for engine in engines:
            engine.advance(requests[index].at, first_tokens)
        min(engines, key=lambda engine: engine.load).add(index, requests[index])
    for engine in engines:
        engine.advance(math.inf, first_tokens)
    times = [first_tokens[each] - request.at + speeds.fixed_seconds for each, request in enumerate(requests)]
    return times, engines


def predict(requests: Sequence[RecordedRequest], speeds: EngineSpeeds, *, replicas: int) -> ServingEstimate:
    """Return what so many replicas would have done with the requests, of which there is at least one."""
    times, engines = _replay(requests, speeds, replicas)
    began, ended = min(each.at for each in requests), max(engine.now for engine in engines)
    return ServingEstimate(
        replicas=replicas,
        first_token_p50=percentile(times, 0.5),
        first_token_p95=percentile(times, 0.95),
        busy_share=sum(engine.busy_seconds for engine in engines) / (replicas * max(ended - began, 1e-9)),
    )


def recommend(
    requests: Sequence[RecordedRequest], speeds: EngineSpeeds, *, first_token_p95: float, most: int
) -> list[ServingEstimate]:
    """Return the estimates of 1, 2, … replicas up to the first that meets the target, or up to `most`."""
    found: list[ServingEstimate] = []
    for replicas in range(1, most + 1):
        found.append(predict(requests, speeds, replicas=replicas))
        if found[-1].first_token_p95 <= first_token_p95:
            break
    return found


def percentile(values: Iterable[float], share: float) -> float:
    """Return the smallest value with at least this share of all values at or below it."""
    ordered = sorted(values)
    return ordered[max(math.ceil(share * len(ordered)) - 1, 0)]
