"""Order of a pool's queued runs: the share holder with the least use for its weight comes first.

A share holder is an organization, or the founder of several that never paid (apps/accounts/shares.py). The order comes
from one row for each organization with queued runs (`QueueShare`), so that a claim reads the same however long the
queue is.
"""

import datetime
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from django.conf import settings

from apps.accounts.models import Organization
from apps.billing.models import WELCOME, AccountKind
from apps.core.database.prepared import fetch_prepared
from apps.finetuning.lifecycle import JobStatus, RunStatus
from apps.finetuning.models import GpuPool, Quota, Run, Worker
from apps.finetuning.usage.job_use import HOLDING, covers, has_allowances
from apps.finetuning.usage.quotas import lock_name

# A run that needs more GPUs or host memory than are free waits so long; then a worker keeps its free GPUs for it.
OVERTAKEN_AT_MOST = datetime.timedelta(minutes=10)
# Only the oldest runs of each organization count, so that many runs of one cannot hide another's first run.
_CANDIDATES = 20
_SHAPES = 4  # numbers of machines and GPUs: of each organization, the oldest group of each
_LOOKED_AT = 256  # runs, by one claim: of more holders than claim at once
_DEFAULT_GPUS = Quota._meta.get_field("concurrent_gpus").default

_QUEUES = "share.pool_id = %(pool)s AND share.queued > 0"
_REGION = "(SELECT region FROM finetuning_gpupool WHERE id = %(pool)s)"
# Holders with runs that may start, and `load`: the GPUs that a holder has in all pools, and its use in about the last
# hour, divided by its weight, less a GPU for each hour since its oldest run came or a worker last took one. Of other
# pools, what was neither held nor used for a day counts for nothing.
_HOLDERS = f"""
    WITH holders AS MATERIALIZED (
        SELECT DISTINCT {Organization.SHARE_HOLDER_SQL} AS holder
        FROM finetuning_queueshare share
        JOIN accounts_organization organization ON organization.id = share.organization_id
        WHERE {_QUEUES}
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
            {_QUEUES} AND organization.suspended_at IS NULL
                AND (organization.regions IS NULL OR {_REGION} = ANY(organization.regions))
                AND NOT EXISTS (
                    SELECT FROM billing_ledgeraccount wallet WHERE wallet.organization_id = organization.id
                        AND wallet.kind = '{AccountKind.WALLET}' AND wallet.stopped_because <> ''
                ) AS is_waiting,
            CASE
                WHEN NOT ({_QUEUES}) THEN NULL
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
        WHERE {_QUEUES} OR share.held_gpus > 0 OR share.used_at > %(now)s::timestamptz - interval '1 day'
    ), loads AS MATERIALIZED (
        SELECT holder, sum(queued) FILTER (WHERE is_waiting) AS queued, sum(held_gpus) AS held,
            (sum(held_gpus) + sum(used_gpu_hours
                * exp(-least(greatest(extract(epoch FROM %(now)s::timestamptz - used_at)::float8, 0) / 3600, 500))
            )) / greatest(coalesce(min(weight), 1), 1)
            - greatest(extract(epoch FROM %(now)s::timestamptz
                - greatest(min(queued_since) FILTER (WHERE is_waiting), max(served_at)))::float8, 0) / 3600 AS load,
            CASE WHEN bool_and(gpu_limit IS NOT NULL) FILTER (WHERE is_waiting)
                THEN max(gpu_limit) FILTER (WHERE is_waiting) END AS gpu_limit
        FROM shares GROUP BY holder HAVING bool_or(is_waiting)
    ), waiting AS (
        SELECT holder, organization_id, gpu_limit FROM shares WHERE is_waiting
    )
"""  # noqa: S608 - constants
_QUEUED = f"""
    run.pool_id = %(pool)s AND run.organization_id = waiting.organization_id AND run.status = '{RunStatus.QUEUED}'
"""
_GPUS = "job.gpu_count / job.node_count"  # of each machine
# Of organizations with allowances of concurrent GPUs, by id: whose jobs each covers, and how many GPUs it leaves. One
# value, so that it changes nothing about the search below if no organization has any.
_ROOMS = f"""
    , rooms AS MATERIALIZED (
        SELECT jsonb_object_agg(organization_id, rooms) AS found FROM (
            SELECT allowance.organization_id, jsonb_agg(jsonb_build_object(
                'member', allowance.member_id, 'project', allowance.project_id, 'label', allowance.label,
                'gpus', allowance.concurrent_gpus - coalesce((
                    SELECT sum(job.gpu_count)
                    FROM finetuning_run run JOIN finetuning_finetuningjob job ON job.id = run.job_id
                    WHERE run.organization_id = allowance.organization_id AND run.finished_at IS NULL
                        AND run.status IN ({HOLDING}) AND {covers("allowance", "job")}
                ), 0)
            )) AS rooms
            FROM waiting JOIN finetuning_allowance allowance ON allowance.organization_id = waiting.organization_id
            WHERE allowance.concurrent_gpus IS NOT NULL GROUP BY allowance.organization_id
        ) by_organization
    )
"""  # noqa: S608 - constants
_ALLOWED = """((SELECT found FROM rooms) IS NULL OR NOT EXISTS (
    SELECT FROM jsonb_array_elements((SELECT found FROM rooms) -> waiting.organization_id) AS room
    WHERE job.gpu_count > (room->>'gpus')::bigint AND (
        job.member_id = room->>'member' OR job.project_id = room->>'project' OR job.labels @> (room->'label')
    )
))"""
_FITTING = f"""
    FROM finetuning_run run JOIN finetuning_finetuningjob job ON job.id = run.job_id
    WHERE {_QUEUED} AND {_GPUS} <= %(free)s
        AND (%(memory)s::bigint IS NULL OR coalesce((job.estimate->>'host_bytes')::numeric, 0) <= %(memory)s::bigint)
        AND (%(models)s::text[] IS NULL OR job.base_model_id = ANY(%(models)s::text[]))
        AND (run.retry_at IS NULL OR run.retry_at <= %(now)s)
        AND (waiting.gpu_limit IS NULL OR loads.held + job.gpu_count <= waiting.gpu_limit) AND {_ALLOWED}
"""
_FOUND = f"run.id, run.created_at, {_GPUS} AS gpus, job.node_count, true AS has_memory, true AS fits"
# Of each organization: the oldest run that the worker can take alone, the oldest of each shape that it could take with
# others, and the oldest that waits for more than it has free. The order of `loads` lets the limit end the search early.
_CLAIMABLE = f"""
    {_HOLDERS} {_ROOMS}
    SELECT found.id, found.gpus, found.node_count, found.created_at, found.has_memory, found.fits, loads.holder
    FROM (
        SELECT * FROM loads WHERE gpu_limit IS NULL OR held < gpu_limit ORDER BY load
    ) loads
    JOIN waiting ON waiting.holder = loads.holder
    CROSS JOIN LATERAL (
        (SELECT {_FOUND} {_FITTING} AND job.node_count = 1 ORDER BY run.created_at, run.id LIMIT 1)
        UNION ALL
        (SELECT * FROM (
            SELECT DISTINCT ON (job.node_count, job.gpu_count) {_FOUND} {_FITTING}
                AND job.node_count > 1 AND %(joins)s::boolean
            ORDER BY job.node_count, job.gpu_count, run.created_at, run.id
        ) groups ORDER BY created_at, id LIMIT %(shapes)s)
        UNION ALL
        (SELECT run.id, run.created_at, {_GPUS}, job.node_count, coalesce(memory.has_enough, true), false
            FROM finetuning_run run JOIN finetuning_finetuningjob job ON job.id = run.job_id
            CROSS JOIN LATERAL (
                SELECT coalesce((job.estimate->>'host_bytes')::numeric, 0) <= %(memory)s::bigint AS has_enough
            ) memory
            WHERE %(is_partly_used)s::boolean AND {_QUEUED} AND run.created_at <= %(overtaken_until)s
                AND {_GPUS} <= %(gpus)s AND ({_GPUS} > %(free)s OR NOT memory.has_enough)
                AND (job.node_count = 1 OR %(joins)s::boolean) AND {_ALLOWED}
                AND (%(models)s::text[] IS NULL OR job.base_model_id = ANY(%(models)s::text[]))
            ORDER BY run.created_at, run.id LIMIT 1)
    ) found
    ORDER BY loads.load, found.created_at, found.id LIMIT %(limit)s
"""  # noqa: S608 - constants
# The same for an installation without allowances.
_CLAIMABLE_WITHOUT = _CLAIMABLE.replace(_ROOMS, "").replace(f"AND {_ALLOWED}", "")
# The first of the candidates that no other transaction has locked, and whether its holder's limits were locked as well.
_LOCK_FIRST = f"""
    SELECT found.place, pg_try_advisory_xact_lock(hashtextextended(found.lock_name, 0)) FROM (
        SELECT candidate.place, candidate.lock_name
        FROM unnest(%(runs)s::text[], %(locks)s::text[]) WITH ORDINALITY AS candidate(id, lock_name, place)
        JOIN finetuning_run run ON run.id = candidate.id AND run.status = '{RunStatus.QUEUED}'
        JOIN finetuning_finetuningjob job ON job.id = run.job_id AND job.status = '{JobStatus.QUEUED}'
        ORDER BY candidate.place LIMIT 1 FOR UPDATE OF job, run SKIP LOCKED
    ) found
"""  # noqa: S608 - constants
_IN_TURN = f"""
    {_HOLDERS}
    SELECT id FROM (
        SELECT found.id, found.created_at,
            loads.load + row_number() OVER (PARTITION BY loads.holder ORDER BY found.created_at, found.id) AS rank
        FROM (SELECT * FROM loads ORDER BY load LIMIT %(limit)s) loads
        JOIN waiting ON waiting.holder = loads.holder
        CROSS JOIN LATERAL (
            SELECT run.id, run.created_at FROM finetuning_run run WHERE {_QUEUED}
            ORDER BY run.created_at, run.id LIMIT %(depth)s
        ) found
    ) ranked ORDER BY rank, created_at, id LIMIT %(limit)s
"""  # noqa: S608 - constants
_LOADS = f"{_HOLDERS} SELECT holder, load, queued FROM loads"  # noqa: S608 - constants


