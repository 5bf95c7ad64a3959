"""Models of jobs, of the runs that carry them out, and of the machines that do the work."""

import pgtrigger
from django.db import models
from django.db.models import F, Q
from django.db.models.functions import Now

from apps.core.database.tenancy import OrganizationModel
from apps.core.database.transitions import choices_of, status_trigger
from apps.core.ids import IdField
from apps.core.messages.key_invalidation import key_news
from apps.finetuning.lifecycle import (
    JOB_TERMINAL,
    JOB_TRANSITIONS,
    RUN_ACTIVE,
    RUN_HOLDING_LEASE,
    RUN_TERMINAL,
    RUN_TRANSITIONS,
    CalibrationOutcome,
    JobStatus,
    RunStatus,
)


def _paired(name: str, *fields: str) -> models.CheckConstraint:
    nothing = Q(**dict.fromkeys(fields))
    everything = Q(**{f"{field}__isnull": False for field in fields})
    return models.CheckConstraint(name=name, condition=nothing | everything)


class GpuPool(models.Model):
    """Workers of one GPU type in one region, with one queue and one price."""

    id = IdField(prefix="pool")
    name = models.SlugField(max_length=40, unique=True, help_text="Names the queue train.<name> and the price.")
    gpu_type = models.ForeignKey("catalog.GpuType", on_delete=models.PROTECT, related_name="+")
    region = models.CharField(max_length=40, default="local")
    memory_bytes = models.BigIntegerField(help_text="Usable by one job; a CPU pool has what the operator grants it.")
    is_open = models.BooleanField(default=True, help_text="Accepts new jobs.")
    serves_whole_models = models.BooleanField(
        default=False, help_text="A replica may be given to one merged or fully trained model."
    )
    is_spot = models.BooleanField(default=False, help_text="Its machines may be taken away at any moment.")
    interruptions_per_hour = models.FloatField(default=0.0, help_text="Expected of one machine; 0 unless spot.")
    calibration = models.ForeignKey(
        "CalibrationVersion", on_delete=models.PROTECT, null=True, related_name="+", help_text="In use; null: none."
    )
    calibration_pinned_at = models.DateTimeField(null=True, help_text="Set: new versions wait for an operator.")
    calibration_pinned_by = models.CharField(max_length=64, null=True)
    created_at = models.DateTimeField(db_default=Now())

    tenancy_reason = "pools are shared by all tenants"
    app_access = "read"

    class Meta:
        constraints = [
            _paired("pool_calibration_pin_pair", "calibration_pinned_at", "calibration_pinned_by"),
            models.CheckConstraint(
                name="pool_interruptions_iff_spot",
                condition=Q(is_spot=True, interruptions_per_hour__gt=0) | Q(is_spot=False, interruptions_per_hour=0),
            ),
        ]

    def __str__(self) -> str:
        return self.name


class WorkerToken(models.Model):
    """A one-time token that admits a worker to a pool (or a replica to a base model, or to one whole model)."""

    id = IdField(prefix="wtok")
    pool = models.ForeignKey(GpuPool, on_delete=models.CASCADE, related_name="+")
    kind = models.CharField(max_length=8, choices=[("trainer", "trainer"), ("replica", "replica")])
    base_model = models.ForeignKey("catalog.BaseModel", on_delete=models.PROTECT, null=True, related_name="+")
    whole_model = models.ForeignKey("adapters.AdapterVersion", on_delete=models.PROTECT, null=True, related_name="+")
    token_sha256 = models.CharField(max_length=64, unique=True)
    created_by = models.CharField(max_length=64)
    created_at = models.DateTimeField(db_default=Now())
    expires_at = models.DateTimeField()
    used_at = models.DateTimeField(null=True)

    tenancy_reason = "workers are shared by all tenants"
    app_access = "none"


class Worker(models.Model):
    """A machine that trains (or serves).

    A cordoned one takes no new work; a drained one also gives up its current work.
    """

    id = IdField(prefix="worker")
    pool = models.ForeignKey(GpuPool, on_delete=models.PROTECT, related_name="workers")
    kind = models.CharField(max_length=8, default="trainer")
    hostname = models.CharField(max_length=120)
    credential_sha256 = models.CharField(max_length=64, unique=True)
    gpus = models.JSONField(default=list)
    software = models.JSONField(default=dict)
    memory_bytes = models.BigIntegerField(null=True, help_text="Of the machine itself; null: it has not said.")
    created_at = models.DateTimeField(db_default=Now())
    last_seen_at = models.DateTimeField(null=True)
    cordoned_at = models.DateTimeField(null=True)
    drain_requested_at = models.DateTimeField(null=True)
    revoked_at = models.DateTimeField(null=True)

    tenancy_reason = "workers are shared by all tenants"
    app_access = "read"


