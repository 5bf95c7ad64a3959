"""Short control tasks: from a change to its effect, while another tenant begins and cancels jobs at full rate."""

import asyncio
import itertools
import json
import time

import aiohttp

from tests.bench.neighbours.stage import Platform, Tenant
from tests.bench.neighbours.traffic import BadAnswer, Entrance, as_key, send

_POLL_SECONDS, _MOST_SECONDS = 0.01, 60.0


def entrances(platform: Platform) -> dict[str, Entrance]:
    hostile, numbers = platform.make_tenant(), itertools.count()

    async def have_effect(client: aiohttp.ClientSession) -> None:
        await asyncio.to_thread(_have_effect, platform.working, next(numbers))

    async def begin_and_cancel(client: aiohttp.ClientSession, number: int) -> int:
        path, body = "/v1/fine_tuning/jobs", {"model": platform.training_model, "training_file": hostile.file_id}
        status, content = await send(client, "POST", path, as_key(hostile, number), body)
        if status == 200:
            await send(client, "POST", f"{path}/{json.loads(content)['id']}/cancel", as_key(hostile, number))
        return status

    return {
        "short tasks beside jobs that come and go": Entrance(
            have_effect, begin_and_cancel, hostile, forget=lambda: platform.forget_work(hostile.organization_id)
        )
    }


def _have_effect(tenant: Tenant, number: int) -> None:
    """Say that a file of the tenant is validated, and wait until that had its effect. Raises BadAnswer."""
    from django.db import transaction

    from apps.core.messages import outbox
    from apps.core.models import OutboxMessage

    topic, key, payload = "dataset.validated", f"bench:{number}", {"version_id": tenant.file_id}
    with transaction.atomic():
        outbox.publish(topic=topic, key=key, payload=payload, organization=tenant.organization_id)
    until = time.monotonic() + _MOST_SECONDS
    while OutboxMessage.objects.filter(topic=topic, key=key, sent_at=None).exists():
        if time.monotonic() > until:
            raise BadAnswer("a short task was not carried out")
        time.sleep(_POLL_SECONDS)
