"""The pass-through to the gateway, over real sockets: uvicorn in front, a server of our own behind."""

import asyncio
import io
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import uvicorn
from aiohttp import web

from apps.core.http.body_limits import BodyLimit, LimitBodies
from apps.interfaces.web.edge.front_door import FrontDoor
from tests.support.asgi import NO_LIMITS

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
CHAT = "/v1/chat/completions"


async def other_application(scope: Any, receive: Any, send: Any) -> None:
    """Stands where Django stands: reads the body to its end, then says which path it was asked for."""
    size, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        size += len(message.get("body", b""))
        more = message.get("more_body", False)
    body = json.dumps({"path": scope["path"], "bytes": size}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _leave_out_date(_: web.Request, response: web.StreamResponse) -> None:
    """Answer without a date, as the gateway does: the front door's server writes it."""
    del response.headers["Date"]


@asynccontextmanager
async def gateway(handler: Handler, folder: Path) -> AsyncIterator[str]:
    application = web.Application(client_max_size=2**30)
    application.router.add_post("/{path:.*}", handler)
    application.on_response_prepare.append(_leave_out_date)
    runner = web.AppRunner(application, handler_cancellation=True, shutdown_timeout=1)
    await runner.setup()
    await web.UnixSite(runner, str(folder / "gateway.sock")).start()
    try:
        yield f"unix://{folder}/gateway.sock"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def serving(application: Any) -> AsyncIterator[aiohttp.ClientSession]:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(application, log_level="error", lifespan="on", ws="none"))
    running = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        async with aiohttp.ClientSession(f"http://127.0.0.1:{listener.getsockname()[1]}") as session:
            while not server.started:
                await asyncio.sleep(0.01)
            yield session
    finally:
        server.should_exit = True
        await running
        listener.close()


@asynccontextmanager
async def front_door(handler: Handler, folder: Path) -> AsyncIterator[aiohttp.ClientSession]:
    async with (
        gateway(handler, folder) as url,
        serving(FrontDoor(other_application, gateway_url=url, limits=NO_LIMITS)) as session,
    ):
        yield session


async def test_inference_goes_to_the_gateway_and_the_rest_does_not(tmp_path: Path) -> None:
    async def echo(request: web.Request) -> web.Response:
        seen = {name.lower(): value for name, value in request.headers.items()}
        return web.json_response({"path": request.path, "body": await request.text(), "headers": seen}, status=418)

    async with front_door(echo, tmp_path) as client:
        headers = {"Authorization": "Bearer ann_live_x", "Cookie": "sessionid=1", "x-request-id": "my-own-id"}
        async with client.post(CHAT, data='{"model":"m"}', headers=headers) as response:
            answer = await response.json()
            assert response.status == 418
            assert len(response.headers.getall("date")) == 1
        assert answer["path"] == CHAT
        assert answer["body"] == '{"model":"m"}'
        assert answer["headers"]["authorization"] == "Bearer ann_live_x"
        assert answer["headers"]["x-request-id"] == "my-own-id"
        assert "cookie" not in answer["headers"]
        for method, path in (("GET", CHAT), ("POST", "/v1/files"), ("POST", CHAT + "/"), ("GET", "/")):
            async with client.request(method, path) as response:
                assert (await response.json())["path"] == path
                assert len(response.headers.getall("date")) == 1