@dataclass(frozen=True)
class Candidate:
    """A queued run that a worker could take. If it does not fit into what is free, the worker may wait for it.

    It takes `gpu_count` GPUs of each of `node_count` machines.
    """

    run_id: str
    gpu_count: int
    node_count: int
    created_at: datetime.datetime
    has_memory: bool
    fits: bool
    holder: str


def list_candidates(
    *,
    worker: Worker,
    free_gpus: int,
    free_bytes: int | None,
    base_models: Sequence[str] | None,
    now: datetime.datetime,
) -> list[Candidate]:
    """Return runs of the worker's pool in the order they should start: the oldest suitable ones of each organization.

    None of them passes its limit of concurrent GPUs, or an allowance of them. `free_bytes` None allows any host memory.
    """
    rows = _fetch(
        _CLAIMABLE if has_allowances() else _CLAIMABLE_WITHOUT,
        worker.pool_id,
        now,
        limit=_LOOKED_AT,
        shapes=_SHAPES,
        free=free_gpus,
        gpus=worker.gpu_count,
        joins=worker.offer is not None,
        memory=free_bytes,
        models=None if base_models is None else list(base_models),
        is_partly_used=free_gpus < worker.gpu_count or free_bytes is not None,
        overtaken_until=now - OVERTAKEN_AT_MOST,
    )
    return [Candidate(*row) for row in rows]


