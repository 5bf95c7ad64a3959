"""Inference: one tenant's chats beside what costs the gateway most, and its pages beside another's chats."""

import itertools
import json
from collections.abc import Callable
from typing import Any

import aiohttp

from apps.accounts.login.api_keys import LIVE_PREFIX, new_secret
from tests.bench.neighbours.stage import Platform, Tenant
from tests.bench.neighbours.traffic import Attack, Entrance, as_key, as_person, get, send, sending, trickling

_PATH = "/v1/chat/completions"
_HI = [{"role": "user", "content": "Hi"}]


def entrances(platform: Platform) -> dict[str, Entrance]:
    numbers = itertools.count()
    deep = "[" * 1500 + "]" * 1500
    called = {"id": "c", "type": "function", "function": {"name": "f", "arguments": deep}}
    counted = [{"type": "integer", "minimum": -(10**17) + n, "maximum": 10**18 - 7} for n in range(90)]
    many_messages = f'{{"model":"{platform.model}","messages":{json.dumps(_HI * 100_000)}}}'.encode()

    async def chat(client: aiohttp.ClientSession) -> None:
        body = {"model": platform.model, "messages": _HI, "max_tokens": 8}
        await get(client, "POST", _PATH, as_key(platform.working), body)

    def schema(**fields: Any) -> dict[str, Any]:
        named = {"name": "s", "schema": fields | {"title": str(next(numbers))}}  # each is new to every cache
        return {"response_format": {"type": "json_schema", "json_schema": named}}

    def regex() -> dict[str, Any]:
        return schema(type="string", pattern="(a|b|c){1,60}" * 16)

    def large_schema() -> dict[str, Any]:
        return schema(type="object", properties={f"p{n}": one for n, one in enumerate(counted)})

    def asking(make: Callable[[], dict[str, Any]] = dict, **fields: Any) -> Entrance:
        return calling(_PATH, lambda: {"messages": _HI, "max_tokens": 8} | fields | make())

    def calling(path: str, make: Callable[[], dict[str, Any]]) -> Entrance:
        attacker = platform.make_tenant()
        return against(sending(attacker, "POST", path, lambda: {"model": platform.model} | make()), attacker)

    def against(attack: Attack, attacker: Tenant) -> Entrance:
        return Entrance(chat, attack, attacker, seconds=2.0, pause_seconds=0.02)

    async def wrong_key(client: aiohttp.ClientSession, number: int) -> int:
        headers = {"Authorization": f"Bearer {new_secret(LIVE_PREFIX)}"}
        return (await send(client, "POST", _PATH, headers, {"model": platform.model, "messages": _HI}))[0]

    async def browse(client: aiohttp.ClientSession) -> None:
        await get(client, "GET", "/jobs", as_person(platform.working))

    def stream() -> dict[str, Any]:
        return {"model": platform.model, "messages": _HI, "max_tokens": 8, "stream": True}

    lots, slow, streaming = platform.make_tenant(), platform.make_tenant(), platform.make_tenant()
    return {
        "inference beside chats": asking(),
        "inference beside streamed chats": asking(stream=True),
        "inference beside completions": calling("/v1/completions", lambda: {"prompt": "Hi", "max_tokens": 8}),
        "inference beside responses": calling("/v1/responses", lambda: {"input": "Hi", "max_output_tokens": 16}),
        "inference beside regexes": asking(make=regex),
        "inference beside large schemas": asking(make=large_schema),
        "inference beside deep arguments": asking(messages=[*_HI, {"role": "assistant", "tool_calls": [called]}, *_HI]),
        "inference beside many messages": against(sending(lots, "POST", _PATH, lambda: many_messages), lots),
        "inference beside slow bodies": against(trickling(slow, _PATH, part_bytes=2_000, seconds_apart=0.5), slow),
        "inference beside wrong keys": against(wrong_key, platform.make_tenant()),
        # Inference passes through the web process, whose interpreter the pages use.
        "pages beside streamed chats": Entrance(browse, sending(streaming, "POST", _PATH, stream), streaming),
    }
