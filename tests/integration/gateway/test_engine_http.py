"""A replica that falls silent is given up on in time, also on a connection that was kept."""

import asyncio
from contextlib import asynccontextmanager, suppress

import pytest

from apps.contracts.addresses.replicas import AddressRules
from apps.interfaces.gateway.engines import engine_http
from apps.interfaces.gateway.engines.engine_http import Broken, EngineResponse, ReplicaClient, Unreachable

HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n"


@asynccontextmanager
async def replica_that_answers(*answers: bytes):
    """Give the replica at a server that gives one of the answers to each request, and none to those after them."""
    left, connections = list(answers), []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(asyncio.current_task())
        with suppress(ConnectionResetError):
            while await reader.read(65536):
                if left:
                    writer.write(left.pop(0))
        writer.close()
        with suppress(ConnectionResetError):
            await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    replica = ReplicaClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    try:
        yield replica
    finally:
        replica.close()
        await asyncio.gather(*connections)
        server.close()


async def post(replica: ReplicaClient) -> EngineResponse:
    return await replica.post("/v1/completions", token="t", request_id="r", body=b"{}")


async def test_no_answer(monkeypatch):
    monkeypatch.setattr(engine_http, "FIRST_TOKEN_SECONDS", 0.05)

    async with replica_that_answers() as replica:
        with pytest.raises(Broken, match="silent"):
            await post(replica)


async def test_an_answer_that_stops(monkeypatch):
    monkeypatch.setattr(engine_http, "IDLE_SECONDS", 0.05)

    async with replica_that_answers(HEAD + b"he") as replica:
        answer = await post(replica)
        assert await answer.read() == b"he"
        with pytest.raises(Broken, match="silent"):
            await answer.read()
        answer.close()


async def test_a_first_token_may_take_longer_than_the_next_one(monkeypatch):
    monkeypatch.setattr(engine_http, "IDLE_SECONDS", 0.01)

    async with replica_that_answers(HEAD) as replica:
        answer = await post(replica)
        reading = asyncio.ensure_future(answer.read(engine_http.FIRST_TOKEN_SECONDS))
        await asyncio.sleep(0.1)
        assert not reading.done()
        reading.cancel()
        answer.close()


async def test_a_shorter_limit_holds_on_a_connection_that_waited_under_a_longer_one(monkeypatch):
    async with replica_that_answers(HEAD + b"hello") as replica:
        answer = await post(replica)
        assert await answer.read_all(100) == b"hello"
        answer.close()
        monkeypatch.setattr(engine_http, "FIRST_TOKEN_SECONDS", 0.05)
        with pytest.raises(Broken, match="silent"):
            await post(replica)


async def test_a_slow_answer_is_waited_for_however_often_it_is_looked_at(monkeypatch):
    monkeypatch.setattr(engine_http, "_CHECK_SECONDS", 0.01)

    async with replica_that_answers(HEAD) as replica:
        answer = await post(replica)
        reading = asyncio.ensure_future(answer.read())
        await asyncio.sleep(0.1)
        assert not reading.done()
        reading.cancel()
        answer.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_no_connection_is_made_to_a_local_address_that_was_not_named(host):
    async with replica_that_answers(HEAD + b"Hello") as replica:
        port = replica._port
        refused = ReplicaClient(f"http://{host}:{port}", AddressRules.read([]))
        with pytest.raises(Unreachable, match="local, reserved"):
            await refused.post("/v1", token="t", request_id="r", body=b"")
        named = ReplicaClient(f"http://{host}:{port}", AddressRules.read(["127.0.0.1", "::1"]))
        answer = await named.post("/v1", token="t", request_id="r", body=b"")
        assert await answer.read_all(5) == b"Hello"
        answer.close()
        named.close()


async def test_a_name_is_looked_up_and_checked_at_each_connection(monkeypatch):
    """It may have stood for another machine when it was accepted."""

    loop = asyncio.get_running_loop()

    async def rebound(*args: object, **kwargs: object) -> list:
        return [(2, 1, 6, "", ("169.254.169.254", 80))]

    monkeypatch.setattr(loop, "getaddrinfo", rebound)
    with pytest.raises(Unreachable, match="metadata"):
        await ReplicaClient("http://gpu-1", AddressRules.read(["gpu-1"])).post(
            "/v1", token="t", request_id="r", body=b""
        )


async def test_a_socket_that_was_not_named_is_not_opened(tmp_path):
    with pytest.raises(Unreachable, match="names neither"):
        await ReplicaClient(f"unix://{tmp_path}/redis.sock", AddressRules.read([])).post(
            "/v1", token="t", request_id="r", body=b""
        )
