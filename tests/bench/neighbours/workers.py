"""The worker API: a machine that was taken over calls without end, and one without a credential makes them up."""

import itertools

import aiohttp

from tests.bench.neighbours.stage import Platform
from tests.bench.neighbours.traffic import Attack, Entrance, get, send


def entrances(platform: Platform) -> dict[str, Entrance]:
    lease, numbers = platform.lease, itertools.count()
    url = f"{platform.internal_url}/internal/v1"

    async def beat(client: aiohttp.ClientSession) -> None:
        await get(client, "POST", f"{url}/leases/{lease.id}/heartbeat", _bearer(lease.token), {"phase": "training"})

    def calling(body: object, credential: str) -> Attack:
        async def call(client: aiohttp.ClientSession, number: int) -> int:
            secret = credential or f"annw_{next(numbers)}"
            return (await send(client, "POST", f"{url}/claim", _bearer(secret), body))[0]

        return call

    deep = b'{"base_models":' + b"[" * 900_000
    bad = platform.bad_worker
    return {
        "workers beside claims": Entrance(beat, calling({"base_models": []}, bad), platform.make_tenant()),
        "workers beside deep bodies": Entrance(beat, calling(deep, bad), platform.make_tenant()),
        "workers beside made-up credentials": Entrance(beat, calling({}, ""), platform.make_tenant()),
    }


def _bearer(secret: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}"}