def lock_first(candidates: Sequence[Candidate]) -> tuple[int, bool] | None:
    """Lock the job and the run of the first candidate that no other transaction has locked, and its holder's limits.

    Return the candidate's place and whether the limits were free; None if every candidate is locked or taken.
    """
    known = {
        "runs": [each.run_id for each in candidates], "locks": [lock_name(each.holder) for each in candidates],
    }  # fmt: skip
    return next(((place - 1, is_free) for place, is_free in fetch_prepared(_LOCK_FIRST, known)), None)


def queue_order(*, pool: GpuPool, now: datetime.datetime, limit: int) -> list[Run]:
    """Return the first queued runs of the pool, in the order they should start.

    A holder's share is the GPUs it holds plus the GPU-hours it used in about the last hour, divided by its weight. Each
    hour of waiting unserved counts as one GPU less, so that a holder with a large share is not delayed forever. Runs of
    a suspended organization wait until it has paid, or an operator has reinstated it, and those of one that may not use
    the pool's region until it may, or they move.
    """
    ids = [row[0] for row in _fetch(_IN_TURN, pool.pk, now, limit=limit, depth=_CANDIDATES)]
    runs = Run.objects.select_related("job").in_bulk(ids)
    return [runs[id] for id in ids]


def queue_positions(*, pool: GpuPool, runs: Collection[Run], now: datetime.datetime) -> dict[str, int]:
    """Return 1 for the run of the pool that starts next, and so on, by the run's id.

    A run has no entry if it is not queued or too many of its holder's runs precede it. The caller sees all tenants.
    """
    loads = {name: (load, queued) for name, load, queued in _fetch(_LOADS, pool.pk, now)}
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


def _fetch(statement: str, pool_id: str, now: datetime.datetime, **known: Any) -> list[tuple[Any, ...]]:
    unpaid_gpus = settings.UNPAID_LIMITS.get("concurrent_gpus", _DEFAULT_GPUS)
    return fetch_prepared(statement, {"pool": pool_id, "now": now, "unpaid_gpus": unpaid_gpus} | known)
