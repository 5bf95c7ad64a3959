"""The dashboard: pages that cost much, pages that do not exist, passwords, downloads that are not read."""

import itertools

import aiohttp

from tests.bench.neighbours.stage import Platform, Tenant
from tests.bench.neighbours.traffic import FORM, STRANGER, Attack, Entrance, as_key, as_person, get, leaving, send

_WRONG_PASSWORD = b"login=nobody%40example.com&password=wrong-wrong"


def entrances(platform: Platform) -> dict[str, Entrance]:
    tenant = platform.working
    pages = itertools.cycle(["/jobs", f"/jobs/{tenant.job_id}", "/datasets"])

    async def browse(client: aiohttp.ClientSession) -> None:
        await get(client, "GET", next(pages), as_person(tenant))

    def against(attack: Attack, attacker: Tenant) -> Entrance:
        return Entrance(browse, attack, attacker)

    def asking(path: str) -> Entrance:
        attacker = platform.make_tenant()

        async def ask(client: aiohttp.ClientSession, number: int) -> int:
            return (await send(client, "GET", path, as_person(attacker)))[0]

        return against(ask, attacker)

    async def guess(client: aiohttp.ClientSession, number: int) -> int:
        return (await send(client, "POST", "/accounts/login/", STRANGER | FORM, _WRONG_PASSWORD))[0]

    unread, torn = platform.make_tenant(), platform.make_tenant()
    download = _head(f"GET /v1/files/{unread.large_file_id}/content", as_key(unread))
    pages_torn = [_head(f"GET {path}", as_person(torn)) for path in ("/jobs/new?step=compute", "/no/page", "/jobs")]
    return {
        "pages beside heavy pages": asking("/jobs/new?step=compute"),
        "pages beside searches": asking("/search?q=bench"),
        "pages beside unknown pages": asking("/no/such/page"),
        "pages beside unknown files": asking("/static/no-such-file"),
        "pages beside wrong passwords": against(guess, platform.make_tenant()),
        "pages beside unread downloads": against(
            leaving(unread, platform, lambda number: download, after_seconds=60), unread
        ),
        "pages beside torn requests": against(
            leaving(torn, platform, lambda number: pages_torn[number % 3], after_seconds=0.02), torn
        ),
    }


def _head(line: str, headers: dict[str, str]) -> bytes:
    lines = [f"{line} HTTP/1.1", "Host: 127.0.0.1", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode()
