"""Token counts of an answer: those that its engine reports, limited to what the request may cost."""

import msgspec

from apps.interfaces.gateway.engines.chunks import EngineChunk, EngineUsage

_MAX_TOKEN_BYTES = 1024  # no vocabulary has a longer token, so an answer with more bytes for each is faulty
_MAX_SHOWN = 10**18  # cap of a count in a message, because JSON numbers can have any length
# The ways in which a complete answer may end. The engine's "abort" and "error" are failures that look like answers.
GOOD_ENDS = frozenset({"stop", "length", "content_filter", "tool_calls"})


class CachedTokens(msgspec.Struct, gc=False):
    cached_tokens: int


class Usage(msgspec.Struct, gc=False):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class TokenBounds(msgspec.Struct, frozen=True):
    """Upper bounds for the tokens that a replica may report for one request.

    `input` and `output` are the reserved counts; nothing above them is billed. No working engine counts more than
    `possible_input` or `possible_output` for any prompt, so a replica that does is faulty.
    """

    input: int
    output: int
    possible_input: int
    possible_output: int


class Meter(msgspec.Struct):
    """Token counts of an answer so far: those the replica reports, limited to the request's bounds.

    A chunk's usage is cumulative for its own choice and includes the tokens of that choice's prompt. The last chunk has
    no choices and holds the sums.
    """

    choice_count: int  # per prompt
    bounds: TokenBounds | None = None  # known once the request is admitted
    prompts: dict[int, int] = {}
    outputs: dict[int, int] = {}
    total: EngineUsage | None = None
    finishes: dict[int, str] = {}
    content_bytes: int = 0  # of the answer's content, as received by this gateway

    def observe(self, *chunks: EngineChunk) -> None:
        latest: dict[int, EngineUsage] = {}  # by choice
        for chunk in chunks:
            usage, choices = chunk.usage, chunk.choices
            if usage is not None and not choices:
                self.total = usage
            for choice in choices:
                self.content_bytes += choice.content_bytes
                if choice.finish_reason is not None:
                    self.finishes[choice.index] = choice.finish_reason
                if usage is not None:
                    latest[choice.index] = usage
        for index, usage in latest.items():
            prompt, read, written = index // self.choice_count, usage.prompt_tokens, usage.completion_tokens or 0
            if read > self.prompts.get(prompt, -1):
                self.prompts[prompt] = read
            if written > self.outputs.get(index, -1):
                self.outputs[index] = written

    def reset(self) -> None:
        """Forget the answer of one engine before another is asked."""
        self.prompts.clear()
        self.outputs.clear()
        self.finishes.clear()
        self.total = None
        self.content_bytes = 0

    @property
    def input_tokens(self) -> int:
        return min(max(self._claimed_input, 0), self.bounds.input) if self.bounds else max(self._claimed_input, 0)

    @property
    def output_tokens(self) -> int:
        return min(max(self._claimed_output, 0), self.bounds.output) if self.bounds else max(self._claimed_output, 0)

    @property
    def cached_input_tokens(self) -> int:
        details = self.total.prompt_tokens_details if self.total else None
        return min(max((details.cached_tokens or 0) if details else 0, 0), self.input_tokens)

    @property
    def engine_input_tokens(self) -> int:
        """Return the prompt tokens as the engine counts them: once for each choice."""
        if self.total:
            return self.input_tokens * self.choice_count
        counted = sum(self.prompts.get(index // self.choice_count, 0) for index in self.outputs)
        return min(counted, self.bounds.input * self.choice_count) if self.bounds else counted

    @property
    def _claimed_input(self) -> int:
        return self.total.prompt_tokens if self.total else sum(self.prompts.values())

    @property
    def _claimed_output(self) -> int:
        return (self.total.completion_tokens or 0) if self.total else sum(self.outputs.values())

    @property
    def excess(self) -> str:
        """Return a description of the counts above the reserved ones; empty if there are none."""
        bounds = self.bounds
        if bounds is None or (self._claimed_input <= bounds.input and self._claimed_output <= bounds.output):
            return ""
        return self._against(bounds.input, bounds.output)

    @property
    def fault(self) -> str:
        """Return a description of counts that no working engine reports for this request; empty if there are none."""
        bounds, read, written = self.bounds, self._claimed_input, self._claimed_output
        if self._is_endless:
            return f"answered {self.content_bytes} bytes without an end"
        if bounds is None or (0 <= read <= bounds.possible_input and 0 <= written <= bounds.possible_output):
            return ""
        return self._against(bounds.possible_input, bounds.possible_output)

    def _against(self, most_input: int, most_output: int) -> str:
        read, written = (min(count, _MAX_SHOWN) for count in (self._claimed_input, self._claimed_output))
        return (
            f"counted {read:.4g} input tokens where at most {most_input} are possible"
            f" and {written:.4g} output tokens where at most {most_output} are"
        )

    @property
    def is_sound(self) -> bool:
        """Return whether each finished choice ended in a valid way, within the possible length."""
        return GOOD_ENDS.issuperset(self.finishes.values()) and not self._is_endless

    @property
    def _is_endless(self) -> bool:
        return self.bounds is not None and self.content_bytes > self.bounds.possible_output * _MAX_TOKEN_BYTES

    @property
    def finish(self) -> str:
        return self.finishes.get(0, "stop")

    def usage(self) -> Usage:
        """Return the usage shown to the customer, which is the billed usage."""
        read, written = self.input_tokens, self.output_tokens
        return Usage(read, written, read + written, CachedTokens(self.cached_input_tokens))
