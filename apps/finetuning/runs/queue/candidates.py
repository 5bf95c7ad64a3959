"""The runs that a claim may take, in the order of the queue, from a ranking that many claims share.

To rank all holders takes as long as the rest of a claim, or longer. So one claim ranks for the next ones, too
(`QueueRanking`): for a millisecond for each holder, for a twentieth of a second at least and a quarter at most. A
ranking lists turns. The second turn of a holder has the place that it would have once its first run has started. So
claims that share a ranking start runs in the order in which each of them would have ranked alone. What changes
otherwise counts with the next ranking: new holders, ended runs, weights. Only the order may be that old. A claim reads
all that decides if a run may start, and it checks the limits again under their lock.
"""

import datetime
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from django.conf import settings

from apps.accounts.models import Organization
from apps.core.database.prepared import fetch_prepared
from apps.finetuning.lifecycle import JobStatus, RunStatus
from apps.finetuning.models import Worker
from apps.finetuning.runs.queue.queue_order import HAS_ROOM, HOLDERS, MAY_START, QUEUED, QUEUES, fetch
from apps.finetuning.usage.job_use import HOLDING, covers
from apps.finetuning.usage.quotas import lock_name

# A run that needs more GPUs or host memory than are free waits so long; then a worker keeps its free GPUs for it.
OVERTAKEN_AT_MOST = datetime.timedelta(minutes=10)
_SHAPES = 4  # numbers of machines and GPUs: of each organization, the oldest group of each
_LOOKED_AT = 256  # runs, by one claim: of more holders than claim at once
# A claim looks at so many runs of the ranking at a time: other claims seldom have locked all of the first ones.
_BATCHES = (16, 64, _LOOKED_AT)
_TURNS = 512  # of a ranking: more than claims take while it is kept
_TURNS_OF_EACH = 16  # at most
_KEPT_FOR_EACH, _KEPT_AT_MOST = "1 millisecond", "250 milliseconds"
_TOO_OLD = "1 second"  # after its end, a ranking is not used while another claim makes a new one

# --- The ranking ------------------------------------------------------------------------------------------------------

# A turn after the first counts as many GPUs as the oldest run of the holder. All holders have as many turns, however
# much they have queued: what they queue later comes in its turn. The last one has a negative number and stays, so that
# no holder disappears whose turns were all taken.
_RANK = f"""
    {HOLDERS.replace("%(now)s::timestamptz", "statement_timestamp()")}
    , turning AS (
        SELECT loads.*, turn.number, turn.number = counted.turns + 1 AS is_last, gpu_limit - held + held_here AS room,
            CASE WHEN turn.number = 1 THEN load ELSE (use + (turn.number - 1) * coalesce(oldest.gpus, 1)) / weight END
                AS place
        FROM loads
        LEFT JOIN LATERAL (
            SELECT job.gpu_count AS gpus
            FROM finetuning_run run JOIN finetuning_finetuningjob job ON job.id = run.job_id
            WHERE run.pool_id = %(pool)s AND run.organization_id = split_part(loads.organizations, ',', 1)
                AND run.status = '{RunStatus.QUEUED}'
            ORDER BY run.created_at, run.id LIMIT 1
        ) oldest ON true
        CROSS JOIN (
            SELECT least({_TURNS_OF_EACH}, greatest(2, {_TURNS} / nullif(count(*), 0) - 1))::integer AS turns FROM loads
        ) counted
        CROSS JOIN LATERAL generate_series(1, counted.turns + 1) AS turn(number)
        WHERE {HAS_ROOM}
    )
    INSERT INTO finetuning_queueranking AS ranking
        (pool_id, made_at, kept_until, holders, organizations, numbers, served, rooms)
    SELECT %(pool)s, statement_timestamp(), statement_timestamp() + greatest(
            %(kept_at_least)s::interval, least(interval '{_KEPT_AT_MOST}', listed.ranked * interval '{_KEPT_FOR_EACH}')
        ),
        coalesce(holders, '{{}}'), coalesce(listed.organizations, '{{}}'), coalesce(numbers, '{{}}'),
        coalesce(listed.served, '{{}}'), coalesce(rooms, '{{}}')
    FROM (
        SELECT count(*) FILTER (WHERE number = 1) AS ranked, array_agg(holder) AS holders,
            array_agg(organizations) AS organizations,
            array_agg(CASE WHEN is_last THEN -number ELSE number END) AS numbers,
            array_agg(served) AS served, array_agg(room) AS rooms
        FROM (SELECT * FROM turning ORDER BY place, load, holder, number LIMIT {_TURNS}) turns
    ) listed
    WHERE (
        SELECT NOT EXISTS (
            SELECT FROM finetuning_queueranking known
            WHERE known.pool_id = %(pool)s AND known.kept_until > statement_timestamp()
        ) AND pg_try_advisory_xact_lock(hashtextextended('ranking:' || %(pool)s, 0))
    )
    ON CONFLICT (pool_id) DO UPDATE SET made_at = excluded.made_at, kept_until = excluded.kept_until,
        holders = excluded.holders, organizations = excluded.organizations, numbers = excluded.numbers,
        served = excluded.served, rooms = excluded.rooms
    RETURNING true
"""  # noqa: S608 - constants

