"""What the agent says to vLLM to load and to try an adapter, as it arrives on the engine's socket."""

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from gpu_workers.engine.client import Canary, EngineClient

NAME = "a-" + "0" * 26


def said_to_engine(socket: Path, lora_name: str, folder: Path) -> list[dict[str, Any]]:
    """Return the bodies a listening engine got from one `load_adapter`."""
    bodies: list[dict[str, Any]] = []

    async def load(request: web.Request) -> web.Response:
        bodies.append(await request.json())
        return web.Response()

    async def talk() -> None:
        engine = web.Application()
        engine.router.add_post("/v1/load_lora_adapter", load)
        runner = web.AppRunner(engine)
        await runner.setup()
        await web.UnixSite(runner, str(socket)).start()
        client = EngineClient(socket)
        try:
            await client.load_adapter(lora_name, folder)
        finally:
            await client.close()
            await runner.cleanup()

    asyncio.run(talk())
    return bodies


def test_a_load_names_adapter_and_folder_and_nothing_that_would_swap_weights_in_place(tmp_path: Path) -> None:
    [body] = said_to_engine(tmp_path / "engine.sock", NAME, tmp_path / "adapter")

    assert body == {"lora_name": NAME, "lora_path": str(tmp_path / "adapter")}


@pytest.mark.parametrize("name", ["text", "b-demo", "../x", NAME + "\n", NAME.upper()])
def test_no_other_name_than_ours_reaches_the_engine(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="no adapter of ours"):
        said_to_engine(tmp_path / "engine.sock", name, tmp_path / "adapter")


async def ask_canary(socket: Path, bodies: list[dict[str, Any]], *, room: int | None, long: dict[str, Any]) -> Canary:
    """Return what the agent makes of an engine that says "x" to a short prompt and `long` to a long one."""

    async def complete(request: web.Request) -> web.Response:
        bodies.append(await request.json())
        said = long if "truncate_prompt_tokens" in bodies[-1] else {"tokens": ["x"], "token_logprobs": [-1.0]}
        usage = {"prompt_tokens": 5, "completion_tokens": 1}
        return web.json_response({"choices": [{"logprobs": said}], "usage": usage})

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "b-demo", "root": "/m", "max_model_len": room}]})

    engine = web.Application()
    engine.router.add_post("/v1/completions", complete)
    engine.router.add_get("/v1/models", models)
    runner = web.AppRunner(engine)
    await runner.setup()
    await web.UnixSite(runner, str(socket)).start()
    client = EngineClient(socket)
    try:
        return await client.ask_canary(NAME)
    finally:
        await client.close()
        await runner.cleanup()


def canary(socket: Path, *, room: int | None = None, **long: Any) -> tuple[Canary, list[dict[str, Any]]]:
    bodies: list[dict[str, Any]] = []
    said = {"tokens": ["y"], "token_logprobs": [-2.0]} | long
    return asyncio.run(ask_canary(socket, bodies, room=room, long=said)), bodies


@pytest.mark.parametrize(("room", "tokens"), [(None, 2_000), (32_768, 2_000), (512, 504)])
def test_a_canary_asks_a_short_prompt_and_one_of_2000_tokens_or_as_long_as_the_engine_takes(
    tmp_path: Path, room: int | None, tokens: int
) -> None:
    _, (short, long) = canary(tmp_path / "engine.sock", room=room)

    assert all(body["temperature"] == 0 and body["model"] == NAME for body in (short, long))
    assert len(short["prompt"].split()) < 10 and "truncate_prompt_tokens" not in short
    assert len(long["prompt"].split()) >= 2_000 and long["truncate_prompt_tokens"] == tokens


@pytest.mark.parametrize("wrong", [{"token_logprobs": [None]}, {"tokens": [], "token_logprobs": []}])
def test_numbers_that_are_wrong_after_the_long_prompt_alone_are_seen(tmp_path: Path, wrong: dict[str, Any]) -> None:
    found, _ = canary(tmp_path / "engine.sock", **wrong)

    assert found.logprobs[0] == -1.0 and math.isnan(found.logprobs[1])
    assert not found.is_finite()


def test_an_adapter_that_differs_after_the_long_prompt_alone_differs(tmp_path: Path) -> None:
    base, _ = canary(tmp_path / "base.sock")
    same, _ = canary(tmp_path / "same.sock")
    other, _ = canary(tmp_path / "other.sock", token_logprobs=[-2.1])

    assert not same.differs_from(base) and other.differs_from(base)
