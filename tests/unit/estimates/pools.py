"""The pools that quotes are asked of."""

from typing import Any

from apps.estimates.physics import gpus
from apps.estimates.physics.gpus import GIB
from apps.estimates.physics.throughput import ProbeRow
from apps.estimates.requests import PoolFacts

CPU = gpus.cpu(memory_bytes=16 * GIB)
PRICE_NANO = 360_000_000  # $0.36 an hour


def pool(probe: ProbeRow | None, **changes: Any) -> PoolFacts:
    """A priced CPU with one live worker, changed."""
    return PoolFacts(**({"gpu": CPU, "probe": probe, "price_nano": PRICE_NANO, "live_workers": 1} | changes))