# Whether a ranking needs no renewal yet, or there is nothing to rank: most claims ask only this.
_IS_GOOD = f"""
    SELECT true WHERE EXISTS (
        SELECT FROM finetuning_queueranking WHERE pool_id = %(pool)s AND kept_until > statement_timestamp()
    ) OR NOT EXISTS (SELECT FROM finetuning_queueshare share WHERE {QUEUES})
"""  # noqa: S608 - constants

# --- What a worker can take -------------------------------------------------------------------------------------------

# Of organizations with allowances of concurrent GPUs, by id: whose jobs each covers, and how many GPUs it leaves. One
# value, so that it changes nothing about the search below if no organization has any.
_ROOMS = f"""
    rooms AS MATERIALIZED (
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
            FROM finetuning_queueshare share
            JOIN finetuning_allowance allowance ON allowance.organization_id = share.organization_id
            WHERE {QUEUES} AND allowance.concurrent_gpus IS NOT NULL GROUP BY allowance.organization_id
        ) by_organization
    )
"""  # noqa: S608 - constants
_ALLOWED = """((SELECT found FROM rooms) IS NULL OR NOT EXISTS (
    SELECT FROM jsonb_array_elements((SELECT found FROM rooms) -> waiting.organization_id) AS allowance(room)
    WHERE job.gpu_count > (room->>'gpus')::bigint AND (
        job.member_id = room->>'member' OR job.project_id = room->>'project' OR job.labels @> (room->'label')
    )
))"""


_GPUS = "job.gpu_count / job.node_count"  # of each machine


def _found(room: str) -> str:
    """Return the SQL of the runs of one organization, `waiting`: the oldest that the worker can take alone, the oldest
    of each shape that it could take with others, and those that wait for more than it has free: the oldest group, and
    the oldest other run that others have overtaken for long enough.

    `room` is the SQL of the GPUs that its holder may have beside those it has, or null.
    """
    found = f"run.id, run.created_at, {_GPUS} AS gpus, job.node_count, true AS has_memory, true AS fits"
    fitting = f"""
        FROM finetuning_run run JOIN finetuning_finetuningjob job ON job.id = run.job_id
        WHERE {QUEUED} AND {_GPUS} <= %(free)s
            AND (%(memory)s::bigint IS NULL
                OR coalesce((job.estimate->>'host_bytes')::numeric, 0) <= %(memory)s::bigint)
            AND (%(models)s::text[] IS NULL OR job.base_model_id = ANY(%(models)s::text[]))
            AND (run.retry_at IS NULL OR run.retry_at <= %(now)s)
            AND job.gpu_count <= coalesce({room}, job.gpu_count) AND {_ALLOWED}
    """
    waiting = f"""
        SELECT run.id, run.created_at, {_GPUS}, job.node_count, coalesce(memory.has_enough, true), false
        FROM finetuning_run run JOIN finetuning_finetuningjob job ON job.id = run.job_id
        CROSS JOIN LATERAL (
            SELECT coalesce((job.estimate->>'host_bytes')::numeric, 0) <= %(memory)s::bigint AS has_enough
        ) memory
        WHERE %(is_partly_used)s::boolean AND {QUEUED}
            AND {_GPUS} <= %(gpus)s AND ({_GPUS} > %(free)s OR NOT memory.has_enough) AND {_ALLOWED}
            AND (%(models)s::text[] IS NULL OR job.base_model_id = ANY(%(models)s::text[]))
    """  # noqa: S608 - constants
    return f"""
        (SELECT {found} {fitting} AND job.node_count = 1 ORDER BY run.created_at, run.id LIMIT 1)
        UNION ALL
        (SELECT * FROM (
            SELECT DISTINCT ON (job.node_count, job.gpu_count) {found} {fitting}
                AND job.node_count > 1 AND %(joins)s::boolean
            ORDER BY job.node_count, job.gpu_count, run.created_at, run.id
        ) groups ORDER BY created_at, id LIMIT {_SHAPES})
        UNION ALL
        ({waiting} AND job.node_count = 1 AND run.created_at <= %(overtaken_until)s
            ORDER BY run.created_at, run.id LIMIT 1)
        UNION ALL
        ({waiting} AND job.node_count > 1 AND %(joins)s::boolean ORDER BY run.created_at, run.id LIMIT 1)
    """  # noqa: S608 - constants


