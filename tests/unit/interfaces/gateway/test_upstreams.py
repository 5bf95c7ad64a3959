"""What of an answer is metered when it ends badly: all that arrived, as the engine's own counters have it."""

from collections import deque

import pytest

from apps.interfaces.gateway.engines.meter import Meter
from apps.interfaces.gateway.engines.upstreams import EngineAnswer
from apps.interfaces.gateway.errors import EngineError
from apps.interfaces.gateway.requests.schema import parse_completion

REQUEST = parse_completion(b'{"model": "m", "prompt": "Hi"}')


def token(count: int) -> bytes:
    usage = b'{"prompt_tokens": 7, "completion_tokens": %d, "total_tokens": %d}' % (count, 7 + count)
    return b'data: {"choices": [{"index": 0, "text": "x", "finish_reason": null}], "usage": %b}\n\n' % usage


class Response:
    """An answer whose parts come one at a time."""

    status, has_ended = 200, False

    def __init__(self, *parts: bytes) -> None:
        self._parts = deque(parts)

    async def read(self, seconds: float | None = None) -> bytes:
        return self._parts.popleft()

    def read_nowait(self) -> bytes:
        return b""

    def close(self) -> None:
        pass


class Arrived(Response):
    """The rest has arrived, and is not read yet."""

    def read_nowait(self) -> bytes:
        rest = b"".join(self._parts)
        self._parts.clear()
        return rest


async def test_what_comes_with_a_broken_chunk_is_metered():
    meter = Meter(1)

    answer = EngineAnswer(
        Response(token(1), token(2) + token(3) + b"data: {broken\n\n"), REQUEST, meter, replica_id="r"
    )
    await answer.read_to_first_token()
    with pytest.raises(EngineError):
        async for _ in answer:
            pass

    assert (meter.input_tokens, meter.output_tokens) == (7, 3)


def test_what_arrived_before_an_answer_was_given_up_is_metered():
    meter = Meter(1)
    answer = EngineAnswer(Arrived(token(1), token(2)), REQUEST, meter, replica_id="r")

    answer.close()

    assert (meter.input_tokens, meter.output_tokens) == (7, 2)
