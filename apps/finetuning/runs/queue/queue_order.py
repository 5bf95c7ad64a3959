"""Order of a pool's queued runs: the share holder with the least use for its weight comes first.

A share holder is an organization, or the founder of several that never paid (apps/accounts/shares.py). The order comes
from one row for each organization with queued runs (`QueueShare`), so that a claim reads the same however long the
queue is.
"""

import datetime
import math
from collections.abc import Collection
from typing import Any

from django.conf import settings

from apps.accounts.models import Organization
from apps.billing.models import WELCOME, AccountKind
from apps.core.database.prepared import fetch_prepared
from apps.finetuning.lifecycle import RunStatus
from apps.finetuning.models import GpuPool, Quota, Run

# Only the oldest runs of each organization count, so that many runs of one cannot hide another's first run.
_CANDIDATES = 20
_DEFAULT_GPUS = Quota._meta.get_field("concurrent_gpus").default

QUEUES = "share.pool_id = %(pool)s AND share.queued > 0"
_REGION = "(SELECT region FROM finetuning_gpupool WHERE id = %(pool)s)"
# An organization's runs may start, as far as its money and its regions decide.
MAY_START = f"""organization.suspended_at IS NULL
AND (organization.regions IS NULL OR {_REGION} = ANY(organization.regions)) AND NOT EXISTS (
    SELECT FROM billing_ledgeraccount wallet WHERE wallet.organization_id = organization.id
        AND wallet.kind = '{AccountKind.WALLET}' AND wallet.stopped_because <> ''
)"""
# Holders with runs that may start, and `load`: the GPUs that a holder has in all pools, and its use in about the last
# hour, divided by its weight, less a GPU for each hour since its oldest run came or a worker last took one. Of other
# pools, what was neither held nor used for a day counts for nothing.
HOLDERS = f"""
    WITH holders AS MATERIALIZED (
        SELECT DISTINCT {Organization.SHARE_HOLDER_SQL} AS holder
        FROM finetuning_queueshare share
        JOIN accounts_organization organization ON organization.id = share.organization_id
        WHERE {QUEUES}
    ), sharing AS MATERIALIZED (
        SELECT organization.*, holder FROM holders
        JOIN accounts_organization organization ON organization.id = holder
        WHERE {Organization.SHARE_HOLDER_SQL} = holder
        UNION ALL
        SELECT organization.*, holder FROM holders
        JOIN accounts_organization organization ON organization.founded_by_id = holder
        WHERE organization.id <> holder AND {Organization.SHARE_HOLDER_SQL} = holder
    ), shares AS MATERIALIZED (
        SELECT organization.holder, share.*, quota.weight,
            {QUEUES} AND {MAY_START} AS is_waiting,
            CASE
                WHEN NOT ({QUEUES}) THEN NULL
                WHEN quota.id IS NOT NULL THEN quota.concurrent_gpus
                WHEN organization.has_own_share OR EXISTS (
                    SELECT FROM billing_creditlot lot WHERE lot.organization_id = organization.id
                        AND (lot.reference IS NULL OR lot.reference NOT LIKE '{WELCOME}%%')
                ) THEN {_DEFAULT_GPUS}
                ELSE %(unpaid_gpus)s
            END AS gpu_limit
        FROM sharing organization
        JOIN finetuning_queueshare share ON share.organization_id = organization.id
        LEFT JOIN finetuning_quota quota ON quota.organization_id = organization.id
        WHERE {QUEUES} OR share.held_gpus > 0 OR share.used_at > %(now)s::timestamptz - interval '1 day'
    ), sums AS (
        SELECT holder, sum(queued) FILTER (WHERE is_waiting) AS queued, sum(held_gpus) AS held,
            string_agg(organization_id, ',') FILTER (WHERE is_waiting) AS organizations,
            sum(served) FILTER (WHERE is_waiting) AS served, sum(held_gpus) FILTER (WHERE is_waiting) AS held_here,
            greatest(coalesce(min(weight), 1), 1) AS weight,
            sum(held_gpus) + sum(used_gpu_hours
                * exp(-least(greatest(extract(epoch FROM %(now)s::timestamptz - used_at)::float8, 0) / 3600, 500))
            ) AS use,
            greatest(extract(epoch FROM %(now)s::timestamptz
                - greatest(min(queued_since) FILTER (WHERE is_waiting), max(served_at)))::float8, 0) / 3600 AS waited,
            CASE WHEN bool_and(gpu_limit IS NOT NULL) FILTER (WHERE is_waiting)
                THEN max(gpu_limit) FILTER (WHERE is_waiting) END AS gpu_limit
        FROM shares GROUP BY holder HAVING bool_or(is_waiting)
    ), loads AS MATERIALIZED (
        SELECT *, use / weight - waited AS load FROM sums
    ), waiting AS (
        SELECT holder, organization_id, gpu_limit FROM shares WHERE is_waiting
    )
"""  # noqa: S608 - constants
QUEUED = f"""
    run.pool_id = %(pool)s AND run.organization_id = waiting.organization_id AND run.status = '{RunStatus.QUEUED}'
"""
HAS_ROOM = "(gpu_limit IS NULL OR held < gpu_limit)"  # the holder's limit lets another run start
_IN_TURN = f"""
    {HOLDERS}
    SELECT id FROM (
        SELECT found.id, found.created_at,
            loads.load + row_number() OVER (PARTITION BY loads.holder ORDER BY found.created_at, found.id) AS rank
        FROM (SELECT * FROM loads WHERE {HAS_ROOM} ORDER BY load LIMIT %(limit)s) loads
        JOIN waiting ON waiting.holder = loads.holder
        CROSS JOIN LATERAL (
            SELECT run.id, run.created_at FROM finetuning_run run WHERE {QUEUED}
            ORDER BY run.created_at, run.id LIMIT %(depth)s
        ) found
    ) ranked ORDER BY rank, created_at, id LIMIT %(limit)s
"""  # noqa: S608 - constants
_LOADS = f"{HOLDERS} SELECT holder, load, queued FROM loads WHERE {HAS_ROOM}"  # noqa: S608 - constants


