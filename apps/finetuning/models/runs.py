"""Models of the attempts at jobs, and of what they store."""

import pgtrigger
from django.contrib.postgres.fields import ArrayField
from django.db import models
from django.db.models import Q
from django.db.models.functions import Now

from apps.core.database.tenancy import OrganizationModel
from apps.core.database.transitions import choices_of, status_trigger
from apps.core.ids import IdField
from apps.finetuning.lifecycle import RUN_ACTIVE, RUN_HOLDING_LEASE, RUN_TERMINAL, RUN_TRANSITIONS, RunStatus
from apps.finetuning.models.jobs import FineTuningJob
from apps.finetuning.models.pools import GpuPool, Worker

_HOLDING = ", ".join(f"'{status}'" for status in RUN_HOLDING_LEASE)
_KEEP_SHARE = """
    IF added_queued = 0 AND added_held = 0 THEN
        RETURN NULL;
    END IF;
    SELECT gpu_count INTO gpus FROM finetuning_finetuningjob WHERE id = said.job_id;
    gpus := coalesce(gpus, 1);
    IF added_held < 0 AND said.leased_at IS NOT NULL THEN
        hours := greatest(extract(epoch FROM moment - said.leased_at)::float8, 0) / 3600;
    END IF;
    FOR attempt IN 1..2 LOOP
        UPDATE finetuning_queueshare SET
            queued = queued + added_queued,
            queued_since = CASE
                WHEN queued + added_queued = 0 THEN NULL WHEN queued = 0 THEN said.created_at ELSE queued_since
            END,
            held_gpus = held_gpus + added_held * gpus,
            used_gpu_hours = used_gpu_hours
                * exp(-least(greatest(extract(epoch FROM moment - used_at)::float8, 0) / 3600, 500))
                + gpus * (1 - exp(-least(hours, 500))),
            used_at = moment,
            served_at = CASE WHEN added_held > 0 THEN said.leased_at ELSE served_at END,
            served = served + greatest(added_held, 0)
        WHERE organization_id = said.organization_id AND pool_id = said.pool_id;
        EXIT WHEN FOUND;
        INSERT INTO finetuning_queueshare (organization_id, pool_id) VALUES (said.organization_id, said.pool_id)
            ON CONFLICT DO NOTHING;
    END LOOP;
    RETURN NULL;
"""
_IS = "coalesce(({}.status IN ({}))::int, 0)"
_SHARE_CHANGES = [
    ("said", "finetuning_run := CASE WHEN TG_OP = 'DELETE' THEN OLD ELSE NEW END"),
    *(
        (f"added_{name}", f"integer := {_IS.format('NEW', held)} - {_IS.format('OLD', held)}")
        for name, held in (("queued", f"'{RunStatus.QUEUED}'"), ("held", _HOLDING))
    ),
    ("moment", "timestamptz := clock_timestamp()"),
    ("gpus", "integer"),
    ("hours", "double precision := 0"),
]  # fmt: skip


def add_gpu_days(ended: str) -> str:
    """Return the statement that adds the time of ended attempts to their days (`GpuDay`).

    `ended` is SQL of rows (sign, organization_id, pool_id, job_id, leased_at, finished_at, billed_gpu_ms). Those that
    did not end count nothing. Times lose their zone in UTC, so that each day has 24 hours in every session.
    """
    return f"""
    INSERT INTO finetuning_gpuday AS before (organization_id, pool_id, day, held_gpu_us, billed_gpu_ms)
    SELECT ended.organization_id, ended.pool_id, midnight::date,
        sum(ended.sign * 1000000::numeric * coalesce(job.gpu_count, 1) * extract(epoch FROM
            least(span.until, midnight + interval '1 day') - greatest(span.since, midnight))),
        sum(CASE WHEN midnight = date_trunc('day', span.until) THEN ended.sign * ended.billed_gpu_ms ELSE 0 END)
    FROM ({ended}) AS ended(sign, organization_id, pool_id, job_id, leased_at, finished_at, billed_gpu_ms)
    LEFT JOIN finetuning_finetuningjob job ON job.id = ended.job_id
    CROSS JOIN LATERAL (SELECT least(ended.leased_at, ended.finished_at) AT TIME ZONE 'UTC',
        ended.finished_at AT TIME ZONE 'UTC') AS span(since, until)
    CROSS JOIN LATERAL generate_series(date_trunc('day', span.since), span.until, interval '1 day') AS midnight
    WHERE ended.finished_at IS NOT NULL
    GROUP BY 1, 2, 3 ORDER BY 1, 2, 3
    ON CONFLICT (organization_id, day, pool_id) DO UPDATE SET
        held_gpu_us = before.held_gpu_us + excluded.held_gpu_us,
        billed_gpu_ms = before.billed_gpu_ms + excluded.billed_gpu_ms
    """  # noqa: S608 - constants


