"""What the replica's door lets through, without an engine: two routes, known models, allowed fields."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest
from aiohttp.test_utils import TestClient, TestServer

from gpu_workers.engine.client import EngineClient, EngineDown
from gpu_workers.serving.traffic.front_door import FrontDoor

TOKEN = "replica-token-of-this-test"
BASE, GOOD = "b-demo", "a-" + "good".ljust(26, "0")
AUTHORIZED = {"Authorization": f"Bearer {TOKEN}"}


class Engine:
    """Takes requests down and answers none, or with the refusal it is given."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.answer: tuple[int, dict[str, Any]] | None = None
        self.is_healthy = True

    @asynccontextmanager
    async def open_answer(self, path: str, body: bytes, headers: dict[str, str]) -> AsyncIterator[Any]:
        self.bodies.append(json.loads(body))
        self.headers.append(headers)
        if self.answer is None:
            raise EngineDown("none")
        status, content = self.answer
        yield SimpleNamespace(status=status, read=AsyncMock(return_value=json.dumps(content).encode()))

    async def is_well(self) -> bool:
        return self.is_healthy


def at_the_door(check: Callable[[TestClient, Engine], Awaitable[None]]) -> None:
    async def run() -> None:
        engine = Engine()
        door = FrontDoor(engine, token=TOKEN, base_served_name=BASE)  # type: ignore[arg-type]
        door.open_for([GOOD], expected=[])
        async with TestClient(TestServer(door.build_app())) as client:
            await check(client, engine)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/adapters"),
        ("DELETE", f"/adapters/{GOOD}"),
        ("POST", "/v1/load_lora_adapter"),
        ("POST", "/invocations"),
        ("POST", "/tokenize"),
        ("GET", "/metrics"),
        ("GET", "/v1/models"),
        ("GET", "/v1/completions"),
        ("POST", "/v1/completions/"),
    ],
)
def test_routes_that_the_engine_leaves_open_are_closed(method: str, path: str) -> None:
    async def check(client: TestClient, engine: Engine) -> None:
        answer = await client.request(method, path, json={"model": GOOD, "prompt": "Hi"}, headers=AUTHORIZED)
        assert (answer.status, engine.bodies) == (404, [])

    at_the_door(check)


@pytest.mark.parametrize("model", [None, "", 7, ["x"]])
def test_no_model_is_never_the_base(model: object) -> None:
    async def check(client: TestClient, engine: Engine) -> None:
        for body in ({"model": model, "prompt": "Hi"}, {"prompt": "Hi"}):
            answer = await client.post("/v1/completions", json=body, headers=AUTHORIZED)
            assert (answer.status, engine.bodies) == (400, [])

    at_the_door(check)


@pytest.mark.parametrize("model", ["text", "image", "a-" + "0" * 26, f"{GOOD}\n", "../x"])
def test_a_model_that_is_not_loaded_is_not_found(model: str) -> None:
    async def check(client: TestClient, engine: Engine) -> None:
        answer = await client.post("/v1/completions", json={"model": model, "prompt": "Hi"}, headers=AUTHORIZED)
        assert (answer.status, engine.bodies) == (404, [])

    at_the_door(check)


def test_fields_that_are_not_ours_stay_outside() -> None:
    private = {"prompt_logprobs": 1, "kv_transfer_params": {}, "priority": 1, "chat_template": "x", "lora_path": "/x"}

    async def check(client: TestClient, engine: Engine) -> None:
        body = {"model": GOOD, "prompt": "Hi", "max_tokens": 2, "cache_salt": "s"}
        await client.post("/v1/completions", json=body | private, headers=AUTHORIZED)
        assert engine.bodies == [body]

    at_the_door(check)


