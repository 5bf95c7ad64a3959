"""The dashboard: pages that cost much, pages that do not exist, passwords, downloads that are not read."""

import itertools
import json
from collections.abc import Callable
from urllib.parse import quote_plus

import aiohttp

from tests.bench.neighbours.stage import Platform, Tenant
from tests.bench.neighbours.traffic import FORM, STRANGER, Attack, Entrance, as_key, as_person, get, leaving, send

_LISTS = ("jobs", "datasets", "adapters", "keys", "members")
_QUESTION = {"role": "user", "content": "Where is my card?"}
_WRONG_PASSWORD = b"login=nobody%40example.com&password=wrong-wrong"


def entrances(platform: Platform) -> dict[str, Entrance]:
    tenant = platform.working
    pages = itertools.cycle(["/jobs", f"/jobs/{tenant.job_id}", "/datasets"])

    async def browse(client: aiohttp.ClientSession) -> None:
        await get(client, "GET", next(pages), as_person(tenant))

    def against(attack: Attack, attacker: Tenant) -> Entrance:
        return Entrance(browse, attack, attacker)

    def asking(*paths: str) -> Entrance:
        attacker, turns = platform.make_tenant(), itertools.cycle(paths)

        async def ask(client: aiohttp.ClientSession, number: int) -> int:
            return (await send(client, "GET", next(turns), as_person(attacker)))[0]

        return against(ask, attacker)

    def posting(make: Callable[[Platform, Tenant, int], tuple[str, object]]) -> Entrance:
        """Each path and body is made with a new number: a dictionary is sent as JSON, bytes as a form."""
        attacker, numbers = platform.make_tenant(), itertools.count(1)

        async def post(client: aiohttp.ClientSession, number: int) -> int:
            path, body = make(platform, attacker, next(numbers))
            headers = as_person(attacker) | (FORM if isinstance(body, bytes) else {})
            return (await send(client, "POST", path, headers, body))[0]

        return Entrance(browse, post, attacker, forget=lambda: platform.forget_work(attacker.organization_id))

    async def guess(client: aiohttp.ClientSession, number: int) -> int:
        return (await send(client, "POST", "/accounts/login/", STRANGER | FORM, _WRONG_PASSWORD))[0]

    unread, torn = platform.make_tenant(), platform.make_tenant()
    download = _head(f"GET /v1/files/{unread.large_file_id}/content", as_key(unread))
    pages_torn = [_head(f"GET {path}", as_person(torn)) for path in ("/jobs/new?step=compute", "/no/page", "/jobs")]
    return {
        "pages beside heavy pages": asking("/jobs/new?step=compute"),
        "pages beside searches": asking("/search?q=bench"),
        "pages beside searched lists": asking(*(f"/{name}?q=a+e+i+o+u+n&sort=oldest" for name in _LISTS)),
        "pages beside exported lists": asking(*(f"/{name}/export" for name in _LISTS)),
        "pages beside traffic": asking("/usage/traffic?days=90", "/usage/traffic/export?days=90"),
        "pages beside help": asking("/help?q=train", "/help/reference"),
        "pages beside playground history": asking("/playground/saved", "/playground"),
        "pages beside kept conversations": posting(_kept_conversation),
        "pages beside edited rows": posting(_edited_row),
        "pages beside requests for credit": posting(_credit_request),
        "pages beside first jobs": posting(_first_job),
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


def _first_job(platform: Platform, attacker: Tenant, number: int) -> tuple[str, object]:
    return "/first-job", f"once={number}&cap_nano=1000000000&model={platform.training_model}".encode()


def _edited_row(platform: Platform, attacker: Tenant, number: int) -> tuple[str, object]:
    row = quote_plus(json.dumps({"messages": [_QUESTION, {"role": "assistant", "content": f"In {number} days."}]}))
    return f"/datasets/{attacker.file_id}/row?line=1", f"newest={number}&row={row}".encode()


def _kept_conversation(platform: Platform, attacker: Tenant, number: int) -> tuple[str, object]:
    turns = [_QUESTION, {"role": "assistant", "content": f"In {number} days. " * 3_000}]
    return "/playground/conversations", {"settings": {"models": [platform.model]}, "columns": [turns]}


def _credit_request(platform: Platform, attacker: Tenant, number: int) -> tuple[str, object]:
    return "/credit", f"amount_usd={number % 50 + 1}&note=bench".encode()


def _head(line: str, headers: dict[str, str]) -> bytes:
    lines = [f"{line} HTTP/1.1", "Host: 127.0.0.1", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode()
