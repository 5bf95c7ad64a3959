"""Several machines that train one job: each GPU holds the whole model, and the gradients cross the network."""

from collections.abc import Iterable

import msgspec

from apps.estimates.requests import PoolFacts

MAX_NODES = 64
# Between two machines, each way: 10 Gbit/s Ethernet, which every cloud's GPU machines have at least. All GPUs of a
# machine share it.
_NODE_BYTES_PER_SECOND = 1.25e9


def shared_evenly(pool: PoolFacts, *, gpu_count: int, node_count: int) -> PoolFacts:
    """Return the pool's facts for a job on these GPUs, as many of them on each machine."""
    count = gpu_count // node_count
    return msgspec.structs.replace(
        pool,
        gpus_per_worker=count,
        max_gpu_count=gpu_count,
        node_bytes_per_second=_NODE_BYTES_PER_SECOND / count,
    )


def network_share(parts: Iterable[tuple[str, float]]) -> float | None:
    """Return the share of a step in which GPUs wait for gradients; None without times.

    `parts` are those of an estimate's `time_parts`: keys and seconds.
    """
    seconds = dict(parts)
    return seconds.get("communication", 0.0) / sum(seconds.values()) if seconds else None
