"""The public API: files, jobs and estimates, with keys."""

import itertools
from collections.abc import Callable

import aiohttp

from tests.bench.neighbours.stage import Platform, Tenant
from tests.bench.neighbours.traffic import Attack, Entrance, as_key, get, send, sending, trickling

_ROWS = b"".join(
    b'{"messages":[{"role":"user","content":"Where is card %d?"},{"role":"assistant","content":"On its way."}]}\n' % n
    for n in range(60_000)
)
_DEEP = b'{"model":' + b"[" * 500_000 + b"]" * 500_000 + b"}"
_WIDE = b'{"model":[' + b"{}," * 1_000_000 + b"{}]}"


def entrances(platform: Platform) -> dict[str, Entrance]:
    tenant = platform.working
    paths = itertools.cycle(["/api/v1/me", f"/v1/fine_tuning/jobs/{tenant.job_id}", "/v1/files?limit=10"])
    asked = {"model": platform.training_model, "training_file": tenant.file_id}

    async def call(client: aiohttp.ClientSession) -> None:
        await get(client, "GET", next(paths), as_key(tenant))

    async def estimate(client: aiohttp.ClientSession) -> None:
        await get(client, "POST", "/api/v1/estimates", as_key(tenant), asked)

    def calls(make: Callable[[Tenant], Attack]) -> Entrance:
        attacker = platform.make_tenant()
        return Entrance(call, make(attacker), attacker, forget=lambda: platform.forget_work(attacker.organization_id))

    def estimates(path: str, **more: object) -> Entrance:
        attacker = platform.make_tenant()
        # Each is another job, so that no answer is remembered.
        numbers = itertools.count(1)
        make = lambda: {  # noqa: E731
            "model": platform.training_model,
            "training_file": attacker.file_id,
            **more,
            **({"seed": next(numbers)} if more else {"recipe": {"epochs": next(numbers) % 50 + 1}}),
        }
        return Entrance(estimate, sending(attacker, "POST", path, make), attacker, pause_seconds=0.2)

    return {
        "API beside long lists": calls(lambda it: sending(it, "GET", "/v1/fine_tuning/jobs?limit=100")),
        "API beside large uploads": calls(lambda it: _uploading(it, _ROWS)),
        "API beside many small files": calls(lambda it: _uploading(it, _ROWS[:400])),
        "API beside deep bodies": calls(lambda it: sending(it, "POST", "/v1/fine_tuning/jobs", lambda: _DEEP)),
        "API beside wide bodies": calls(lambda it: sending(it, "POST", "/v1/fine_tuning/jobs", lambda: _WIDE)),
        "API beside slow bodies": calls(lambda it: trickling(it, "/v1/files", part_bytes=4_000, seconds_apart=0.2)),
        "estimates beside estimates": estimates("/api/v1/estimates"),
        "estimates beside dry runs": estimates("/v1/fine_tuning/jobs", dry_run=True),
    }


def _uploading(attacker: Tenant, content: bytes) -> Attack:
    async def upload(client: aiohttp.ClientSession, number: int) -> int:
        return (await send(client, "POST", "/v1/files", as_key(attacker, number), file_form(content)))[0]

    return upload


def file_form(content: bytes, filename: str = "rows.jsonl") -> aiohttp.FormData:
    """Return an upload for training."""
    form = aiohttp.FormData({"purpose": "fine-tune"})
    form.add_field("file", content, filename=filename)
    return form
