"""Models of GPU pools, the machines in them, and what they measured."""

from django.db import models
from django.db.models import Func, Q, Value
from django.db.models.functions import Greatest, Now
from django.utils.translation import gettext_noop

from apps.core.ids import IdField
from apps.finetuning.models.constraints import paired


class PricePolicy(models.TextChoices):
    """What a run that is slower than quoted costs: at most the quoted maximum, or its time up to the spend cap."""

    FIRM = "firm", gettext_noop("Firm: the customer pays at most the quoted maximum")
    METERED = "metered", gettext_noop("Metered: the customer pays for the time, up to the spend cap")


class GpuPool(models.Model):
    """Workers of one GPU type in one region, with one queue and one price."""

    id = IdField(prefix="pool")
    name = models.SlugField(max_length=40, unique=True, help_text="Names the queue train.<name> and the price.")
    gpu_type = models.ForeignKey("catalog.GpuType", on_delete=models.PROTECT, related_name="+")
    region = models.ForeignKey("accounts.Region", on_delete=models.PROTECT, related_name="pools", db_column="region")
    memory_bytes = models.BigIntegerField(help_text="Usable by one job; a CPU pool has what the operator grants it.")
    is_open = models.BooleanField(default=True, help_text="Accepts new jobs.")
    serves_whole_models = models.BooleanField(
        default=False, help_text="A replica may be given to one merged or fully trained model."
    )
    is_spot = models.BooleanField(default=False, help_text="Its machines may be taken away at any moment.")
    interruptions_per_hour = models.FloatField(default=0.0, help_text="Expected of one machine; 0 unless spot.")
    borrows_from = models.ForeignKey(
        "self",
        on_delete=models.PROTECT,
        null=True,
        related_name="borrowers",
        help_text="Its runs use free machines of that pool, and give them back when runs of that pool wait.",
    )
    price_policy = models.CharField(max_length=8, choices=PricePolicy, default=PricePolicy.FIRM)
    firm_factor = models.DecimalField(
        max_digits=4,
        decimal_places=2,
        default=3,
        help_text="A run with a firm price pauses once its time costs this many times the quoted maximum.",
    )
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
            paired("pool_calibration_pin_pair", "calibration_pinned_at", "calibration_pinned_by"),
            models.CheckConstraint(
                name="pool_interruptions_iff_spot",
                condition=Q(is_spot=True, interruptions_per_hour__gt=0) | Q(is_spot=False, interruptions_per_hour=0),
            ),
            models.CheckConstraint(name="pool_borrower_is_spot", condition=Q(borrows_from=None) | Q(is_spot=True)),
            models.CheckConstraint(name="pool_firm_factor", condition=Q(firm_factor__gte=1, firm_factor__lte=10)),
        ]

    def __str__(self) -> str:
        return self.name

    @property
    def machines(self) -> "GpuPool":
        """Return the pool whose machines run its jobs: itself, or the one that it borrows from."""
        return self.borrows_from or self

    @property
    def machines_id(self) -> str:
        return self.borrows_from_id or self.pk

    def firm_limit_nano(self, maximum_nano: int) -> int:
        """Return the value of the time after which a run with this quoted maximum pauses."""
        return min(int(maximum_nano * self.firm_factor), models.BigIntegerField.MAX_BIGINT)


class WorkerKind(models.TextChoices):
    TRAINER = "trainer", gettext_noop("Trainer: takes fine-tuning runs")
    REPLICA = "replica", gettext_noop("Replica: serves one model")


class WorkerToken(models.Model):
    """A one-time token that admits a worker to a pool (or a replica to a base model, or to one whole model)."""

    id = IdField(prefix="wtok")
    pool = models.ForeignKey(GpuPool, on_delete=models.CASCADE, related_name="+")
    kind = models.CharField(max_length=8, choices=WorkerKind)
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
    kind = models.CharField(max_length=8, choices=WorkerKind, default=WorkerKind.TRAINER)
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
    offer = models.JSONField(
        null=True, help_text="apps.finetuning.usage.offers.Offer, of its last claim; null: it joins no group."
    )
    measuring = models.ForeignKey(
        "catalog.BaseModel", on_delete=models.SET_NULL, null=True, related_name="+", help_text="It got its hub token."
    )
    measuring_since = models.DateTimeField(null=True)

    tenancy_reason = "workers are shared by all tenants"
    app_access = "read"
    # `gpu_count` as an expression.
    GPU_COUNT = Greatest(Value(1), Func("gpus", function="jsonb_array_length", output_field=models.IntegerField()))

    @property
    def gpu_count(self) -> int:
        """Return the number of its GPUs; a machine without any trains one job at a time and counts as one."""
        return max(1, len(self.gpus))

    @property
    def takes_work(self) -> bool:
        """Return whether it is a trainer that no operator has cordoned, drained or revoked."""
        is_stopped = self.cordoned_at or self.drain_requested_at or self.revoked_at
        return self.kind == WorkerKind.TRAINER and not is_stopped


class MemoryRehearsal(models.Model):
    """The memory of one shape of job, traced by a worker on request; it holds no customer's data.

    A request is open until a figure is believed, it is too old, or enough workers have answered it.
    """

    digest = models.CharField(max_length=64, primary_key=True, help_text="SHA-256 of the request and its version.")
    request = models.JSONField(help_text="apps.contracts.runs.MemoryRequest")
    computed_bytes = models.BigIntegerField(help_text="Peak by the formula; a figure far from it is refused.")
    asker_sha256 = models.CharField(max_length=64, help_text="Of the organization's id, to count its open requests.")
    asked_at = models.DateTimeField(db_default=Now())
    worker = models.ForeignKey(Worker, on_delete=models.SET_NULL, null=True, related_name="+")
    taken_at = models.DateTimeField(null=True)
    takes = models.PositiveSmallIntegerField(default=0, help_text="By workers, those that were interrupted included.")
    answers = models.JSONField(default=list, help_text="Not believed yet: worker, and memory or null.")
    report = models.JSONField(null=True, help_text="Believed: apps.contracts.runs.MemoryReport")
    reported_at = models.DateTimeField(null=True)

    tenancy_reason = "traces of models and recipes, shared by all tenants"
    app_access = "write"

    class Meta:
        constraints = [paired("rehearsal_report_pair", "report", "reported_at")]
        indexes = [
            models.Index(fields=["asked_at"], condition=Q(reported_at=None), name="rehearsal_open"),
            models.Index(fields=["-asked_at"], name="rehearsal_newest"),
        ]


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
