"""An HTTP server that streams as vLLM 0.32 does behind its proxy, from a script: answers, refusals and bad endings.

What only an engine can show (real tokens, real adapters, real aborts) is left to the end-to-end tests; this one can
fail on demand. Field names and orders were taken from the engine's own streams.
"""

import asyncio
import fcntl
import json
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

TOKEN = "replica-token-of-the-tests"


@dataclass(frozen=True)
class Script:
    """How one prompt is answered."""

    tokens: tuple[str, ...] = ("Hello", " there", ".")
    prompt_tokens: int = 11
    cached_tokens: int = 0
    finish: str | None = "stop"
    calls: tuple[tuple[str, str, tuple[str, ...]], ...] = ()  # id, function, parts of the arguments
    delay_seconds: float = 0.0
    is_paced: bool = False  # writes a token when the last one was read, as no socket's buffer lets others see
    has_usage: bool = True  # the sums at the end, without which an answer is not whole
    status: int = 200
    error: dict[str, Any] = field(default_factory=dict)
    fails_after: int | None = None  # tokens, then an error event and [DONE]
    breaks_after: int | None = None  # tokens, then the connection is gone


class ScriptedEngine:
    """Listens on a Unix socket in a thread of its own."""

    def __init__(self, socket_path: Path) -> None:
        self.url = f"unix://{socket_path}"
        self.scripts: dict[str, Script] = {}
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.generated: dict[str, int] = {}
        self._socket_path = socket_path
        self._loop = asyncio.new_event_loop()
        self._runner: web.AppRunner | None = None

    @contextmanager
    def running(self) -> Iterator["ScriptedEngine"]:
        thread = threading.Thread(target=self._loop.run_forever)
        thread.start()
        runner = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(60)
        try:
            yield self
        finally:
            asyncio.run_coroutine_threadsafe(runner.cleanup(), self._loop).result(60)
            self._loop.call_soon_threadsafe(self._loop.stop)
            thread.join()
            self._loop.close()

    def count_connections(self) -> int:
        assert self._runner is not None and self._runner.server is not None
        return len(self._runner.server.connections)

    async def _start(self) -> web.AppRunner:
        app = web.Application(client_max_size=8 * 2**20)
        app.router.add_post("/v1/chat/completions", self._answer)
        app.router.add_post("/v1/completions", self._answer)
        self._runner = runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1)
        await runner.setup()
        await web.UnixSite(runner, str(self._socket_path)).start()
        return runner

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        prompt = body["messages"][-1]["content"] if "messages" in body else body["prompt"]
        text = prompt if isinstance(prompt, str) else str(prompt[0])
        script = self.scripts.get(text, Script())
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            return web.json_response({"error": {"message": "no", "type": "x", "code": "invalid_token"}}, status=401)
        if script.status != 200:
            return web.json_response({"error": script.error}, status=script.status)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        await _Stream(self, request, response, body, script, text).write()
        return response


@dataclass
class _Stream:
    engine: ScriptedEngine
    request: web.Request
    response: web.StreamResponse
    body: dict[str, Any]
    script: Script
    text: str

    async def write(self) -> None:
        choices = self._choices()
        if "messages" in self.body:
            for index in range(choices):
                await self._choice(index, delta={"role": "assistant", "content": ""}, count=0)
        sent = 0
        for place, token in enumerate(self.script.tokens):
            for index in range(choices):
                if sent in (self.script.fails_after, self.script.breaks_after):
                    await self._until_read()
                if sent == self.script.fails_after:
                    fault = {"message": "EngineCore encountered an issue at /opt/vllm/x.py", "code": 500}
                    await self._event({"error": self.script.error or fault})
                    await self.response.write(b"data: [DONE]\n\n")
                    return
                if sent == self.script.breaks_after:
                    self.request.transport.abort()
                    return
                await asyncio.sleep(self.script.delay_seconds)
                if self.script.is_paced:
                    await self._until_read()
                sent += 1
                self.engine.generated[self.text] = sent
                await self._choice(index, token=token, count=place + 1)
        await self._calls()
        if self.script.finish == "abort":
            await self._until_read()
        for index in range(choices):
            await self._choice(index, token="", count=len(self.script.tokens), finish_reason=self.script.finish)
        if self.script.has_usage:
            await self._event(self._chunk([], self._usage(self._prompts() * self.script.prompt_tokens, self._total())))
        await self.response.write(b"data: [DONE]\n\n")

    async def _until_read(self) -> None:
        """Wait until the gateway has read everything: a bad end read together with tokens comes before them."""
        transport = self.request.transport
        descriptor = transport.get_extra_info("socket").fileno()
        while transport.get_write_buffer_size() or any(fcntl.ioctl(descriptor, termios.TIOCOUTQ, bytes(4))):
            await asyncio.sleep(0.001)

    async def _calls(self) -> None:
        for number, (call_id, name, parts) in enumerate(self.script.calls):
            head = {"index": number, "id": call_id, "type": "function", "function": {"name": name, "arguments": ""}}
            await self._choice(0, count=1, delta={"tool_calls": [head]})
            for part in parts:
                call = {"index": number, "function": {"arguments": part}}
                await self._choice(0, count=1, delta={"tool_calls": [call]})

    def _prompts(self) -> int:
        prompt = self.body.get("prompt")
        return len(prompt) if isinstance(prompt, list) and not isinstance(prompt[0], int) else 1

    def _choices(self) -> int:
        return self._prompts() * (self.body.get("n") or 1)

    def _total(self) -> int:
        return self._choices() * len(self.script.tokens)

    async def _choice(
        self, index: int, *, count: int, token: str = "", delta: dict | None = None, finish_reason: str | None = None
    ) -> None:
        choice: dict[str, Any] = {"index": index, "finish_reason": finish_reason, "logprobs": None, "token_ids": None}
        if "messages" in self.body:
            choice["delta"] = delta or {"content": token}
            if self.body.get("logprobs") and token:
                choice["logprobs"] = {"content": [{"token": token, "logprob": -0.5, "bytes": [1], "top_logprobs": []}]}
        else:
            choice["text"] = token
            if self.body.get("logprobs") and token:
                choice["logprobs"] = {"tokens": [token], "token_logprobs": [-0.5], "text_offset": [0]}
        await self._event(self._chunk([choice], self._usage(self.script.prompt_tokens, count)))

    def _usage(self, prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.script.cached_tokens},
        }

    def _chunk(self, choices: list[dict], usage: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": "chatcmpl-engine-id",
            "object": "chunk",
            "created": 1,
            "model": self.body["model"],
            "choices": choices,
            "usage": usage,
            "prompt_token_ids": None,
        }

    async def _event(self, payload: dict[str, Any]) -> None:
        await self.response.write(b"data: " + json.dumps(payload).encode() + b"\n\n")