def test_no_header_of_the_callers_goes_further_but_a_plain_request_id() -> None:
    private = {"X-Vllm-Priority": "-5", "X-data-parallel-rank": "1", "X-Session-ID": "s", "Cookie": "c"}

    async def check(client: TestClient, engine: Engine) -> None:
        for request_id in ("req_1", "two words", "é", "x" * 200):
            headers = AUTHORIZED | private | {"X-Request-Id": request_id}
            await client.post("/v1/completions", json={"model": GOOD, "prompt": "Hi"}, headers=headers)
        assert engine.headers == [{"X-Request-Id": "req_1"}, {}, {}, {}]

    at_the_door(check)


def test_the_trace_of_a_request_reaches_the_engine_if_it_is_well_formed() -> None:
    traceparent = f"00-{'a' * 32}-{'b' * 16}-01"

    async def check(client: TestClient, engine: Engine) -> None:
        for sent in (traceparent, traceparent + "-more", "anything"):
            headers = AUTHORIZED | {"Traceparent": sent, "Tracestate": "x=1"}
            await client.post("/v1/completions", json={"model": GOOD, "prompt": "Hi"}, headers=headers)
        assert engine.headers == [{"Traceparent": traceparent}, {}, {}]

    at_the_door(check)


@pytest.mark.parametrize(
    ("status", "message", "is_well", "answered"),
    [
        (500, "maximum recursion depth exceeded at /opt/vllm/x.py", True, (500, "request_failed")),
        (500, "maximum recursion depth exceeded at /opt/vllm/x.py", False, (503, "replica_not_ready")),
        (500, "EngineCore encountered an issue.", True, (503, "replica_not_ready")),
        (500, "cannot schedule new futures after shutdown", True, (503, "replica_not_ready")),
        (503, "The engine is currently busy", True, (503, "replica_busy")),
    ],
)
def test_a_failure_on_one_request_is_told_apart_from_one_of_the_engine(status, message, is_well, answered) -> None:
    async def check(client: TestClient, engine: Engine) -> None:
        engine.is_healthy = is_well
        engine.answer = status, {"error": {"message": message, "code": status}}
        answer = await client.post("/v1/completions", json={"model": GOOD, "prompt": "Hi"}, headers=AUTHORIZED)
        told = (await answer.json())["error"]
        assert ((answer.status, told["code"]), "vllm" in told["message"]) == (answered, False)

    at_the_door(check)


@pytest.mark.parametrize(
    ("is_well", "answered"), [(True, (500, "request_failed")), (False, (503, "replica_not_ready"))]
)
def test_a_connection_that_a_healthy_engine_closes_is_the_fault_of_one_request(is_well, answered) -> None:
    async def check(client: TestClient, engine: Engine) -> None:
        engine.is_healthy = is_well
        answer = await client.post("/v1/completions", json={"model": GOOD, "prompt": "Hi"}, headers=AUTHORIZED)
        assert (answer.status, (await answer.json())["error"]["code"]) == answered

    at_the_door(check)


def test_nobody_without_the_token_gets_in() -> None:
    async def check(client: TestClient, engine: Engine) -> None:
        answer = await client.post("/v1/completions", json={"model": GOOD, "prompt": "Hi"})
        assert (answer.status, engine.bodies) == (401, [])

    at_the_door(check)


def test_weights_are_loaded_under_a_name_of_ours_and_never_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[dict[str, str]] = []

    async def note(self: EngineClient, method: str, path: str, **options: Any) -> bytes:
        sent.append(options["json"])
        return b""

    async def run() -> None:
        engine = EngineClient(Path("/nowhere"))
        await engine.load_adapter(GOOD, Path("/adapters/sha256-1"))
        for name, path in (("text", Path("/x")), (GOOD, Path("relative"))):
            with pytest.raises(ValueError, match="no adapter of ours"):
                await engine.load_adapter(name, path)
        await engine.close()

    monkeypatch.setattr(EngineClient, "_request", note)
    asyncio.run(run())

    assert sent == [{"lora_name": GOOD, "lora_path": "/adapters/sha256-1"}]
