"""What customers had the engine do, by its counters: without the agent's questions, across restarts of the agent."""

import asyncio
from pathlib import Path

from aiohttp import web
from msgspec import json, structs

from apps.contracts.serving import EngineCount
from gpu_workers.common.files import PRIVATE, replace_file
from gpu_workers.common.process_tree import Process
from gpu_workers.engine.client import EngineClient
from gpu_workers.engine.state import EnginePaths, EngineState
from gpu_workers.serving.traffic.token_count import TokenCounter

STATE = EngineState(
    generation="e1", served_name="b-demo", model_path="/m", launcher=Process(1, 1), keeper=Process(1, 1),
    max_loras=2, max_lora_rank=8,
)  # fmt: skip


class Engine:
    """Counts as vLLM does: every prompt and token of every caller."""

    def __init__(self) -> None:
        self.read, self.written = 0, 0
        self.holds = asyncio.Event()
        self.holds.set()

    async def complete(self, request: web.Request) -> web.Response:
        tokens = (await request.json())["max_tokens"]
        self.read, self.written = self.read + 5, self.written + tokens
        await self.holds.wait()
        logprobs = {"tokens": ["x"] * tokens, "token_logprobs": [-1.0] * tokens}
        usage = {"prompt_tokens": 5, "completion_tokens": tokens}
        return web.json_response({"choices": [{"logprobs": logprobs}], "usage": usage})

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "b-demo", "root": "/m"}]})

    async def metrics(self, request: web.Request) -> web.Response:
        label = '{engine="0",model_name="b-demo"}'
        lines = [f"vllm:prompt_tokens_total{label} {self.read}", f"vllm:generation_tokens_total{label} {self.written}"]
        return web.Response(text="\n".join(lines) + "\n")


def run(folder: Path, work) -> None:
    """Give `work` an engine that listens and a way to make an agent's client and counter for it."""
    paths = EnginePaths(folder)
    paths.folder.mkdir()
    replace_file(paths.state, json.encode(STATE), mode=PRIVATE)

    async def talk() -> None:
        engine, app = Engine(), web.Application()
        app.router.add_post("/v1/completions", engine.complete)
        app.router.add_get("/metrics", engine.metrics)
        app.router.add_get("/v1/models", engine.models)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.UnixSite(runner, str(paths.socket)).start()
        clients: list[EngineClient] = []

        def make_agent() -> tuple[EngineClient, TokenCounter]:
            counter = TokenCounter(paths)
            clients.append(EngineClient(paths.socket, record_asked=counter.record_asked))
            return clients[-1], counter

        try:
            await work(engine, make_agent)
        finally:
            for client in clients:
                await client.close()
            await runner.cleanup()

    asyncio.run(talk())


def seen(counter: TokenCounter) -> EngineCount:
    return structs.replace(counter.seen(), age_seconds=0.0)


def test_the_agents_own_questions_are_no_customers_also_after_its_restart(tmp_path: Path) -> None:
    async def work(engine, make_agent) -> None:
        client, counter = make_agent()
        await client.ask_canary("b-demo")
        engine.read, engine.written = engine.read + 100, engine.written + 40  # a customer
        await counter.read(client, STATE)
        assert seen(counter) == EngineCount(input_tokens=100, output_tokens=40)

        client, counter = make_agent()
        await client.touch("b-demo")
        await counter.read(client, STATE)
        assert seen(counter) == EngineCount(input_tokens=100, output_tokens=40)

        engine.read, engine.written = 7, 0  # the next start counts from nothing
        await counter.read(client, structs.replace(STATE, generation="e2"))
        assert seen(counter) == EngineCount(input_tokens=7, output_tokens=0)

    run(tmp_path, work)


def test_while_a_question_of_its_own_is_under_way_the_last_reading_stays(tmp_path: Path) -> None:
    async def work(engine, make_agent) -> None:
        client, counter = make_agent()
        await counter.read(client, STATE)
        engine.holds.clear()
        asking = asyncio.create_task(client.touch("b-demo"))
        while not engine.written:
            await asyncio.sleep(0)
        await counter.read(client, STATE)
        assert seen(counter) == EngineCount(input_tokens=0, output_tokens=0)

        engine.holds.set()
        await asking
        await counter.read(client, STATE)
        assert seen(counter) == EngineCount(input_tokens=0, output_tokens=0)

    run(tmp_path, work)