_ENDED = "{0}.organization_id, {0}.pool_id, {0}.job_id, {0}.leased_at, {0}.finished_at, {0}.billed_gpu_ms"
_KEEP_DAYS = f"""
    IF OLD.finished_at IS NOT NULL OR NEW.finished_at IS NOT NULL THEN
        {add_gpu_days(f"VALUES (-1, {_ENDED.format('OLD')}), (1, {_ENDED.format('NEW')})").strip()};
    END IF;
    RETURN NULL;
"""


class Run(OrganizationModel):
    """One attempt at a job. While leased, `attempt` is the fencing token that every worker write must carry."""

    id = IdField(prefix="run")
    job = models.ForeignKey(FineTuningJob, on_delete=models.CASCADE, related_name="runs")
    attempt = models.PositiveIntegerField()
    status = models.CharField(max_length=16, choices=choices_of(RUN_TRANSITIONS), default=RunStatus.QUEUED)
    pool = models.ForeignKey(GpuPool, on_delete=models.PROTECT, related_name="runs")
    phase = models.CharField(max_length=16, blank=True)
    lease_id = models.CharField(max_length=40, null=True, unique=True)
    lease_token_sha256 = models.CharField(max_length=64, null=True)
    lease_expires_at = models.DateTimeField(null=True)
    heartbeat_at = models.DateTimeField(null=True)
    worker = models.ForeignKey(Worker, on_delete=models.PROTECT, null=True, related_name="runs", db_index=False)
    master = models.CharField(
        max_length=300, blank=True, help_text="Where its machines meet, as host:port; blank for one machine."
    )
    retry_at = models.DateTimeField(
        null=True,
        help_text="No claim takes it before: a limit of the month held it back, or its group did not come together.",
    )
    resume_from = models.ForeignKey("Checkpoint", on_delete=models.SET_NULL, null=True, related_name="+")
    return_requested_at = models.DateTimeField(null=True, help_text="The pool that lent the machine wants it back.")
    last_sequence = models.BigIntegerField(default=0, help_text="Highest worker event sequence taken in.")
    work = models.BigIntegerField(
        default=0, help_text="Units of work, as its worker counts them: without any for long, it is stalled."
    )
    idle_ms = models.BigIntegerField(default=0, help_text="Time between heartbeats since the last work.")
    stepless_ms = models.BigIntegerField(default=0, help_text="Time between heartbeats since the last new step.")
    training_started_at = models.DateTimeField(null=True)
    durable_step = models.PositiveIntegerField(default=0)
    billed_gpu_ms = models.BigIntegerField(default=0, help_text="Time whose steps are durable, of all its GPUs.")
    peak_memory_bytes = models.BigIntegerField(null=True)
    failure_code = models.CharField(max_length=48, blank=True)
    failure_message = models.CharField(max_length=500, blank=True)
    log_tail = models.TextField(blank=True)
    created_at = models.DateTimeField(db_default=Now())
    leased_at = models.DateTimeField(null=True)
    finished_at = models.DateTimeField(null=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["job", "attempt"], name="run_attempt_once"),
            models.UniqueConstraint(fields=["job"], condition=Q(status__in=RUN_ACTIVE), name="run_one_active"),
            models.CheckConstraint(
                name="run_lease_iff_held",
                condition=Q(
                    status__in=RUN_HOLDING_LEASE,
                    lease_id__isnull=False,
                    lease_token_sha256__isnull=False,
                    lease_expires_at__isnull=False,
                    heartbeat_at__isnull=False,
                    worker__isnull=False,
                )
                | (~Q(status__in=RUN_HOLDING_LEASE) & Q(lease_id=None, lease_token_sha256=None, lease_expires_at=None)),
            ),
            models.CheckConstraint(
                name="run_finished_iff_terminal",
                condition=Q(status__in=sorted(RUN_TERMINAL), finished_at__isnull=False)
                | (~Q(status__in=sorted(RUN_TERMINAL)) & Q(finished_at=None)),
            ),
        ]
        indexes = [
            models.Index(
                fields=["pool", "organization", "created_at", "id"],
                condition=Q(status=RunStatus.QUEUED),
                name="run_queue",
            ),
            models.Index(fields=["organization", "finished_at"], name="run_ended"),
            models.Index(fields=["finished_at"], name="run_ended_of_all"),
            models.Index(fields=["worker", "-leased_at", "-id"], name="run_of_worker"),
            models.Index(fields=["pool", "finished_at"], condition=~Q(training_started_at=None), name="run_trained"),
        ]
        triggers = [
            status_trigger("run_status", RUN_TRANSITIONS),
            pgtrigger.Trigger(
                name="run_share",
                when=pgtrigger.After,
                operation=pgtrigger.Insert | pgtrigger.UpdateOf("status") | pgtrigger.Delete,
                declare=_SHARE_CHANGES,
                func=_KEEP_SHARE,
            ),
            pgtrigger.Trigger(
                name="run_time",
                when=pgtrigger.After,
                operation=pgtrigger.Insert
                | pgtrigger.UpdateOf("leased_at", "finished_at", "billed_gpu_ms")
                | pgtrigger.Delete,
                func=_KEEP_DAYS,
            ),
        ]


