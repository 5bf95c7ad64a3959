"""One POST to an address that a customer chose.

It goes only to public addresses, with limits on its time and its answer. A name is resolved once, each of its addresses
is checked, and the connection goes to one of these addresses. So a name that changes its address between check and
connection gains nothing. Redirects are not followed.
"""

import asyncio
import errno
import socket
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import aiohttp
import msgspec
from aiohttp.abc import AbstractResolver, ResolveResult
from django.conf import settings

from apps.contracts.addresses.customer_servers import MAX_URL, check_server
from apps.contracts.addresses.networks import is_loopback, is_public

MAX_ANSWER_BYTES = 2_000
_TIMEOUT = aiohttp.ClientTimeout(total=15, sock_connect=5)
_EXAMPLE = "hooks.example.com/anneal"


class PostAnswer(msgspec.Struct, frozen=True):
    """The status and the first bytes of an answer, or the reason why there was none (`error`)."""

    status: int | None = None
    text: str = ""
    error: str = ""
    duration_ms: int = 0


def check_url(url: str) -> None:
    """Raise ValueError with a sentence unless the address may be called. Names are resolved only at the call."""
    is_plain = len(url) <= MAX_URL and url.isascii() and url.isprintable()
    if settings.PRIVATE_WEBHOOKS and is_plain and (url.startswith("https://") or is_loopback(url)):
        return
    check_server(url, example=_EXAMPLE, may_have_query=True)


def post(url: str, *, body: bytes, headers: Mapping[str, str]) -> PostAnswer:
    """Return the answer to a POST. Nothing that the other side does raises an error."""
    started = time.monotonic()
    try:
        check_url(url)
        status, content = asyncio.run(_post(url, body, headers))
        answer = PostAnswer(status=status, text=content.decode("utf-8", "replace").replace("\x00", ""))
    except TimeoutError:
        answer = PostAnswer(error="No answer in time.")
    except (aiohttp.ClientError, OSError, ValueError) as error:
        answer = PostAnswer(error=f"{error}"[:200] or type(error).__name__)
    return msgspec.structs.replace(answer, duration_ms=int((time.monotonic() - started) * 1000))


async def _post(url: str, body: bytes, headers: Mapping[str, str]) -> tuple[int, bytes]:
    asyncio.get_running_loop().set_default_executor(_Lookups(max_workers=1))
    connector = aiohttp.TCPConnector(resolver=_CheckedResolver(), limit=1, force_close=True)
    async with (
        aiohttp.ClientSession(connector=connector, timeout=_TIMEOUT, auto_decompress=False) as session,
        session.post(url, data=body, headers=headers, allow_redirects=False) as response,
    ):
        return response.status, await response.content.read(MAX_ANSWER_BYTES)


class _Lookups(ThreadPoolExecutor):
    """The loop's thread for name lookups. The end of the loop does not wait for a silent name server."""

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        super().shutdown(wait=False, cancel_futures=True)


class _CheckedResolver(AbstractResolver):
    """Resolves a name, and refuses it if one of its addresses is not public."""

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        found: list[Any] = await aiohttp.ThreadedResolver().resolve(host, port, family)
        if not settings.PRIVATE_WEBHOOKS and not all(is_public(each["host"]) for each in found):
            raise OSError(errno.EHOSTUNREACH, f"{host} leads to a private address")
        return found

    async def close(self) -> None:
        """Hold nothing to close."""
