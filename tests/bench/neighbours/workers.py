"""The worker API: a machine that was taken over calls without end, and one without a credential makes them up."""

import itertools
from collections.abc import Sequence

import aiohttp

from tests.bench.neighbours.stage import Platform
from tests.bench.neighbours.traffic import Attack, Entrance, get, send

_LEASES = 4
_DELIVERED_BYTES = 64_000_000  # of each lease, with another content than was promised: read again after each report


def entrances(platform: Platform) -> dict[str, Entrance]:
    lease, numbers = platform.lease, itertools.count()
    url = f"{platform.internal_url}/internal/v1"

    async def beat(client: aiohttp.ClientSession) -> None:
        await get(client, "POST", f"{url}/leases/{lease.id}/heartbeat", _bearer(lease.token), {"phase": "training"})

    def calling(body: object, credential: str, path: str = "/claim") -> Attack:
        async def call(client: aiohttp.ClientSession, number: int) -> int:
            secret = credential or f"annw_{next(numbers)}"
            return (await send(client, "POST", f"{url}{path}", _bearer(secret), body))[0]

        return call

    def against(attack: Attack) -> Entrance:
        return Entrance(beat, attack, platform.make_tenant())

    deep = b'{"base_models":' + b"[" * 900_000
    bad = platform.bad_worker
    return {
        "workers beside claims": against(calling({"base_models": []}, bad)),
        "workers beside claims of conversions": against(calling({}, bad, "/conversions/next")),
        "workers beside claims of examinations": against(calling(None, bad, "/examinations/next")),
        "workers beside deep bodies": against(calling(deep, bad)),
        "workers beside made-up credentials": against(calling({}, "")),
        "workers beside large deliveries": against(_finishing(url, _deliveries(platform))),
    }


def _deliveries(platform: Platform) -> Sequence[tuple[str, str, bytes]]:
    """Have the bad machine store a large model under some leases; return their ids, tokens and reports of the end."""
    import msgspec

    from apps.contracts.runs import Succeeded
    from apps.contracts.worker_api import FinishRequest
    from apps.core.objects.store import store
    from apps.finetuning.models import Worker
    from apps.finetuning.runs.claims import claim
    from apps.finetuning.runs.leases import sha256_hex
    from tests.support.attempts import Attempt

    worker = Worker.objects.get(credential_sha256=sha256_hex(platform.bad_worker))
    made = []
    for _ in range(_LEASES):
        platform.floor.job()
        claimed = claim(worker=worker, base_models=None)
        if claimed is None:
            break
        upload = Attempt(claimed).upload("model", 1, {"model.safetensors": bytes(_DELIVERED_BYTES)})
        store().put_stream(f"{upload.object_prefix}/model.safetensors", [b"x" * _DELIVERED_BYTES])
        outcome = Succeeded(upload_id=upload.pk, manifest_sha256=upload.manifest_sha256, step=1)
        made.append((claimed.lease_id, claimed.lease_token, msgspec.json.encode(FinishRequest(outcome=outcome))))
    assert made, "the bad machine got no run"
    return made


def _finishing(url: str, deliveries: Sequence[tuple[str, str, bytes]]) -> Attack:
    async def finish(client: aiohttp.ClientSession, number: int) -> int:
        lease_id, token, body = deliveries[number % len(deliveries)]
        headers = _bearer(token) | {"Content-Type": "application/json"}
        return (await send(client, "POST", f"{url}/leases/{lease_id}/finish", headers, body))[0]

    return finish


def _bearer(secret: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}"}