class QueueShare(OrganizationModel):
    """An organization's queued runs, held GPUs and recent use in one pool, kept by the trigger of runs.

    Claims read it instead of the runs, so that they take the same time however long the queue is.
    """

    id = models.BigAutoField(primary_key=True)
    pool = models.ForeignKey(GpuPool, on_delete=models.CASCADE, related_name="+")
    queued = models.IntegerField(db_default=0)
    queued_since = models.DateTimeField(null=True, help_text="When the oldest run came since none was queued.")
    held_gpus = models.IntegerField(db_default=0)
    used_gpu_hours = models.FloatField(
        db_default=0.0, help_text="Of ended attempts; after each hour 1/e of it is left."
    )
    used_at = models.DateTimeField(db_default=Now(), help_text="When used_gpu_hours had its value.")
    served_at = models.DateTimeField(null=True, help_text="When a worker last took one of its runs.")
    served = models.BigIntegerField(db_default=0, help_text="How often workers took its runs.")

    class Meta:
        constraints = [models.UniqueConstraint(fields=["pool", "organization"], name="queue_share_once")]
        indexes = [models.Index(fields=["pool"], condition=Q(queued__gt=0), name="queue_share_waiting")]


class QueueRanking(models.Model):
    """The turns of a pool's share holders, best first, as one claim ranked them for itself and the next ones.

    Turn n of a holder is due once workers have taken n - 1 of its runs since. Its last turn has the number -n, and
    stays. `served` is the sum of `QueueShare.served` of its waiting organizations then. `rooms` are the GPUs that its
    limit leaves beside those that it holds in other pools and organizations. The arrays have one element for each turn.
    """

    pool = models.OneToOneField(GpuPool, on_delete=models.CASCADE, primary_key=True, related_name="+")
    made_at = models.DateTimeField()
    kept_until = models.DateTimeField(help_text="The next claim after it ranks again.")
    holders = ArrayField(models.CharField(max_length=40))
    organizations = ArrayField(models.TextField(), help_text="The ids of its waiting ones, with commas.")
    numbers = ArrayField(models.IntegerField())
    served = ArrayField(models.BigIntegerField())
    rooms = ArrayField(models.BigIntegerField(null=True))

    tenancy_reason = "the order of all tenants in a shared pool; claims read it, and no one is shown it"
    app_access = "none"


