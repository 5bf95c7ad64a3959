"""The replica's only network entry: two POST routes, one token, and only models that are known to be loaded.

vLLM has routes that load, delete and use adapters without any key, serves the base model if `model` is missing, and
reveals paths. None of these is reachable here: each request is rebuilt from an allow-list of fields.
"""

import hmac
import logging
import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping

import msgspec
from aiohttp import ClientError, ClientResponse, web

from gpu_workers.engine.client import LORA_NAME, EngineClient, EngineDown
from gpu_workers.serving.traffic.slot_lease import SlotLease, SlotsBusy

log = logging.getLogger("anneal.front_door")

ROUTES = frozenset({"/v1/chat/completions", "/v1/completions"})
MAX_BODY_BYTES = 2 * 2**20
_DYING = (b"cannot schedule new futures", b"EngineCore encountered an issue")
# What an engine learns of a request besides its body: its id, and the trace that it continues.
_PASSED_ON = {
    "X-Request-Id": re.compile(r"[A-Za-z0-9_.-]{1,128}"),
    "Traceparent": re.compile(r"00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}"),
}
_COMMON_FIELDS = frozenset(
    {
        "model", "stream", "stream_options", "max_tokens", "temperature", "top_p", "n", "stop", "seed", "user",
        "presence_penalty", "frequency_penalty", "logit_bias", "logprobs", "cache_salt", "top_k", "min_p",
        "repetition_penalty", "truncate_prompt_tokens",
    }
)  # fmt: skip
_FIELDS = {
    "/v1/chat/completions": _COMMON_FIELDS
    | {
        "messages", "max_completion_tokens", "top_logprobs", "response_format", "tools", "tool_choice",
        "parallel_tool_calls",
    },
    "/v1/completions": _COMMON_FIELDS | {"prompt", "echo", "suffix"},
}  # fmt: skip


