"""What the agent says to vLLM to load an adapter, as it arrives on the engine's socket."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from gpu_workers.engine_client import EngineClient

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