class ThroughputProbe(models.Model):
    """One short measured training loop on a pool's worker: the start of every time estimate."""

    id = IdField(prefix="probe")
    pool = models.ForeignKey(GpuPool, on_delete=models.CASCADE, related_name="probes")
    worker = models.ForeignKey(Worker, on_delete=models.SET_NULL, null=True, related_name="+")
    base_model = models.ForeignKey(
        "catalog.BaseModel", on_delete=models.PROTECT, null=True, related_name="+", help_text="Null: made-up weights."
    )
    shape = models.CharField(max_length=60, blank=True, help_text="Of made-up weights, as the grid calls it.")
    method = models.CharField(max_length=16)
    report = models.JSONField(help_text="apps.contracts.worker_api.ProbeReport")
    measured_at = models.DateTimeField(db_default=Now())

    tenancy_reason = "measurements of shared machines"
    app_access = "read"

    class Meta:
        indexes = [models.Index(fields=["pool", "base_model", "method", "-measured_at"], name="probe_newest")]


class Quota(OrganizationModel):
    """Limits of one organization; null means no limit."""

    id = IdField(prefix="quota")
    concurrent_gpus = models.PositiveIntegerField(null=True, default=2)
    queued_jobs = models.PositiveIntegerField(null=True, default=20)
    gpu_seconds_per_month = models.PositiveBigIntegerField(null=True, default=360_000)
    storage_bytes = models.PositiveBigIntegerField(null=True, default=20_000_000_000)
    requests_per_minute = models.PositiveIntegerField(null=True, default=6_000)
    tokens_per_minute = models.PositiveIntegerField(null=True, default=2_000_000)
    concurrent_requests = models.PositiveIntegerField(null=True, default=256)
    weight = models.PositiveIntegerField(default=1, help_text="Share of a busy pool, relative to others.")
    updated_by = models.CharField(max_length=64)
    updated_at = models.DateTimeField(db_default=Now())

    class Meta:
        constraints = [models.UniqueConstraint(fields=["organization"], name="quota_once")]
        triggers = [key_news("quota_key_news", pgtrigger.Insert | pgtrigger.Update, organization="NEW.organization_id")]


