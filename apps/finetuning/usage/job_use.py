"""What counts against the limits of jobs now: of a share holder, and under the allowances of its organizations."""

import datetime
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from apps.accounts.models import Organization
from apps.billing.budgets import STOPS_JOB
from apps.billing.models import Budget, HoldPurpose, HoldStatus
from apps.core.database.prepared import fetch_prepared
from apps.finetuning.lifecycle import RUN_HOLDING_LEASE
from apps.finetuning.models import Allowance


@dataclass(frozen=True, kw_only=True)
class AllowanceUse:
    """An allowance and what uses it: GPUs now, GPU-seconds of this month, and those that its running jobs still need.

    `jobs` are those of the jobs asked about that it covers, by their ids.
    """

    allowance: Allowance
    gpus: int
    seconds: float
    running_seconds: float
    jobs: frozenset[str]


@dataclass(frozen=True, kw_only=True)
class HolderUse:
    """What a share holder uses: GPUs now, GPU-seconds of this month, and those that its running jobs still need.

    `remaining` has the GPU-seconds that the jobs asked about need, by their ids. `allowances` are those that cover one
    of these jobs. `budgets` are those that pause jobs and are used up, by the ids of the jobs that they cover.
    """

    gpus: int
    seconds: float
    running_seconds: float
    remaining: Mapping[str, float]
    allowances: Sequence[AllowanceUse]
    budgets: Mapping[str, Budget]


HOLDING = ", ".join(f"'{status}'" for status in RUN_HOLDING_LEASE)


def covers(allowance: str, job: str) -> str:
    """Return the SQL condition that an allowance covers a job of the same organization, both by their aliases."""
    return (
        f"({job}.member_id = {allowance}.member_id OR {job}.project_id = {allowance}.project_id"
        f" OR {job}.labels @> {allowance}.label)"
    )