class FrontDoor:
    """The proxy, which is closed at first. `open_for` sets the served models, `close` the reason for refusals."""

    def __init__(self, engine: EngineClient, *, token: str, base_served_name: str) -> None:
        if len(token) < 16:
            raise ValueError("the replica token is too short to guard anything")
        self._engine = engine
        self._token = token.encode()
        self._base_served_name = base_served_name
        self._closed_because = "starting"
        self._ready: frozenset[str] = frozenset()
        self._expected: frozenset[str] = frozenset()
        self._lease = SlotLease(1)
        self._last_used_at: dict[str, float] = {}
        self._under_way: Counter[str] = Counter()
        self._begun = 0
        self._ended = 0

    def open_for(self, ready: Iterable[str], *, expected: Iterable[str]) -> None:
        """Serve the base model and the `ready` adapters; requests for the `expected` ones get a "retry later"."""
        self._ready = frozenset(ready)
        self._expected = frozenset(expected)
        self._closed_because = ""

    def close(self, reason: str) -> None:
        """Answer every new request with 503; running answers continue."""
        self._closed_because = reason

    def set_slots(self, slots: int) -> None:
        """Create a new count of adapter slots for a new engine."""
        self._lease = SlotLease(slots)

    def count_in_flight(self) -> int:
        return self._lease.count_in_flight()

    def count_activity(self) -> int:
        """Return a number that grows with every request that begins or ends.

        While it is unchanged, the replica was idle.
        """
        return self._begun + self._ended

    def count_waiting(self) -> int:
        """Return how many requests wait for an adapter slot."""
        return self._lease.count_waiting()

    def is_busy(self) -> bool:
        """Return whether any answer is running or waiting."""
        return self._begun > self._ended or self._lease.count_waiting() > 0

    def is_used(self, model: str) -> bool:
        """Return whether an answer of this model is running."""
        return self._under_way[model] > 0

    def list_last_uses(self) -> dict[str, float]:
        """Return when each model last had a running request, in seconds of the monotonic clock."""
        return dict(self._last_used_at)

    def list_used_within(self, seconds: float) -> set[str]:
        """Return the adapters with a running request in the last `seconds`."""
        oldest = time.monotonic() - seconds
        return {name for name, used_at in self._last_used_at.items() if used_at >= oldest}

    def build_app(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_route("*", "/{path:.*}", self._answer)
        return app

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if request.raw_path not in ROUTES or request.method != "POST":
            return _refuse(404, "not_found", "Not found.")
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        if scheme != "Bearer" or not hmac.compare_digest(token.encode(), self._token):
            return _refuse(401, "invalid_token", "The replica token is missing or wrong.")
        try:
            model, body = _read_body(await request.read())
        except web.HTTPRequestEntityTooLarge:
            return _refuse(413, "request_too_large", f"The body may have at most {MAX_BODY_BYTES} bytes.")
        except ValueError as error:
            return _refuse(400, "invalid_request", str(error))
        refusal = self._check_model(model)
        if refusal is not None:
            return refusal
        if model == self._base_served_name:
            return await self._forward(request, model, body)
        try:
            async with self._lease.hold(model):
                return await self._forward(request, model, body)
        except SlotsBusy as busy:
            return _refuse(503, "replica_busy", f"The replica is busy: {busy}.")

    def _check_model(self, model: str) -> web.Response | None:
        """Return why this model is not served here, or None if it is. An unknown model never falls back to the base."""
        is_base = model == self._base_served_name
        is_adapter = LORA_NAME.fullmatch(model) is not None
        if (is_base or is_adapter) and self._closed_because:
            return _refuse(503, "replica_not_ready", f"The replica is not ready: {self._closed_because}.")
        if is_base or (is_adapter and model in self._ready):
            return None
        if is_adapter and model in self._expected:
            return _refuse(503, "model_loading", "The adapter is being loaded.")
        return _refuse(404, "model_not_found", "The model is not served by this replica.")

    async def _forward(self, request: web.Request, model: str, body: Mapping[str, object]) -> web.StreamResponse:
        fields = {name: value for name, value in body.items() if name in _FIELDS[request.path]}
        given = {name: request.headers.get(name, "") for name in _PASSED_ON}
        headers = {name: value for name, value in given.items() if _PASSED_ON[name].fullmatch(value)}
        self._record_use(model)
        self._begun += 1
        self._under_way[model] += 1
        try:
            async with self._engine.open_answer(request.path, msgspec.json.encode(fields), headers) as answer:
                if answer.status != 200:
                    return await self._explain(answer)
                return await _relay(request, answer)
        except (EngineDown, ClientError, TimeoutError):
            return await self._refuse_failed("The replica's engine does not answer.")
        finally:
            self._record_use(model)
            self._under_way[model] -= 1
            self._ended += 1

    def _record_use(self, model: str) -> None:
        self._last_used_at[model] = time.monotonic()

    async def _explain(self, answer: ClientResponse) -> web.Response:
        """Pass on errors that the caller can fix; hide paths and traces of internal engine errors."""
        body = await answer.read()
        if answer.status == 404:
            return _refuse(503, "model_loading", "The adapter is being loaded.")
        if answer.status in (400, 422):
            return web.Response(status=answer.status, body=body, content_type="application/json")
        if answer.status == 503:
            return _refuse(503, "replica_busy", "The replica is busy.")
        log.warning("engine answered %d: %s", answer.status, body[:500])
        if answer.status == 500 and not any(words in body for words in _DYING):
            return await self._refuse_failed("The replica's engine failed.")
        return _refuse(503, "replica_not_ready", "The replica's engine failed.")

    async def _refuse_failed(self, message: str) -> web.Response:
        """Refuse a request that the engine failed on. If the engine is healthy, only this request failed."""
        if await self._engine.is_well():
            return _refuse(500, "request_failed", "The replica's engine failed on this request.")
        return _refuse(503, "replica_not_ready", message)


async def _relay(request: web.Request, answer: ClientResponse) -> web.StreamResponse:
    """Stream the answer through. An interruption becomes a broken connection, never a clean end."""
    response = web.StreamResponse(status=200)
    for name in ("Content-Type", "Content-Length", "X-Request-Id"):
        if name in answer.headers:
            response.headers[name] = answer.headers[name]
    response.headers["Cache-Control"] = "no-cache"
    try:
        await response.prepare(request)
        async for chunk in answer.content.iter_any():
            await response.write(chunk)
        await response.write_eof()
    except (ClientError, TimeoutError, ConnectionResetError) as error:
        log.info("answer broke off: %r", error)
        if request.transport is not None:
            request.transport.abort()
    return response


def _read_body(data: bytes) -> tuple[str, dict[str, object]]:
    """Return the model that a request names, and the whole request; raises ValueError with the reason."""
    try:
        body = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError):
        raise ValueError("The body is not valid JSON.") from None
    if not isinstance(body, dict):
        raise ValueError("The body must be a JSON object.")
    model = body.get("model")
    if not isinstance(model, str) or not model:
        raise ValueError("'model' must name a model.")
    return model, body


def _refuse(status: int, code: str, message: str) -> web.Response:
    headers = {"Retry-After": "1"} if status == 503 else {}
    kind = "server_error" if status >= 500 else "invalid_request_error"
    body = {"error": {"message": message, "type": kind, "param": None, "code": code}}
    return web.json_response(body, status=status, headers=headers)
