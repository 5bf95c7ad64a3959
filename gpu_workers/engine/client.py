"""The few requests that the serving agent sends to vLLM over its Unix socket. No other code may call vLLM."""

import math
import re
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import msgspec

from apps.contracts.serving import LORA_NAME_PATTERN

# Long enough for long answers queued before it; the call is cancelled when its client disconnects.
_ANSWER_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=5, sock_read=600)
_SHORT_PROMPT = "The weather today is"
# Some kernels fail only on long prompts. A word is at least a token in any vocabulary; the engine cuts the excess.
_LONG_PROMPT = " ".join(f"On day {n} it rained for {n + 3} hours near the harbour." for n in range(200))
_LONG_PROMPT_TOKENS = 2_000
_CANARY_TOKENS = 8
_CORRUPTED = "vllm:corrupted_requests_total{"
LORA_NAME = re.compile(LORA_NAME_PATTERN)


class EngineDown(Exception):
    """The engine does not answer: it has not started, is restarting, or is dying."""


class EngineRefused(Exception):
    """The engine refused the request; `status` is its HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status
        self.message = message

    @property
    def is_busy(self) -> bool:
        """Return whether a later attempt may succeed."""
        return self.status in (404, 429, 503)


class ServedModel(msgspec.Struct, frozen=True):
    """One row of the engine's own /v1/models. `root` is the folder the model was loaded from."""

    id: str
    root: str
    max_model_len: int | None = None


class Canary(msgspec.Struct, frozen=True):
    """The greedy answers to the fixed prompts, one after the other: the tokens with their log-probabilities."""

    tokens: tuple[str, ...]
    logprobs: tuple[float, ...]

    def is_finite(self) -> bool:
        return len(self.logprobs) > 0 and all(math.isfinite(value) for value in self.logprobs)

    def __add__(self, other: "Canary") -> "Canary":
        return Canary(self.tokens + other.tokens, self.logprobs + other.logprobs)

    def differs_from(self, other: "Canary") -> bool:
        """Return whether another model answered. The same weights on an idle engine give the same numbers."""
        pairs = zip(self.logprobs, other.logprobs, strict=False)
        return self.tokens != other.tokens or any(abs(mine - theirs) > 1e-6 for mine, theirs in pairs)


class TokensAsked(msgspec.Struct, frozen=True):
    """The tokens that the engine read and wrote for the agent's own questions, not for customers."""

    input_tokens: int = 0
    output_tokens: int = 0

    def __add__(self, other: "TokensAsked") -> "TokensAsked":
        return TokensAsked(self.input_tokens + other.input_tokens, self.output_tokens + other.output_tokens)


class Questions(msgspec.Struct, frozen=True):
    """The number of the agent's own questions that began, and of those that ended."""

    begun: int = 0
    ended: int = 0

    @property
    def is_settled(self) -> bool:
        return self.begun == self.ended


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Used(msgspec.Struct):
    usage: _Usage


class _Models(msgspec.Struct):
    data: list[ServedModel]


class _Logprobs(msgspec.Struct):
    tokens: list[str]
    token_logprobs: list[float | None]


class _Choice(msgspec.Struct):
    logprobs: _Logprobs | None = None


class _Completion(msgspec.Struct):
    choices: list[_Choice]


class _TokenLogprob(msgspec.Struct):
    logprob: float


class _ScoredChoice(msgspec.Struct):
    prompt_logprobs: list[dict[str, _TokenLogprob] | None]


class _Scored(msgspec.Struct):
    choices: list[_ScoredChoice]


class _Tokenized(msgspec.Struct):
    tokens: list[int]


class _Version(msgspec.Struct):
    version: str


class _Error(msgspec.Struct):
    message: str = ""


class _ErrorEnvelope(msgspec.Struct):
    error: _Error


