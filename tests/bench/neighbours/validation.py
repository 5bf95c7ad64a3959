"""Files: from an upload to its verdict, while another tenant uploads what takes longest to read."""

import asyncio
import gzip
import itertools
import json

import aiohttp

from tests.bench.neighbours.api import file_form
from tests.bench.neighbours.stage import Platform
from tests.bench.neighbours.traffic import BadAnswer, Entrance, as_key, get, send

_POLL_SECONDS = 0.05
_ROW = {"messages": [{"role": "user", "content": "Where is card %d?"}, {"role": "assistant", "content": "On its way."}]}


def entrances(platform: Platform) -> dict[str, Entrance]:
    numbers = itertools.count()

    async def validate(client: aiohttp.ClientSession) -> None:
        rows = b"".join(json.dumps(_ROW).replace("%d", f"{next(numbers)}").encode() + b"\n" for _ in range(50))
        headers = as_key(platform.working)
        file_id = (await get(client, "POST", "/v1/files", headers, file_form(rows)))["id"]
        while (status := (await get(client, "GET", f"/v1/files/{file_id}", headers))["status"]) == "uploaded":
            await asyncio.sleep(_POLL_SECONDS)
        if status != "processed":
            raise BadAnswer(f"a good file is {status}")

    def against(content: bytes, filename: str) -> Entrance:
        attacker = platform.make_tenant()

        async def upload(client: aiohttp.ClientSession, number: int) -> int:
            return (await send(client, "POST", "/v1/files", as_key(attacker, number), file_form(content, filename)))[0]

        return Entrance(
            validate, upload, attacker, seconds=6.0, forget=lambda: platform.forget_work(attacker.organization_id)
        )

    return {
        "files beside many small ones": against(json.dumps(_ROW).encode() + b"\n", "one.jsonl"),
        "files beside slow ones": against(_slow_rows(), "slow.jsonl"),
        "files beside packed ones": against(gzip.compress(_plain_rows(60_000_000)), "packed.jsonl.gz"),
    }


def _slow_rows() -> bytes:
    """Rows that the quick reader leaves to the strict one, just within the lane of small files."""
    call = {
        "id": "c",
        "type": "function",
        "function": {"name": "f", "arguments": json.dumps({"a": [[{"b": "\\u0041"}]]})},
    }
    turn = [{"role": "user", "content": "\u0041\u00e9"}, {"role": "assistant", "tool_calls": [call]}]
    turn += [{"role": "tool", "tool_call_id": "c", "content": "x"}, {"role": "assistant", "content": "y"}]
    row = json.dumps({"messages": turn}).encode() + b"\n"
    return row * (3_900_000 // len(row))


def _plain_rows(size: int) -> bytes:
    row = json.dumps(_ROW).encode() + b"\n"
    return row * (size // len(row))