class FineTuningJob(OrganizationModel):
    """A customer's request for training, with its progress and result."""

    id = IdField(prefix="ftjob", separator="-")
    status = models.CharField(max_length=16, choices=choices_of(JOB_TRANSITIONS), default=JobStatus.VALIDATING_FILES)
    base_model = models.ForeignKey("catalog.BaseModel", on_delete=models.PROTECT, related_name="+")
    training_file = models.ForeignKey("datasets.DatasetVersion", on_delete=models.PROTECT, related_name="jobs")
    validation_file = models.ForeignKey(
        "datasets.DatasetVersion", on_delete=models.PROTECT, null=True, related_name="validating_jobs"
    )
    pool = models.ForeignKey(GpuPool, on_delete=models.PROTECT, related_name="jobs", null=True)
    gpu_count = models.PositiveSmallIntegerField(default=1, help_text="GPUs of one machine that each attempt takes.")
    suffix = models.CharField(max_length=64, blank=True)
    method = models.CharField(max_length=16)
    hyperparameters = models.JSONField(help_text="apps.contracts.runs.Hyperparameters, every field resolved")
    requested = models.JSONField(default=dict, help_text="The request as sent, for the API to echo.")
    metadata = models.JSONField(default=dict)
    seed = models.BigIntegerField()
    estimate = models.JSONField(default=dict, help_text="apps.estimates.quote.Estimate at the moment of launch")
    price_rule = models.ForeignKey("catalog.PriceRule", on_delete=models.PROTECT, related_name="+", null=True)
    spend_cap_nano = models.BigIntegerField(default=0)
    hold_id = models.CharField(max_length=40, blank=True)
    created_by = models.CharField(max_length=64)
    created_at = models.DateTimeField(db_default=Now())
    queued_at = models.DateTimeField(null=True)
    started_at = models.DateTimeField(null=True)
    finished_at = models.DateTimeField(null=True)
    cancel_requested_at = models.DateTimeField(null=True)
    cancel_requested_by = models.CharField(max_length=64, null=True)
    pause_requested_at = models.DateTimeField(null=True)
    pause_requested_by = models.CharField(max_length=64, null=True)
    waiting_reason = models.CharField(max_length=300, blank=True, help_text="Why a queued job is held back, if it is.")
    last_event_sequence = models.BigIntegerField(default=0)
    step = models.PositiveIntegerField(default=0)
    total_steps = models.PositiveIntegerField(null=True)
    trained_tokens = models.BigIntegerField(default=0)
    billed_gpu_ms = models.BigIntegerField(default=0)
    cost_nano = models.BigIntegerField(default=0)
    error_code = models.CharField(max_length=48, blank=True)
    error_message = models.CharField(max_length=500, blank=True)
    error_param = models.CharField(max_length=64, blank=True)
    adapter_version = models.ForeignKey(
        "adapters.AdapterVersion", on_delete=models.PROTECT, null=True, related_name="+"
    )
    idempotency_key = models.CharField(max_length=200, null=True)

    class Meta:
        constraints = [
            models.CheckConstraint(
                name="job_admitted_whole",
                condition=Q(queued_at=None)
                | Q(pool__isnull=False, price_rule__isnull=False, spend_cap_nano__gt=0) & ~Q(hold_id=""),
            ),
            models.CheckConstraint(name="job_takes_a_gpu", condition=Q(gpu_count__gte=1)),
            _paired("job_cancel_pair", "cancel_requested_at", "cancel_requested_by"),
            _paired("job_pause_pair", "pause_requested_at", "pause_requested_by"),
            models.CheckConstraint(
                name="job_finished_iff_terminal",
                condition=Q(status__in=sorted(JOB_TERMINAL), finished_at__isnull=False)
                | (~Q(status__in=sorted(JOB_TERMINAL)) & Q(finished_at=None)),
            ),
            models.CheckConstraint(name="job_cost_within_cap", condition=Q(cost_nano__lte=F("spend_cap_nano"))),
            models.UniqueConstraint(
                fields=["organization", "idempotency_key"],
                name="job_idempotent",
                condition=Q(idempotency_key__isnull=False),
            ),
        ]
        indexes = [
            models.Index(fields=["organization", "-created_at", "-id"], name="job_newest"),
            models.Index(fields=["pool", "status"], name="job_pool_status"),
        ]
        triggers = [status_trigger("job_status", JOB_TRANSITIONS)]

    @property
    def adapter_name(self) -> str:
        """Return the name of the adapter: the suffix, else the dataset's name and the end of the job's id."""
        return self.suffix or f"{self.training_file.dataset.name[:100]} {self.pk[-4:].lower()}"


class TrackerKey(OrganizationModel):
    """An organization's account at an experiment tracker, to which its jobs report."""

    id = IdField(prefix="trk")
    kind = models.CharField(max_length=8, choices=[("wandb", "Weights & Biases"), ("mlflow", "MLflow")])
    url = models.URLField(max_length=400, blank=True, help_text="Of an MLflow tracking server.")
    secret_sealed = models.BinaryField(help_text="The key or token, encrypted.")
    hint = models.CharField(max_length=8, help_text="The last characters, to tell keys apart.")
    updated_by = models.CharField(max_length=64)
    updated_at = models.DateTimeField()

    class Meta:
        constraints = [models.UniqueConstraint(fields=["organization", "kind"], name="tracker_one_of_a_kind")]


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
    worker = models.ForeignKey(Worker, on_delete=models.PROTECT, null=True, related_name="runs")
    resume_from = models.ForeignKey("Checkpoint", on_delete=models.SET_NULL, null=True, related_name="+")
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
        indexes = [models.Index(fields=["pool", "created_at"], condition=Q(status=RunStatus.QUEUED), name="run_queue")]
        triggers = [status_trigger("run_status", RUN_TRANSITIONS)]


class JobEvent(OrganizationModel):
    """One event of a job, in order. Its sequence is the cursor of live streams, its id the cursor of the API."""

    id = models.CharField(primary_key=True, max_length=48, help_text="ftevent-<ulid of the job>-<sequence>")
    job = models.ForeignKey(FineTuningJob, on_delete=models.CASCADE, related_name="events")
    sequence = models.BigIntegerField()
    level = models.CharField(max_length=8, default="info")
    type = models.CharField(max_length=16, default="message", help_text="message | metrics | state")
    message = models.CharField(max_length=1000)
    data = models.JSONField(default=dict)
    created_at = models.DateTimeField(db_default=Now())

    is_append_only = True

    class Meta:
        constraints = [models.UniqueConstraint(fields=["job", "sequence"], name="job_event_once")]
        triggers = [pgtrigger.Protect(name="job_event_append_only", operation=pgtrigger.Update)]