class EngineClient:
    """A client for one event loop; call `close` when done. `record_asked` gets all tokens of the agent's questions."""

    def __init__(self, socket_path: Path, *, record_asked: Callable[[TokensAsked], None] = lambda _: None) -> None:
        self._record_asked = record_asked
        self._canary_sizes: dict[str, TokensAsked] = {}
        self.questions = Questions()
        connector = aiohttp.UnixConnector(path=str(socket_path), limit=0, keepalive_timeout=30)
        self._http = aiohttp.ClientSession("http://engine", connector=connector, auto_decompress=False)

    async def close(self) -> None:
        await self._http.close()

    async def list_models(self) -> list[ServedModel]:
        """Return the base model and every adapter that the engine has loaded."""
        body = await self._request("GET", "/v1/models", timeout_seconds=10)
        return msgspec.json.decode(body, type=_Models).data

    async def load_adapter(self, lora_name: str, path: Path) -> None:
        """Load new weights under a new name; raises EngineRefused if the engine cannot use them.

        Weights are never replaced in place, because the engine would swap them in the middle of answers.
        """
        if LORA_NAME.fullmatch(lora_name) is None or not path.is_absolute():
            raise ValueError(f"{lora_name!r} at {path} is no adapter of ours")
        body = {"lora_name": lora_name, "lora_path": str(path)}
        await self._request("POST", "/v1/load_lora_adapter", json=body, timeout_seconds=120)

    async def unload_adapter(self, lora_name: str) -> None:
        """Remove the name from the engine. Requests in flight finish; the engine may still read the adapter's files."""
        try:
            await self._request("POST", "/v1/unload_lora_adapter", json={"lora_name": lora_name}, timeout_seconds=60)
        except EngineRefused as refusal:
            if refusal.status != 404:
                raise

    async def ask_canary(self, model: str) -> Canary:
        """Return the model's greedy answers to a short prompt and to one of 2,000 tokens, or as many as it accepts.

        Raises EngineRefused if vLLM finds the numbers not finite (400).
        """
        room = min((m.max_model_len for m in await self.list_models() if m.max_model_len), default=None)
        most = _LONG_PROMPT_TOKENS if room is None else max(1, min(_LONG_PROMPT_TOKENS, room - _CANARY_TOKENS))
        short = await self._answer_greedily(model, _SHORT_PROMPT)
        return short + await self._answer_greedily(model, _LONG_PROMPT, truncate_prompt_tokens=most)

    async def _answer_greedily(self, model: str, prompt: str, **limits: int) -> Canary:
        body = {
            "model": model,
            "prompt": prompt,
            "max_tokens": _CANARY_TOKENS,
            "ignore_eos": True,
            "temperature": 0,
            "logprobs": 1,
            "cache_salt": "canary",
        }
        try:
            answer = await self._complete(body | limits, timeout_seconds=120)
        except EngineRefused:
            # vLLM counts the tokens before it refuses numbers that are not finite.
            self._record_asked(self._canary_sizes.get(prompt, TokensAsked()))
            raise
        self._canary_sizes[prompt] = _used(answer)
        found = msgspec.json.decode(answer, type=_Completion).choices[0].logprobs or _Logprobs([], [])
        values = tuple(math.nan if value is None else value for value in found.token_logprobs)
        return Canary(tokens=tuple(found.tokens), logprobs=values or (math.nan,))

    async def score_tokens(self, model: str, token_ids: Sequence[int]) -> tuple[float, ...]:
        """Return the model's log-probability of every token but the first; raises EngineRefused if not finite."""
        body = {
            "model": model,
            "prompt": list(token_ids),
            "max_tokens": 1,
            "temperature": 0,
            "prompt_logprobs": 0,
            "cache_salt": "parity",
        }
        answer = await self._complete(body, timeout_seconds=300)
        found = msgspec.json.decode(answer, type=_Scored).choices[0].prompt_logprobs
        entries = [(entry or {}).get(str(token)) for token, entry in zip(token_ids[1:], found[1:], strict=True)]
        return tuple(math.nan if entry is None else entry.logprob for entry in entries)

    async def tokenize_chat(self, model: str, messages: Sequence[dict[str, str]]) -> list[int]:
        """Return the tokens of the messages in the engine's own chat template, ready for an answer."""
        body = {"model": model, "messages": list(messages), "add_generation_prompt": True}
        return msgspec.json.decode(
            await self._request("POST", "/tokenize", json=body, timeout_seconds=60), type=_Tokenized
        ).tokens

    async def get_version(self) -> str:
        return msgspec.json.decode(await self._request("GET", "/version", timeout_seconds=10), type=_Version).version

    async def touch(self, model: str) -> None:
        """Use the adapter for one token, so that it is the last that the engine's cache evicts."""
        body = {"model": model, "prompt": _SHORT_PROMPT, "max_tokens": 1, "temperature": 0, "cache_salt": "canary"}
        await self._complete(body, timeout_seconds=120)

    async def _complete(self, body: dict, *, timeout_seconds: float) -> bytes:
        self.questions = msgspec.structs.replace(self.questions, begun=self.questions.begun + 1)
        try:
            answer = await self._request("POST", "/v1/completions", json=body, timeout_seconds=timeout_seconds)
            self._record_asked(_used(answer))
            return answer
        finally:
            self.questions = msgspec.structs.replace(self.questions, ended=self.questions.ended + 1)

    async def is_well(self) -> bool:
        """Return whether the engine reports that it is healthy."""
        try:
            await self._request("GET", "/health", timeout_seconds=5)
        except (EngineDown, EngineRefused):
            return False
        return True

    async def read_metrics(self) -> str:
        return (await self._request("GET", "/metrics", timeout_seconds=10)).decode()

    async def count_corrupted_requests(self) -> int:
        """Return how many requests had NaN in their logits since the engine started."""
        lines = (await self.read_metrics()).splitlines()
        return int(sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(_CORRUPTED)))

    @asynccontextmanager
    async def open_answer(
        self, path: str, body: bytes, headers: dict[str, str]
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a customer's request and yield the response as it is written. Leaving early aborts the request."""
        headers = {"Content-Type": "application/json", **headers}
        try:
            response = await self._http.post(path, data=body, headers=headers, timeout=_ANSWER_TIMEOUT)
        except (aiohttp.ClientConnectionError, TimeoutError) as error:
            raise EngineDown(repr(error)) from error
        try:
            yield response
        finally:
            response.close()  # not released: an unread rest means that the client disconnected

    async def _request(self, method: str, path: str, *, timeout_seconds: float, json: dict | None = None) -> bytes:
        timeout = aiohttp.ClientTimeout(total=timeout_seconds)
        try:
            async with self._http.request(method, path, json=json, timeout=timeout) as response:
                body = await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise EngineDown(repr(error)) from error
        if response.status >= 400:
            raise EngineRefused(response.status, _read_message(body))
        return body


def _used(answer: bytes) -> TokensAsked:
    usage = msgspec.json.decode(answer, type=_Used).usage
    return TokensAsked(usage.prompt_tokens, usage.completion_tokens)


def _read_message(body: bytes) -> str:
    try:
        return msgspec.json.decode(body, type=_ErrorEnvelope).error.message
    except msgspec.DecodeError:
        return body[:300].decode(errors="replace")