_OF_MONTH = """
    sum(job.gpu_count * greatest(extract(epoch FROM least(run.finished_at, %(now)s::timestamptz)
        - greatest(run.leased_at, %(month)s::timestamptz))::float8, 0))
"""
_THIS_MONTH = """
    (run.finished_at IS NULL OR run.finished_at > %(month)s::timestamptz) AND run.leased_at < %(now)s::timestamptz
"""
_USE = f"""
    WITH sharing AS MATERIALIZED (
        SELECT organization.id FROM accounts_organization organization
        WHERE (organization.id = %(holder)s OR organization.founded_by_id = %(holder)s)
            AND {Organization.SHARE_HOLDER_SQL} = %(holder)s
    ), running AS MATERIALIZED (
        SELECT run.job_id FROM sharing JOIN finetuning_run run ON run.organization_id = sharing.id
        WHERE run.finished_at IS NULL AND run.status IN ({HOLDING})
    ), needed AS MATERIALIZED (
        SELECT job.id, job.organization_id, job.member_id, job.project_id, job.labels, job.gpu_count,
            running.job_id IS NOT NULL AS is_running, greatest(
            job.gpu_count * coalesce(
                nullif((job.estimate->>'run_seconds_p50')::float8, 0), (job.estimate->>'train_seconds_p50')::float8, 0
            ) - coalesce((
                SELECT sum(job.gpu_count * extract(epoch FROM
                    least(run.finished_at, %(now)s::timestamptz) - run.leased_at)::float8)
                FROM finetuning_run run WHERE run.job_id = job.id AND run.leased_at < %(now)s::timestamptz
            ), 0), 0) AS seconds
        FROM finetuning_finetuningjob job LEFT JOIN running ON running.job_id = job.id
        WHERE job.id IN (SELECT job_id FROM running UNION SELECT unnest(%(jobs)s::text[]))
    ), allowed AS MATERIALIZED (
        SELECT allowance.*, coalesce(sum(needed.gpu_count) FILTER (WHERE needed.is_running), 0) AS gpus,
            coalesce(sum(needed.seconds) FILTER (WHERE needed.is_running), 0) AS running_seconds,
            jsonb_agg(needed.id) FILTER (WHERE needed.id = ANY(%(jobs)s::text[])) AS jobs
        FROM sharing JOIN finetuning_allowance allowance ON allowance.organization_id = sharing.id
        JOIN needed ON needed.organization_id = allowance.organization_id AND {covers("allowance", "needed")}
        GROUP BY allowance.id HAVING bool_or(needed.id = ANY(%(jobs)s::text[]))
    )
    SELECT coalesce(sum(gpu_count) FILTER (WHERE is_running), 0),
        -- As occupancy.held_gpu_seconds adds it up: days that are over, and the runs of today.
        coalesce((
            SELECT sum(before.held_gpu_us)::float8 / 1000000
            FROM sharing JOIN finetuning_gpuday before ON before.organization_id = sharing.id
            WHERE before.day >= (%(month)s::timestamptz AT TIME ZONE 'UTC')::date
                AND before.day < (%(now)s::timestamptz AT TIME ZONE 'UTC')::date
        ), 0) + coalesce((
            SELECT sum(job.gpu_count * greatest(extract(epoch FROM least(run.finished_at, %(now)s::timestamptz)
                - greatest(run.leased_at, CASE WHEN run.finished_at IS NULL THEN %(month)s::timestamptz
                    ELSE date_trunc('day', %(now)s::timestamptz, 'UTC') END))::float8, 0))
            FROM sharing JOIN finetuning_run run ON run.organization_id = sharing.id
            JOIN finetuning_finetuningjob job ON job.id = run.job_id
            WHERE (run.finished_at IS NULL OR run.finished_at > date_trunc('day', %(now)s::timestamptz, 'UTC'))
                AND run.leased_at < %(now)s::timestamptz
        ), 0),
        coalesce(sum(seconds) FILTER (WHERE is_running), 0),
        coalesce(jsonb_object_agg(id, seconds) FILTER (WHERE id = ANY(%(jobs)s::text[])), '{{}}')::text,
        coalesce((
            SELECT jsonb_agg(jsonb_build_array(
                jsonb_build_object('id', id, 'organization_id', organization_id, 'member_id', member_id, 'label', label,
                    'project_id', project_id, 'concurrent_gpus', concurrent_gpus, 'queued_jobs', queued_jobs,
                    'gpu_seconds_per_month', gpu_seconds_per_month),
                gpus, running_seconds, jobs,
                CASE WHEN gpu_seconds_per_month IS NULL THEN 0 ELSE coalesce((
                    SELECT {_OF_MONTH} FROM finetuning_run run JOIN finetuning_finetuningjob job ON job.id = run.job_id
                    WHERE run.organization_id = allowed.organization_id AND {_THIS_MONTH} AND {covers("allowed", "job")}
                ), 0) END
            ) ORDER BY id) FROM allowed
        ), '[]')::text,
        coalesce((
            SELECT jsonb_object_agg(
                hold.source, jsonb_build_object('id', budget.id, 'scope', budget.scope, 'target', budget.target)
            )
            FROM sharing JOIN billing_budget budget ON budget.organization_id = sharing.id
            JOIN billing_hold hold ON hold.organization_id = sharing.id AND hold.source = ANY(%(jobs)s::text[])
                AND hold.purpose = '{HoldPurpose.JOB}' AND hold.status = '{HoldStatus.OPEN}'
            WHERE {STOPS_JOB}
        ), '{{}}')::text
    FROM needed
"""  # noqa: S608 - constants


def read_use(*, holder: str, jobs: Sequence[str], now: datetime.datetime) -> HolderUse:
    """Return what counts against the limits of a share holder, and what these jobs of it, by their ids, still need."""
    known = {"holder": holder, "jobs": list(jobs), "now": now, "month": month_of(now)}
    ((gpus, seconds, running_seconds, remaining, allowances, budgets),) = fetch_prepared(_USE, known)
    return HolderUse(
        gpus=gpus,
        seconds=seconds,
        running_seconds=running_seconds,
        remaining=json.loads(remaining),
        allowances=[_allowance_use(*each) for each in json.loads(allowances)],
        budgets={job: Budget(**columns) for job, columns in json.loads(budgets).items()},
    )


def _allowance_use(
    columns: dict[str, str | int | None], gpus: int, running_seconds: float, jobs: list[str], seconds: float
) -> AllowanceUse:
    return AllowanceUse(
        allowance=Allowance(**columns),
        gpus=gpus,
        seconds=seconds,
        running_seconds=running_seconds,
        jobs=frozenset(jobs),
    )


def month_of(now: datetime.datetime) -> datetime.datetime:
    """Return the first moment of the calendar month (UTC)."""
    return now.astimezone(datetime.UTC).replace(day=1, hour=0, minute=0, second=0, microsecond=0)