async def test_an_answer_streams_as_it_is_written(tmp_path: Path) -> None:
    go_on = asyncio.Event()

    async def stream(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: one\n\n")
        await go_on.wait()
        await response.write(b"data: two\n\n")
        return response

    async with front_door(stream, tmp_path) as client, client.post(CHAT, data=b"{}") as response:
        assert await response.content.readany() == b"data: one\n\n"
        go_on.set()
        assert await response.content.read() == b"data: two\n\n"


async def test_a_request_streams_as_it_is_sent(tmp_path: Path) -> None:
    arrived = asyncio.Event()

    async def count(request: web.Request) -> web.Response:
        size = 0
        async for chunk in request.content.iter_any():
            size += len(chunk)
            arrived.set()
        return web.json_response(size)

    async def body() -> AsyncIterator[bytes]:
        yield b"x" * 1000
        await arrived.wait()
        yield b"y" * 1_000_000

    async with front_door(count, tmp_path) as client, client.post(CHAT, data=body()) as response:
        assert await response.json() == 1_001_000


@pytest.mark.parametrize("when", ["before the answer", "during the answer"])
async def test_a_client_that_leaves_takes_its_request_along(when: str, tmp_path: Path) -> None:
    begun, cancelled = asyncio.Event(), asyncio.Event()

    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        try:
            await request.read()
            if when == "during the answer":
                await response.prepare(request)
                await response.write(b"data: one\n\n")
            begun.set()
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return response

    async with front_door(endless, tmp_path) as client:
        request = asyncio.create_task(client.post(CHAT, data=b"{}"))
        await begun.wait()
        if when == "during the answer":
            (await request).close()
        else:
            request.cancel()
        await asyncio.wait_for(cancelled.wait(), 30)


async def test_without_a_gateway_it_says_so_in_openais_shape(tmp_path: Path) -> None:
    door = FrontDoor(other_application, gateway_url=f"unix://{tmp_path}/nobody.sock", limits=NO_LIMITS)
    async with serving(door) as client, client.post(CHAT, data=b"{}") as response:
        assert response.status == 503
        assert (await response.json())["error"]["code"] == "service_unavailable"
        assert response.headers["Retry-After"]
        assert response.headers["x-request-id"]


async def test_only_pages_of_named_origins_may_call_the_api(tmp_path: Path) -> None:
    ours, others = "https://app.example.com", "https://evil.example.com"
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}

    door = FrontDoor(other_application, gateway_url="unix:///none", limits=NO_LIMITS, origins=[ours])
    async with serving(door) as client:
        for path in (CHAT, "/v1/files", "/api/v1/keys"):
            async with client.options(path, headers={"Origin": ours, **asked}) as preflight:
                assert preflight.status == 200
                assert preflight.headers["Access-Control-Allow-Origin"] == ours
                assert int(preflight.headers["Access-Control-Max-Age"]) > 600
                assert "Access-Control-Allow-Credentials" not in preflight.headers
            async with client.options(path, headers={"Origin": others, **asked}) as preflight:
                assert "Access-Control-Allow-Origin" not in preflight.headers
        async with client.get("/v1/files", headers={"Origin": ours}) as answer:
            assert answer.headers.getall("Access-Control-Allow-Origin") == [ours]
        async with client.get("/jobs", headers={"Origin": ours}) as answer:
            assert "Access-Control-Allow-Origin" not in answer.headers


async def test_pages_of_named_origins_can_read_refusals_of_inference_and_their_headers(tmp_path: Path) -> None:
    ours = "https://app.example.com"

    async def answer(request: web.Request) -> web.Response:
        headers = {"Access-Control-Allow-Origin": ours, "Vary": "Origin", "x-ratelimit-limit-requests": "60"}
        return web.json_response({}, headers=headers)

    async def ask(client: aiohttp.ClientSession, size: int) -> tuple[int, list[str], str]:
        async with client.post(CHAT, data=io.BytesIO(bytes(size)), headers={"Origin": ours}) as answer:
            exposed = answer.headers.get("Access-Control-Expose-Headers", "").lower()
            return answer.status, answer.headers.getall("Access-Control-Allow-Origin", []), exposed

    async with gateway(answer, tmp_path) as url:
        door = FrontDoor(other_application, gateway_url=url, limits=NO_LIMITS, origins=[ours])
        async with serving(door) as client:
            answered, too_large = await ask(client, 2), await ask(client, 5 * 1024**2)
    door = FrontDoor(other_application, gateway_url=f"unix://{tmp_path}/nobody", limits=NO_LIMITS, origins=[ours])
    async with serving(door) as client:
        unavailable = await ask(client, 2)

    assert [status for status, *_ in (answered, too_large, unavailable)] == [200, 413, 503]
    for _, origins, exposed in (answered, too_large, unavailable):
        assert origins == [ours]
        for name in ("x-should-retry", "retry-after-ms", "x-ratelimit-remaining-tokens", "content-range"):
            assert name in exposed.split(", ")


async def test_an_answer_cut_short_by_the_gateway_is_not_taken_for_a_whole_one(tmp_path: Path) -> None:
    async def dying(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"data: one\n\n")
        request.transport.abort()
        return response

    async with front_door(dying, tmp_path) as client, client.post(CHAT, data=b"{}") as response:
        with pytest.raises(aiohttp.ClientPayloadError):
            await response.read()


@pytest.mark.slow
@pytest.mark.parametrize("is_declared", [True, False])
async def test_a_body_above_its_limit_is_413(is_declared: bool, tmp_path: Path) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(300):
            yield b"x" * 10_000

    limited = LimitBodies(other_application, [BodyLimit("POST", "/v1/files", 1_000_000)])

    async def application(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await FrontDoor(other_application, gateway_url="unix:///none", limits=NO_LIMITS)(scope, receive, send)
        else:
            await limited(scope, receive, send)

    async with serving(application) as client:
        data = io.BytesIO(b"x" * 3_000_000) if is_declared else chunks()
        async with client.post("/v1/files", data=data) as response:
            assert response.status == 413
            assert (await response.json())["error"]["code"] == "request_too_large"
        async with client.post("/v1/files", data=io.BytesIO(b"x" * 1_000_000)) as response:
            assert (await response.json())["bytes"] == 1_000_000