_COLUMNS = "found.id, found.gpus, found.node_count, found.created_at, found.has_memory, found.fits"
# The runs of the ranking's turns after the place `after`, the next ones first. The limit ends the search early.
_IN_TURN = f"""
    WITH {_ROOMS}, ranking AS MATERIALIZED (
        SELECT * FROM finetuning_queueranking
        WHERE pool_id = %(pool)s AND kept_until > %(now)s::timestamptz - interval '{_TOO_OLD}'
    )
    SELECT {_COLUMNS}, turn.holder, turn.place
    FROM unnest(
        (SELECT holders FROM ranking), (SELECT organizations FROM ranking), (SELECT numbers FROM ranking),
        (SELECT served FROM ranking), (SELECT rooms FROM ranking)
    ) WITH ORDINALITY AS turn(holder, organizations, number, served, room, place)
    CROSS JOIN LATERAL (
        SELECT sum(share.held_gpus) AS held FROM finetuning_queueshare share
        WHERE share.pool_id = %(pool)s AND share.organization_id = ANY(string_to_array(turn.organizations, ','))
        HAVING CASE WHEN turn.number > 0 THEN sum(share.served) = turn.served + turn.number - 1
            ELSE sum(share.served) >= turn.served - turn.number - 1 END
    ) live
    CROSS JOIN LATERAL unnest(string_to_array(turn.organizations, ',')) AS waiting(organization_id)
    CROSS JOIN LATERAL (
        SELECT FROM accounts_organization organization
        WHERE organization.id = waiting.organization_id AND {Organization.SHARE_HOLDER_SQL} = turn.holder
            AND {MAY_START} LIMIT 1
    ) paying
    CROSS JOIN LATERAL ({_found("turn.room - live.held")}) found
    WHERE turn.place > %(after)s AND found.id <> ALL(%(seen)s::text[])
    ORDER BY turn.place, found.created_at, found.id LIMIT %(limit)s
"""  # noqa: S608 - constants
# The runs of all holders in their order now. `loads` is in order, so that the limit can end this search early, too.
_IN_ORDER = f"""
    {HOLDERS}, {_ROOMS}
    SELECT {_COLUMNS}, loads.holder
    FROM (
        SELECT * FROM loads WHERE {HAS_ROOM} ORDER BY load
    ) loads
    JOIN waiting ON waiting.holder = loads.holder
    CROSS JOIN LATERAL ({_found("waiting.gpu_limit - loads.held")}) found
    WHERE found.id <> ALL(%(seen)s::text[])
    ORDER BY loads.load, found.created_at, found.id LIMIT %(limit)s
"""  # noqa: S608 - constants
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


def rank(*, pool_id: str) -> bool:
    """Rank the holders of the pool unless their ranking is still good or another claim makes it; return whether it did.

    It may rank none: their organizations are suspended, for example. Then the next claims need not find that out, too.
    Outside of a transaction, so that other claims see the ranking at once.
    """
    if fetch_prepared(_IS_GOOD, {"pool": pool_id}):
        return False
    kept_at_least = datetime.timedelta(seconds=settings.QUEUE_RANKING_SECONDS)
    return bool(fetch(_RANK, pool_id, None, kept_at_least=kept_at_least))


def list_candidates(
    *,
    worker: Worker,
    pool_id: str,
    free_gpus: int,
    free_bytes: int | None,
    base_models: Sequence[str] | None,
    now: datetime.datetime,
) -> Iterator[list[Candidate]]:
    """Yield runs of the pool in the order they should start: the oldest suitable ones of each organization.

    First those of the turns of the ranking; then, if the caller goes on, those of all holders, as they are ordered now.
    No run comes twice, and no more than `_LOOKED_AT` come in all: the caller locks and checks each. None passes its
    limit of concurrent GPUs, or an allowance of them. `free_bytes` None allows any host memory.
    """
    known = {
        "free": free_gpus,
        "gpus": worker.gpu_count,
        "joins": worker.offer is not None,
        "memory": free_bytes,
        "models": None if base_models is None else list(base_models),
        "is_partly_used": free_gpus < worker.gpu_count or free_bytes is not None,
        "overtaken_until": now - OVERTAKEN_AT_MOST,
    }
    after, seen = 0, list[str]()
    for batch in _BATCHES:
        limit = min(batch, _LOOKED_AT - len(seen))
        rows = fetch(_IN_TURN, pool_id, now, after=after, seen=seen, limit=limit, **known)
        yield [Candidate(*row[:-1]) for row in rows]
        seen += [row[0] for row in rows]
        if len(rows) < limit or len(seen) == _LOOKED_AT:
            break
        after = rows[-1][-1] - 1  # the last turn may have more runs
    if rest := _LOOKED_AT - len(seen):
        rows = fetch(_IN_ORDER, pool_id, now, seen=seen, limit=rest, **known)
        yield [Candidate(*row) for row in rows]


def lock_first(candidates: Sequence[Candidate]) -> tuple[int, bool] | None:
    """Lock the job and the run of the first candidate that no other transaction has locked, and its holder's limits.

    Return the candidate's place and whether the limits were free; None if every candidate is locked or taken.
    """
    known = {
        "runs": [each.run_id for each in candidates], "locks": [lock_name(each.holder) for each in candidates],
    }  # fmt: skip
    return next(((place - 1, is_free) for place, is_free in fetch_prepared(_LOCK_FIRST, known)), None)
