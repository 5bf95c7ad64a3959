"""Models of jobs, their events, and what an organization sets for all of its jobs."""

import pgtrigger
from django.db import models
from django.db.models import F, Q, Value
from django.db.models.functions import Now
from django.db.models.lookups import Exact
from django.utils.translation import gettext_noop

from apps.core.database.tenancy import OrganizationModel
from apps.core.database.transitions import choices_of, status_trigger
from apps.core.ids import IdField
from apps.core.messages.key_invalidation import key_news
from apps.finetuning.lifecycle import JOB_OPEN, JOB_TERMINAL, JOB_TRANSITIONS, JobStatus
from apps.finetuning.models.constraints import paired
from apps.finetuning.models.pools import GpuPool


class AllowanceScope(models.TextChoices):
    """Whose jobs and requests an allowance covers."""

    MEMBER = "member", gettext_noop("a member")
    LABEL = "label", gettext_noop("a metadata label")
    PROJECT = "project", gettext_noop("a project")


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


class Allowance(OrganizationModel):
    """What an organization lets the jobs and requests of a member, label or project use; null means no limit.

    Requests are those of API keys: of the member, with the label, or in the project. All of these share one limit.
    """

    id = IdField(prefix="allow")
    member_id = models.CharField(max_length=40, null=True, help_text="The member whose jobs and keys it covers.")
    label = models.JSONField(null=True, help_text="The label whose jobs and keys it covers: one name and its value.")
    project = models.ForeignKey(
        "accounts.Project",
        on_delete=models.PROTECT,
        null=True,
        related_name="+",
        help_text="The project whose jobs and keys it covers.",
    )
    concurrent_gpus = models.PositiveIntegerField(null=True)
    queued_jobs = models.PositiveIntegerField(null=True)
    gpu_seconds_per_month = models.PositiveBigIntegerField(null=True)
    storage_bytes = models.PositiveBigIntegerField(null=True, help_text="Of a member alone.")
    requests_per_minute = models.PositiveIntegerField(null=True)
    tokens_per_minute = models.PositiveIntegerField(null=True)
    updated_by = models.CharField(max_length=64)
    updated_at = models.DateTimeField(db_default=Now())

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["organization", "member_id"], name="allowance_once_of_a_member"),
            models.UniqueConstraint(fields=["organization", "label"], name="allowance_once_of_a_label"),
            models.UniqueConstraint(fields=["organization", "project"], name="allowance_once_of_a_project"),
            models.CheckConstraint(
                name="allowance_of_one",
                condition=Q(member_id__isnull=False, label=None, project=None)
                | Q(member_id=None, label__isnull=False, project=None)
                | Q(member_id=None, label=None, project__isnull=False),
            ),
            models.CheckConstraint(
                name="allowance_limits",
                condition=~Q(
                    concurrent_gpus=None,
                    queued_jobs=None,
                    gpu_seconds_per_month=None,
                    storage_bytes=None,
                    requests_per_minute=None,
                    tokens_per_minute=None,
                ),
            ),
        ]
        triggers = [
            key_news(
                "allowance_key_news",
                pgtrigger.Insert | pgtrigger.Update | pgtrigger.Delete,
                organization="coalesce(NEW.organization_id, OLD.organization_id)",
            )
        ]

    @property
    def scope(self) -> AllowanceScope:
        if self.project_id is not None:
            return AllowanceScope.PROJECT
        return AllowanceScope.MEMBER if self.label is None else AllowanceScope.LABEL

    @property
    def target(self) -> str:
        """Return the id of the member or project, or the label as name=value."""
        if self.label is None:
            return self.project_id or self.member_id or ""
        ((name, value),) = self.label.items()
        return f"{name}={value}"

    def covers(self, job: "FineTuningJob") -> bool:
        """Return whether a job of its organization counts."""
        if self.label is None:
            return self.target in (job.member_id, job.project_id)
        return self.label.items() <= job.labels.items()

    @property
    def covered(self) -> Q:
        """Return the condition that selects the jobs that it covers."""
        match self.scope:
            case AllowanceScope.PROJECT:
                whose = Q(project_id=self.project_id)
            case AllowanceScope.MEMBER:
                whose = Q(member_id=self.member_id)
            case _:
                whose = Q(labels__contains=self.label)
        return whose & Q(organization_id=self.organization_id)


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
    gpu_count = models.PositiveSmallIntegerField(default=1, help_text="GPUs that each attempt takes, of all machines.")
    node_count = models.PositiveSmallIntegerField(default=1, help_text="Machines that share these GPUs evenly.")
    suffix = models.CharField(max_length=64, blank=True)
    method = models.CharField(max_length=16)
    hyperparameters = models.JSONField(help_text="apps.contracts.hyperparameters.Hyperparameters, every field resolved")
    requested = models.JSONField(default=dict, help_text="The request as sent, for the API to echo.")
    metadata = models.JSONField(default=dict)
    project = models.ForeignKey("accounts.Project", on_delete=models.PROTECT, related_name="+")
    member_id = models.CharField(max_length=40, blank=True, help_text="The member behind it, whose allowance counts.")
    labels = models.JSONField(default=dict, help_text="Its metadata, and the labels of the key that created it.")
    seed = models.BigIntegerField()
    estimate = models.JSONField(default=dict, help_text="apps.estimates.quote.Estimate at the moment of launch")
    price_rule = models.ForeignKey("catalog.PriceRule", on_delete=models.PROTECT, related_name="+", null=True)
    spend_cap_nano = models.BigIntegerField(default=0)
    firm_max_nano = models.BigIntegerField(
        null=True, help_text="The quoted maximum, if the price was firm at launch; no cap is above it."
    )
    firm_limit_nano = models.BigIntegerField(
        null=True, help_text="What the time of a run may cost before a job with a firm price pauses."
    )
    overran_at = models.DateTimeField(null=True, help_text="When it reached that limit; an operator continues it.")
    hold_id = models.CharField(max_length=40, blank=True)
    created_by = models.CharField(max_length=64)
    traceparent = models.CharField(max_length=55, blank=True, db_default="", help_text="The trace of its creation.")
    created_at = models.DateTimeField(db_default=Now())
    checked_at = models.DateTimeField(null=True, help_text="When it was last looked at while it waited for its files.")
    queued_at = models.DateTimeField(null=True)
    started_at = models.DateTimeField(null=True)
    finished_at = models.DateTimeField(null=True)
    dismissed_at = models.DateTimeField(null=True, help_text="When its failure was dismissed from the overview.")
    cancel_requested_at = models.DateTimeField(null=True)
    cancel_requested_by = models.CharField(max_length=64, null=True)
    pause_requested_at = models.DateTimeField(null=True)
    pause_requested_by = models.CharField(max_length=64, null=True)
    last_event_sequence = models.BigIntegerField(default=0)
    step = models.PositiveIntegerField(default=0)
    total_steps = models.PositiveIntegerField(null=True)
    trained_tokens = models.BigIntegerField(default=0)
    billed_gpu_ms = models.BigIntegerField(default=0)
    moved_gpu_ms = models.BigIntegerField(default=0, help_text="Of these, those billed before its last move.")
    moved_nano = models.BigIntegerField(default=0, help_text="What these cost, at the prices of the pools before.")
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
            models.CheckConstraint(
                name="job_nodes_share_gpus",
                condition=Q(node_count__gte=1) & Q(Exact(F("gpu_count") % F("node_count"), Value(0))),
            ),
            paired("job_cancel_pair", "cancel_requested_at", "cancel_requested_by"),
            paired("job_pause_pair", "pause_requested_at", "pause_requested_by"),
            models.CheckConstraint(
                name="job_finished_iff_terminal",
                condition=Q(status__in=sorted(JOB_TERMINAL), finished_at__isnull=False)
                | (~Q(status__in=sorted(JOB_TERMINAL)) & Q(finished_at=None)),
            ),
            models.CheckConstraint(name="job_cost_within_cap", condition=Q(cost_nano__lte=F("spend_cap_nano"))),
            models.CheckConstraint(
                name="job_cap_within_firm_max",
                condition=Q(firm_max_nano=None, firm_limit_nano=None, overran_at=None)
                | Q(
                    firm_max_nano__isnull=False,
                    firm_limit_nano__isnull=False,
                    firm_max_nano__gte=F("spend_cap_nano"),
                    firm_limit_nano__gte=F("firm_max_nano"),
                ),
            ),
            models.UniqueConstraint(
                fields=["organization", "idempotency_key"],
                name="job_idempotent",
                condition=Q(idempotency_key__isnull=False),
            ),
        ]
        indexes = [
            # A search reads the organization's jobs in this order, and what it looks at from the index alone.
            models.Index(
                fields=["organization", "-created_at", "-id"],
                include=["suffix", "training_file", "base_model"],
                name="job_newest",
            ),
            models.Index(fields=["-created_at", "-id"], name="job_newest_of_all"),
            models.Index(fields=["organization", "-cost_nano", "-id"], name="job_dearest"),
            # Few jobs are open: searches among them, of one organization or of all, read this small index.
            models.Index(
                fields=["status", "created_at", "id", "organization"],
                condition=Q(status__in=JOB_OPEN),
                name="job_open",
            ),
            models.Index(
                fields=["-finished_at", "organization"], condition=Q(finished_at__isnull=False), name="job_ended"
            ),
            models.Index(fields=["pool", "status"], name="job_pool_status"),
        ]
        triggers = [status_trigger("job_status", JOB_TRANSITIONS)]

    @property
    def gpus_per_node(self) -> int:
        """Return the GPUs that an attempt takes of each of its machines."""
        return self.gpu_count // self.node_count

    @property
    def is_firm(self) -> bool:
        """Return whether the job runs on past its cap, at the operator's expense: the cap is the quoted maximum."""
        return self.firm_max_nano is not None and self.spend_cap_nano == self.firm_max_nano

    @property
    def adapter_name(self) -> str:
        """Return the name of the adapter: the suffix, else the dataset's name and the end of the job's id."""
        return self.suffix or f"{self.training_file.dataset.name[:100]} {self.pk[-4:].lower()}"


class JobEvent(OrganizationModel):
    """One event of a job, in order. Its sequence is the cursor of live streams, its id the cursor of the API."""

    id = models.CharField(primary_key=True, max_length=48, help_text="ftevent-<ulid of the job>-<sequence>")
    job = models.ForeignKey(FineTuningJob, on_delete=models.CASCADE, related_name="events")
    sequence = models.BigIntegerField()
    level = models.CharField(max_length=8, default="info")
    type = models.CharField(max_length=16, default="message", help_text="message | metrics | state | log | samples")
    message = models.CharField(max_length=1000)
    data = models.JSONField(default=dict)
    created_at = models.DateTimeField(db_default=Now())

    is_append_only = True

    class Meta:
        constraints = [models.UniqueConstraint(fields=["job", "sequence"], name="job_event_once")]
        # Most events are metrics; the pages that list the others do not read them.
        indexes = [models.Index(fields=["job", "sequence"], condition=~Q(type="metrics"), name="job_event_words")]
        triggers = [pgtrigger.Protect(name="job_event_append_only", operation=pgtrigger.Update)]