class GpuDay(OrganizationModel):
    """The time of an organization's ended attempts in one pool on one UTC day, kept by the trigger of runs.

    Sums over months read it instead of the runs. Attempts that go on are not in it.
    """

    id = models.BigAutoField(primary_key=True)
    pool = models.ForeignKey(GpuPool, on_delete=models.CASCADE, related_name="+", db_index=False)
    day = models.DateField()
    held_gpu_us = models.BigIntegerField(help_text="Microseconds of that day, of all GPUs.")
    billed_gpu_ms = models.BigIntegerField(help_text="Of the attempts that ended on that day.")

    class Meta:
        constraints = [models.UniqueConstraint(fields=["organization", "day", "pool"], name="gpu_day_once")]
        indexes = [models.Index(fields=["day"], name="gpu_day_of_all")]


class RunMember(OrganizationModel):
    """A machine that shares a run's lease. The run's own worker is the first one, and has no row here.

    It has a token of its own, which only keeps its place. Without one, its worker's next claim hands the place out.
    """

    id = IdField(prefix="member")
    run = models.ForeignKey(Run, on_delete=models.CASCADE, related_name="members")
    rank = models.PositiveSmallIntegerField(help_text="From 1: the run's worker is 0.")
    worker = models.ForeignKey(Worker, on_delete=models.PROTECT, related_name="memberships", db_index=False)
    address = models.CharField(max_length=253, help_text="Where the others reach this machine.")
    token_sha256 = models.CharField(max_length=64, null=True, unique=True)
    handed_at = models.DateTimeField(null=True, help_text="When a claim was last answered with this place.")
    started_at = models.DateTimeField(null=True, help_text="Of its first heartbeat.")
    heartbeat_at = models.DateTimeField(help_text="Of its last heartbeat; before the first one, of the lease.")
    left_at = models.DateTimeField(null=True, help_text="When its part of the training was done.")

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["run", "rank"], name="member_rank_once"),
            models.UniqueConstraint(fields=["run", "worker"], name="member_worker_once"),
            models.CheckConstraint(name="member_rank", condition=Q(rank__gte=1)),
            models.CheckConstraint(
                name="member_handed_pair",
                condition=Q(token_sha256=None, handed_at=None, started_at=None)
                | Q(token_sha256__isnull=False, handed_at__isnull=False),
            ),
        ]
        indexes = [models.Index(fields=["worker", "-id"], name="member_of_worker")]


class RunUpload(OrganizationModel):
    """Storage locations given to a run for the files of one manifest. The same manifest gets the same upload."""

    id = IdField(prefix="up")
    run = models.ForeignKey(Run, on_delete=models.CASCADE, related_name="uploads")
    kind = models.CharField(max_length=12)
    manifest = models.JSONField()
    manifest_sha256 = models.CharField(max_length=64)
    object_prefix = models.CharField(max_length=300)
    verified_at = models.DateTimeField(
        null=True, help_text="When every file had the promised hash; those of a checkpoint, the size."
    )
    created_at = models.DateTimeField(db_default=Now())

    class Meta:
        db_table = "finetuning_upload"
        constraints = [models.UniqueConstraint(fields=["run", "manifest_sha256"], name="upload_once")]


class Checkpoint(OrganizationModel):
    """A whole, hashed state to resume from; it is quarantined when its bytes stop matching."""

    id = IdField(prefix="ftckpt")
    job = models.ForeignKey(FineTuningJob, on_delete=models.CASCADE, related_name="checkpoints")
    run = models.ForeignKey(Run, on_delete=models.CASCADE, related_name="checkpoints")
    upload = models.ForeignKey(RunUpload, on_delete=models.PROTECT, related_name="+")
    step = models.PositiveIntegerField()
    metrics = models.JSONField(default=dict)
    bytes = models.BigIntegerField()
    billed_gpu_ms = models.BigIntegerField(default=0, help_text="The run's time up to this step.")
    created_at = models.DateTimeField(db_default=Now())
    quarantined_at = models.DateTimeField(null=True)
    deleted_at = models.DateTimeField(null=True)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["run", "step"], name="checkpoint_once")]
        indexes = [
            models.Index(
                fields=["organization"], include=["bytes"], condition=Q(deleted_at=None), name="checkpoint_kept"
            )
        ]
