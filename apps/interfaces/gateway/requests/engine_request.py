"""A request as the engine gets it, with the bounds of its cost: sequences, tokens, and bytes of a held answer."""

import msgspec

from apps.core.errors import InvalidValue
from apps.interfaces.gateway.requests.grammars import CheckedSchema
from apps.interfaces.gateway.requests.media import MEDIA_TOKENS_ESTIMATE, Medium
from apps.interfaces.gateway.requests.stored import KeptRequest

# Tokens and log-probabilities of one answer, and the bytes that each takes of this process until the answer is whole.
# Measured: 60 to 130.
MAX_ANSWER_VALUES, BYTES_PER_VALUE = 2**21, 130
# The most tokens that a chat template adds: a default system prompt and the assistant's turn.
_TEMPLATE_TOKENS = 256


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A checked request: the engine's task and its maximum cost."""

    model_name: str
    fields: dict[str, object]
    is_streamed: bool
    wants_usage: bool
    is_structured: bool
    prompt_param: str
    prompt_count: int
    choice_count: int  # per prompt
    max_tokens: int | None
    body_bytes: int
    logprob_count: int = 0  # per token of an answer
    is_held: bool = True  # this process holds the answer until it is whole
    echoed: dict[str, object] = {}  # request fields that the answer repeats
    media: tuple[Medium, ...] = ()  # checked once the model is known
    schemas: tuple[CheckedSchema, ...] = ()  # for the engine to compile
    stored: KeptRequest | None = None  # to be kept with its answer

    @property
    def sequence_count(self) -> int:
        """Return how many sequences the engine writes at once."""
        return self.prompt_count * self.choice_count

    def require_few_sequences(self, most: int) -> None:
        """Raise InvalidValue if a replica never has places for so many answers."""
        if self.sequence_count > most:
            raise InvalidValue(
                f"`n` asks for {self.sequence_count} answers. A replica of this model writes at most {most} of one "
                "request at once. Ask for fewer.",
                param="n",
            )

    def require_answer_fits(self, context_length: int) -> None:
        """Raise InvalidValue if the requested answers may have too many tokens and log-probabilities to be held."""
        asked, most = min(self.max_tokens or 0, context_length), self._most_tokens
        if self.is_held and asked > most:
            logprobs = "logprobs" if self.prompt_param == "prompt" else "top_logprobs"
            limit = "max_completion_tokens" if "max_completion_tokens" in self.fields else "max_tokens"
            raise InvalidValue(
                f"The answer could have more than {MAX_ANSWER_VALUES:,} tokens and log-probabilities: "
                f"{MAX_ANSWER_VALUES // most:,} for each of up to {asked:,} tokens. "
                f"Send `{limit}` of at most {most:,}, or lower `n` or `{logprobs}`.",
                param=limit,
            )

    def with_limit(self, context_length: int) -> "EngineRequest":
        """Return the request with the highest possible `max_tokens` if it has none and could have too large answers."""
        most = self._most_tokens
        if not self.is_held or self.max_tokens is not None or most >= context_length:
            return self
        return msgspec.structs.replace(self, max_tokens=most, fields=self.fields | {"max_tokens": most})

    @property
    def _most_tokens(self) -> int:
        """The most tokens that each of the answers may have."""
        return MAX_ANSWER_VALUES // (self.sequence_count * (1 + self.logprob_count))

    @property
    def held_bytes_per_token(self) -> int:
        """The bytes that a token of a held answer takes with its log-probabilities."""
        return BYTES_PER_VALUE * (1 + self.logprob_count)

    def input_tokens_bound(self, context_length: int) -> int:
        """Return the most tokens that the prompts can have.

        A token has at least one byte of the body, except in images.
        """
        if self.media:
            return self.prompt_count * context_length
        return min(self.prompt_count * context_length, self.body_bytes + _TEMPLATE_TOKENS)

    def tokens_estimate(self) -> int:
        """Return the approximate tokens of the request and its answers, for limits per minute."""
        return self.prompt_tokens_estimate() + self.sequence_count * (self.max_tokens or 256)

    def prompt_tokens_estimate(self) -> int:
        """Return the approximate tokens of the prompts: four bytes of text per token, and a fixed number per medium.

        A medium in the body may be megabytes long, but costs no more than a link to it.
        """
        text_bytes = self.body_bytes - sum(medium.body_bytes for medium in self.media)
        return len(self.media) * MEDIA_TOKENS_ESTIMATE + text_bytes // 4

    def output_tokens_bound(self, context_length: int) -> int:
        """Return the most tokens that the answers can have: the requested number, but never more than the context."""
        return self.sequence_count * min(self.max_tokens or context_length, context_length)