class RunUpload(OrganizationModel):
    """Storage locations given to a run for the files of one manifest. The same manifest gets the same upload."""

    id = IdField(prefix="up")
    run = models.ForeignKey(Run, on_delete=models.CASCADE, related_name="uploads")
    kind = models.CharField(max_length=12)
    manifest = models.JSONField()
    manifest_sha256 = models.CharField(max_length=64)
    object_prefix = models.CharField(max_length=300)
    verified_at = models.DateTimeField(null=True, help_text="When every file was read and had the promised hash.")
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


class CalibrationPoint(OrganizationModel):
    """A finished run's actual figures beside the estimate that its customer was shown.

    Each factor is the correction in the estimate: the estimate divided by it is the physics' own figure.
    """

    run = models.OneToOneField(Run, on_delete=models.CASCADE, related_name="calibration")
    pool = models.ForeignKey(GpuPool, on_delete=models.CASCADE, related_name="+")
    outcome = models.CharField(
        max_length=16,
        choices=[(CalibrationOutcome.SUCCEEDED, "Succeeded"), (CalibrationOutcome.OUT_OF_MEMORY, "Out of memory")],
    )
    family = models.CharField(max_length=48, help_text="model_type of the base model's config.json")
    method = models.CharField(max_length=16)
    attempts = models.PositiveIntegerField(help_text="Of the job; times, tokens and cost are sums over them.")
    physics = models.CharField(max_length=16, help_text="apps.estimates.calibration.PHYSICS of the estimate")
    version = models.PositiveIntegerField(default=0, help_text="Calibration of the pool in the estimate; 0: none.")
    time_factor = models.FloatField(default=1.0)
    memory_factor = models.FloatField(default=1.0)
    estimated_seconds = models.FloatField(null=True, help_text="Training time alone, as billed.")
    estimated_seconds_p10 = models.FloatField(null=True)
    estimated_seconds_p90 = models.FloatField(null=True)
    actual_seconds = models.FloatField(null=True)
    wall_seconds = models.FloatField(null=True, help_text="From the first claim to the end, with everything unbilled.")
    estimated_tokens_per_second = models.FloatField(null=True)
    actual_tokens_per_second = models.FloatField(null=True)
    estimated_peak_bytes = models.BigIntegerField(null=True)
    estimated_peak_bytes_p10 = models.BigIntegerField(null=True)
    estimated_peak_bytes_p90 = models.BigIntegerField(null=True)
    actual_peak_bytes = models.BigIntegerField(null=True, help_text="Reserved by torch on a GPU, resident on a CPU.")
    estimated_cost_nano = models.BigIntegerField(null=True)
    estimated_cost_nano_p10 = models.BigIntegerField(null=True)
    estimated_cost_nano_p90 = models.BigIntegerField(null=True)
    actual_cost_nano = models.BigIntegerField(null=True)
    created_at = models.DateTimeField(db_default=Now())

    class Meta:
        indexes = [models.Index(fields=["pool", "-id"], name="calibration_point_newest")]


class CalibrationVersion(models.Model):
    """The calibration fitted on a pool's finished runs at one time, with its inputs. Versions are never deleted."""

    id = IdField(prefix="cal")
    pool = models.ForeignKey(GpuPool, on_delete=models.PROTECT, related_name="calibrations")
    number = models.PositiveIntegerField(help_text="Counts a pool's versions from 1.")
    calibration = models.JSONField(help_text="apps.estimates.calibration.Calibration")
    fitted_on = models.JSONField(help_text="apps.finetuning.pools.calibrations.FittedOn")
    last_point = models.BigIntegerField(help_text="The newest CalibrationPoint that was there.")
    created_at = models.DateTimeField(db_default=Now())

    tenancy_reason = "medians over a shared pool's runs; names no organization and no run"
    app_access = "read"
    is_append_only = True

    class Meta:
        constraints = [models.UniqueConstraint(fields=["pool", "number"], name="calibration_number_once")]
        triggers = [pgtrigger.Protect(name="calibration_append_only", operation=pgtrigger.Update | pgtrigger.Delete)]


class PoolAccuracy(models.Model):
    """A pool's figures on the public page; absent while it has too few runs to protect each organization."""

    pool = models.OneToOneField(GpuPool, on_delete=models.CASCADE, primary_key=True, related_name="accuracy")
    report = models.JSONField(help_text="apps.finetuning.pools.accuracy.AccuracyReport")
    updated_at = models.DateTimeField(db_default=Now())

    tenancy_reason = "figures over several organizations' runs, above the floor of apps.finetuning.pools.accuracy"
    app_access = "read"
