"""Counts of refused requests, recorded together every few seconds.

Many refused requests make few records. A gateway that dies loses the counts since its last record, which is harmless
because refused requests cost nothing.
"""

import asyncio
from collections import Counter

from apps.billing.usage.metering import UsageRecord
from apps.billing.usage.traffic import Refusal
from apps.core.ids import new_id
from apps.interfaces.gateway.admission.keys import InferenceCaller
from apps.interfaces.gateway.engines.routes import Routes
from apps.interfaces.gateway.metering.recorder import Recorder
from apps.interfaces.gateway.metering.tickets import Metering

_RECORD_SECONDS = 10.0


class RefusedRequests:
    """Counts by key, model and class. Use inside one event loop."""

    def __init__(self, routes: Routes, metering: Metering, recorder: Recorder) -> None:
        self._routes = routes
        self._metering = metering
        self._recorder = recorder
        self._counts: Counter[tuple[str, str, str, str, Refusal]] = Counter()

    def count(self, caller: InferenceCaller, model_name: str, refusal: Refusal) -> None:
        """Count one request. Names that the organization has no model for are not kept: anyone can invent them."""
        route = self._routes.known(model_name, caller=caller)
        model = (route.model_name, route.adapter_version_id) if route else ("", "")
        self._counts[caller.organization_id, caller.key_id, *model, refusal] += 1

    async def keep_recording(self) -> None:
        """Record the counts until cancelled."""
        while True:
            await asyncio.sleep(_RECORD_SECONDS)
            self.record()

    def record(self) -> None:
        """Record the counts, or keep them while nothing can be recorded."""
        if not self._counts or not self._recorder.has_room():
            return
        counts, self._counts = self._counts, Counter()
        for (organization_id, key_id, model_name, adapter_version_id, refusal), count in counts.items():
            self._metering.end(
                UsageRecord(
                    id=new_id("use"),
                    organization_id=organization_id,
                    key_id=key_id,
                    model_name=model_name,
                    adapter_version_id=adapter_version_id,
                    slice_id="",
                    input_price_id=None,
                    output_price_id=None,
                    input_tokens=0,
                    cached_input_tokens=0,
                    output_tokens=0,
                    finish=refusal,
                    latency_ms=0,
                    first_token_ms=None,
                    occurred_at=self._metering.now(),
                    request_count=count,
                )
            )