def queue_order(*, pool: GpuPool, now: datetime.datetime, limit: int, depth: int = _CANDIDATES) -> list[Run]:
    """Return the first queued runs of the pool, in the order they should start: at most `depth` of an organization.

    A holder's share is the GPUs it holds plus the GPU-hours it used in about the last hour, divided by its weight. Each
    hour of waiting unserved counts as one GPU less, so that a holder with a large share is not delayed forever. Runs of
    a suspended organization wait until it has paid, or an operator has reinstated it, and those of one that may not use
    the pool's region until it may, or they move. Those of a holder with as many GPUs as it may have are not in it.
    """
    ids = [row[0] for row in fetch(_IN_TURN, pool.pk, now, limit=limit, depth=depth)]
    runs = Run.objects.select_related("job").in_bulk(ids)
    return [runs[id] for id in ids]


def queue_positions(*, pool: GpuPool, runs: Collection[Run], now: datetime.datetime) -> dict[str, int]:
    """Return 1 for the run of the pool that starts next, and so on, by the run's id.

    A run has no entry if it is not queued, its holder may have no more GPUs, or too many of its holder's runs precede
    it. The caller sees all tenants.
    """
    loads = {name: (load, queued) for name, load, queued in fetch(_LOADS, pool.pk, now)}
    organizations = Organization.objects.annotate(holder=Organization.share_holder_by())
    owners = organizations.filter(pk__in={run.organization_id for run in runs})
    positions = {}
    for holder in set(owners.values_list("holder", flat=True)) & set(loads):
        queue = Run.objects.filter(
            pool=pool, status=RunStatus.QUEUED, organization__in=organizations.filter(holder=holder).values("pk")
        )
        ids = queue.order_by("created_at", "id").values_list("pk", flat=True)[:_CANDIDATES]
        others = [row for name, row in loads.items() if name != holder]
        for turn, pk in enumerate(ids, start=1):
            rank = loads[holder][0] + turn
            ahead = (min(max(math.ceil(rank - load) - 1, 0), queued, _CANDIDATES) for load, queued in others)
            positions[pk] = turn + int(sum(ahead))
    return {run.pk: positions[run.pk] for run in runs if run.pk in positions}


def fetch(statement: str, pool_id: str, now: datetime.datetime | None, **known: Any) -> list[tuple[Any, ...]]:
    """Return the rows of a prepared statement that begins with `HOLDERS`."""
    unpaid_gpus = settings.UNPAID_LIMITS.get("concurrent_gpus", _DEFAULT_GPUS)
    return fetch_prepared(statement, {"pool": pool_id, "now": now, "unpaid_gpus": unpaid_gpus} | known)
