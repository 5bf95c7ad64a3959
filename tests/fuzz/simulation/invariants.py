"""What must hold after every operation, in SQL. Each statement returns the rows that break its rule."""

from django.db import connection

HELD, ENDED = "('leased', 'running')", "('succeeded', 'failed', 'cancelled')"
RULES = {
    "no machine has more GPUs leased than it has": f"""
        SELECT worker.id, sum(held.gpus), jsonb_array_length(worker.gpus)
        FROM (
            SELECT run.worker_id, job.gpu_count / job.node_count AS gpus
            FROM finetuning_run run JOIN finetuning_finetuningjob job ON job.id = run.job_id WHERE run.status IN {HELD}
            UNION ALL
            SELECT member.worker_id, job.gpu_count / job.node_count
            FROM finetuning_runmember member JOIN finetuning_run run ON run.id = member.run_id
            JOIN finetuning_finetuningjob job ON job.id = run.job_id
            WHERE run.status IN {HELD} AND member.left_at IS NULL
        ) held JOIN finetuning_worker worker ON worker.id = held.worker_id
        GROUP BY worker.id HAVING sum(held.gpus) > jsonb_array_length(worker.gpus)
    """,
    "a job has the attempts of its status": f"""
        SELECT job.id, job.status, array_agg(run.status)
        FROM finetuning_finetuningjob job LEFT JOIN finetuning_run run ON run.job_id = job.id
        GROUP BY job.id HAVING
            count(*) FILTER (WHERE run.status = 'queued') <> (job.status = 'queued')::int
            OR count(*) FILTER (WHERE run.status IN {HELD}) <> (job.status IN ('running', 'pausing'))::int
    """,
    "a job that may go on has one open hold, and no other job has one": """
        SELECT job.id, job.status, count(hold.id)
        FROM finetuning_finetuningjob job
        LEFT JOIN billing_hold hold ON hold.source = job.id AND hold.purpose = 'job' AND hold.status = 'open'
        GROUP BY job.id HAVING count(hold.id) <> (job.status IN ('queued', 'running', 'pausing'))::int
    """,
    "what a job paid and may still pay is within its cap": """
        SELECT job.id, job.spend_cap_nano
        FROM finetuning_finetuningjob job JOIN billing_hold hold ON hold.source = job.id AND hold.purpose = 'job'
        GROUP BY job.id
        HAVING sum(CASE WHEN hold.status = 'open' THEN hold.amount_nano ELSE captured_nano - refunded_nano END)
            > job.spend_cap_nano
    """,
    "the cost of a job that stopped is what was charged": """
        SELECT job.id, job.status, job.cost_nano, coalesce(sum(hold.captured_nano - hold.refunded_nano), 0)
        FROM finetuning_finetuningjob job
        LEFT JOIN billing_hold hold ON hold.source = job.id AND hold.purpose = 'job'
        WHERE job.status IN ('paused', 'succeeded', 'failed', 'cancelled')
        GROUP BY job.id HAVING job.cost_nano <> coalesce(sum(hold.captured_nano - hold.refunded_nano), 0)
    """,
    "no attempt is billed for more time than passed": """
        SELECT run.id, run.billed_gpu_ms
        FROM finetuning_run run JOIN finetuning_finetuningjob job ON job.id = run.job_id
        WHERE run.billed_gpu_ms > 1 + job.gpu_count * 1000 * coalesce(extract(
            epoch FROM coalesce(run.finished_at, clock_timestamp()) - run.training_started_at), 0)
    """,
    "the books balance": "SELECT sum(amount_nano) FROM billing_ledgerentry HAVING sum(amount_nano) <> 0",
    "each organization's held money is that of its open holds": """
        SELECT organization_id, sum(amount) FROM (
            SELECT account.organization_id, entry.amount_nano AS amount
            FROM billing_ledgerentry entry JOIN billing_ledgeraccount account ON account.id = entry.account_id
            WHERE account.kind = 'hold'
            UNION ALL
            SELECT organization_id, -amount_nano FROM billing_hold WHERE status = 'open'
        ) both_sides GROUP BY organization_id HAVING sum(amount) <> 0
    """,
    "a group has all its machines, each once": f"""
        SELECT run.id, job.node_count, count(DISTINCT member.worker_id)
        FROM finetuning_run run JOIN finetuning_finetuningjob job ON job.id = run.job_id
        LEFT JOIN finetuning_runmember member ON member.run_id = run.id AND member.worker_id <> run.worker_id
        WHERE run.status IN {HELD}
        GROUP BY run.id, job.id HAVING count(DISTINCT member.worker_id) <> job.node_count - 1
    """,
    "no lease lasts longer than it may": f"""
        SELECT id, lease_expires_at FROM finetuning_run
        WHERE status IN {HELD} AND lease_expires_at > clock_timestamp() + interval '60 s'
    """,
    "an attempt resumes from the newest checkpoint": f"""
        SELECT run.id, newest.step FROM finetuning_run run
        LEFT JOIN finetuning_checkpoint origin ON origin.id = run.resume_from_id
        JOIN finetuning_checkpoint newest ON newest.job_id = run.job_id
        JOIN finetuning_run author ON author.id = newest.run_id AND author.attempt < run.attempt
        WHERE run.status IN {HELD} AND newest.deleted_at IS NULL AND newest.quarantined_at IS NULL
            AND newest.step > coalesce(origin.step, 0)
    """,
    "the shares of the queue count its runs": f"""
        SELECT organization_id, pool_id, sum(queued), sum(held) FROM (
            SELECT organization_id, pool_id, queued, held_gpus AS held FROM finetuning_queueshare
            UNION ALL
            SELECT run.organization_id, run.pool_id, -(run.status = 'queued')::int,
                -(CASE WHEN run.status IN {HELD} THEN job.gpu_count ELSE 0 END)
            FROM finetuning_run run JOIN finetuning_finetuningjob job ON job.id = run.job_id
        ) counted GROUP BY organization_id, pool_id HAVING sum(queued) <> 0 OR sum(held) <> 0
    """,
    "a pool has no more machines than it may": """
        SELECT node.pool_id, capacity.maximum, count(*)
        FROM finetuning_capacitynode node JOIN finetuning_poolcapacity capacity ON capacity.pool_id = node.pool_id
        WHERE node.ended_at IS NULL AND node.fleet_id IS NULL
        GROUP BY node.pool_id, capacity.maximum HAVING count(*) > capacity.maximum
    """,
    "a base model has no more replicas than it may": """
        SELECT fleet.id, fleet.maximum, count(*)
        FROM serving_replicafleet fleet JOIN finetuning_capacitynode node ON node.fleet_id = fleet.id
        LEFT JOIN serving_replica replica ON replica.worker_id = node.worker_id
        WHERE node.ended_at IS NULL AND node.status <> 'draining' AND replica.draining_at IS NULL
        GROUP BY fleet.id HAVING count(*) > fleet.maximum
    """,
    "a replica whose machine ended gets no requests": """
        SELECT replica.id, node.status
        FROM serving_replica replica JOIN finetuning_capacitynode node ON node.worker_id = replica.worker_id
        WHERE node.ended_at IS NOT NULL AND (replica.is_ready OR replica.retired_at IS NULL)
    """,
    "a machine runs the kind of worker that it was started for": """
        SELECT node.id, worker.kind FROM finetuning_capacitynode node
        JOIN finetuning_worker worker ON worker.id = node.worker_id
        WHERE (node.fleet_id IS NOT NULL) <> (worker.kind = 'replica')
    """,
    "a machine that was given up gets no work": f"""
        SELECT node.id, run.id
        FROM finetuning_capacitynode node JOIN finetuning_run run ON run.worker_id = node.worker_id
        WHERE run.status IN {HELD} AND node.ended_at IS NOT NULL AND run.leased_at > node.ended_at
    """,
    "a run is on a machine of its pool, or of the pool that lends to it": f"""
        SELECT run.id, worker.pool_id, run.pool_id
        FROM finetuning_run run JOIN finetuning_gpupool pool ON pool.id = run.pool_id
        JOIN finetuning_worker worker ON worker.id = run.worker_id
        WHERE run.status IN {HELD} AND worker.pool_id <> coalesce(pool.borrows_from_id, pool.id)
    """,
    "an organization holds no more GPUs than its quota allows": f"""
        SELECT quota.organization_id, sum(job.gpu_count), quota.concurrent_gpus
        FROM finetuning_run run JOIN finetuning_finetuningjob job ON job.id = run.job_id
        JOIN finetuning_quota quota ON quota.organization_id = run.organization_id
        WHERE run.status IN {HELD} GROUP BY quota.id HAVING sum(job.gpu_count) > quota.concurrent_gpus
    """,
    "a job that ended has one event of its end, and no other job has one": f"""
        SELECT job.id, job.status, array_agg(event.data ->> 'status')
        FROM finetuning_finetuningjob job
        LEFT JOIN finetuning_jobevent event
            ON event.job_id = job.id AND event.type = 'state' AND event.data ->> 'status' IN {ENDED}
        GROUP BY job.id HAVING
            count(event.id) <> (job.status IN {ENDED})::int
            OR count(event.id) <> count(*) FILTER (WHERE event.data ->> 'status' = job.status)
    """,
    "a job has a result if it succeeded, and only then": """
        SELECT id, status FROM finetuning_finetuningjob WHERE (status = 'succeeded') <> (adapter_version_id IS NOT NULL)
    """,
}


def broken_rules() -> list[str]:
    """Return each broken rule with the first rows that break it; empty if all hold."""
    found = []
    with connection.cursor() as cursor:
        cursor.execute("SET CONSTRAINTS ALL IMMEDIATE; SET CONSTRAINTS ALL DEFERRED")  # as a commit checks them
        for rule, statement in RULES.items():
            cursor.execute(statement)
            if rows := cursor.fetchmany(3):
                found.append(f"{rule}: {rows}")
    return found
