"""Models of serving: deployments, placements on replicas, and what the replicas report."""

from django.db import models
from django.db.models.functions import Now

from apps.core.database.tenancy import OrganizationModel
from apps.core.ids import IdField
from apps.serving.placement import ReplicaCapacity


class Replica(models.Model):
    """One engine and the agent beside it. It serves one base model with adapters, or one whole model alone."""

    id = IdField(prefix="rep")
    base_model = models.ForeignKey("catalog.BaseModel", on_delete=models.PROTECT, related_name="replicas")
    whole_model = models.ForeignKey(
        "adapters.AdapterVersion",
        on_delete=models.PROTECT,
        null=True,
        related_name="whole_replicas",
        help_text="The version it serves merged, and nothing else; null: the base model and adapters.",
    )
    region = models.ForeignKey("accounts.Region", on_delete=models.PROTECT, related_name="replicas")  # its pool's
    worker = models.OneToOneField("finetuning.Worker", on_delete=models.PROTECT, related_name="replica", null=True)
    url = models.CharField(max_length=300, blank=True, help_text="Where its proxy listens: unix:///… or http(s)://…")
    is_address_accepted = models.BooleanField(db_default=True, help_text="By the settings or an operator.")
    # What an operator accepts; placement counts the engine's report (`reported_room`) within it.
    capacity = models.PositiveIntegerField(default=56, help_text="Adapters registered at once.")
    slots = models.PositiveIntegerField(default=8, help_text="Adapters in one batch without loss of speed.")
    max_rank = models.PositiveIntegerField(default=64)
    reported_room = models.JSONField(default=dict, help_text="capacity, slots, max_rank; {} before it was heard of")
    revision = models.CharField(max_length=64, blank=True, help_text="SHA-256 of the base model's weights.")
    load = models.JSONField(default=dict, help_text="apps.contracts.serving.EngineLoad, {} before it was heard of")
    draining_at = models.DateTimeField(null=True, help_text="Gets nothing new and answers only what no other can.")
    retired_at = models.DateTimeField(null=True, help_text="Its machine was released: it never comes back.")
    generation = models.BigIntegerField(default=0, help_text="Grows with each change of the desired set.")
    engine_generation = models.CharField(max_length=64, blank=True)
    is_ready = models.BooleanField(default=False)
    readiness_changed_at = models.DateTimeField(db_default=Now(), help_text="Since when it is ready, or is not.")
    reason = models.CharField(max_length=300, blank=True)
    observed_at = models.DateTimeField(null=True)
    isolated_at = models.DateTimeField(null=True, help_text="Found faulty: asked nothing until it is cleared.")
    isolated_because = models.CharField(max_length=300, blank=True, db_default="")
    fault_count = models.PositiveIntegerField(db_default=0, help_text="How often it was found faulty, ever.")
    created_at = models.DateTimeField(db_default=Now())

    tenancy_reason = "replicas are shared by all tenants"
    app_access = "read"

    @property
    def is_trusted(self) -> bool:
        """Whether it may get requests and work."""
        return self.isolated_at is None and self.is_address_accepted

    @property
    def room(self) -> ReplicaCapacity:
        """The room that placement uses: the reported one, but at most the accepted one."""
        reported = self.reported_room
        return ReplicaCapacity(
            replica_id=self.pk,
            capacity=min(self.capacity, reported.get("capacity", self.capacity)),
            slots=min(self.slots, reported.get("slots", self.slots)),
            max_rank=min(self.max_rank, reported.get("max_rank", self.max_rank)),
            rank_class=self.max_rank,
            is_draining=self.draining_at is not None,
            region=self.region_id,
        )

    @property
    def unaccepted_room(self) -> dict[str, int] | None:
        """The reported room, if it differs from the accepted one."""
        accepted = {"capacity": self.capacity, "slots": self.slots, "max_rank": self.max_rank}
        reported = accepted | self.reported_room
        return reported if reported != accepted and self.whole_model_id is None else None


class ReplicaFleet(models.Model):
    """The replicas of a base model that an elastic pool starts, by requests for the model and its adapters."""

    id = IdField(prefix="fleet")
    pool = models.ForeignKey("finetuning.GpuPool", on_delete=models.CASCADE, related_name="fleets")
    base_model = models.ForeignKey("catalog.BaseModel", on_delete=models.PROTECT, related_name="fleets")
    region = models.ForeignKey("accounts.Region", on_delete=models.PROTECT, related_name="fleets")  # its pool's
    minimum = models.PositiveSmallIntegerField(default=0)
    maximum = models.PositiveSmallIntegerField(default=1)
    requests_per_replica = models.PositiveSmallIntegerField(default=16, help_text="That one replica answers at once.")
    idle_seconds = models.PositiveIntegerField(default=600, help_text="Without a need for so long, a replica stops.")
    last_requested_at = models.DateTimeField(null=True, help_text="To within seconds.")
    wanted = models.PositiveSmallIntegerField(default=0, help_text="By the last reconciliation.")
    wanted_at = models.DateTimeField(null=True, help_text="When so many were last needed.")
    able_at = models.DateTimeField(null=True, help_text="When a replica could last start: requests wait for it.")

    tenancy_reason = "replicas are shared by all tenants"
    app_access = "read"

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["pool", "base_model"], name="fleet_once"),
            models.CheckConstraint(
                name="fleet_limits", condition=models.Q(minimum__lte=models.F("maximum"), requests_per_replica__gte=1)
            ),
        ]


class ReplicaToken(models.Model):
    """The token that the gateway presents to a replica's proxy.

    It has a separate table because web may read replicas but not tokens.
    """

    replica = models.OneToOneField(Replica, on_delete=models.CASCADE, primary_key=True, related_name="token")
    token_sealed = models.BinaryField()

    tenancy_reason = "replicas are shared by all tenants"
    app_access = "none"


class EngineTokens(models.Model):
    """Tokens that one start of a replica's engine counted for customers on one day (UTC), as first and last reading.

    The first reading of a day is also the last of the day before, so no token falls between days.
    """

    replica = models.ForeignKey(Replica, on_delete=models.CASCADE, related_name="engine_tokens")
    engine_generation = models.CharField(max_length=64)
    day = models.DateField()
    first_at = models.DateTimeField()
    first_input_tokens = models.BigIntegerField()
    first_output_tokens = models.BigIntegerField()
    last_at = models.DateTimeField()
    last_input_tokens = models.BigIntegerField()
    last_output_tokens = models.BigIntegerField()

    tenancy_reason = "replicas are shared by all tenants"
    app_access = "none"

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["replica", "engine_generation", "day"], name="engine_tokens_once")
        ]


class MeteringCheck(models.Model):
    """One day of a replica: its engine's token counts, compared with what the gateways metered.

    The metered amount is a range: a request that began or ended around a reading may be on either side of it.
    """

    replica = models.ForeignKey(Replica, on_delete=models.CASCADE, related_name="metering_checks")
    day = models.DateField()
    counted_input_tokens = models.BigIntegerField()
    counted_output_tokens = models.BigIntegerField()
    least_input_tokens = models.BigIntegerField()
    most_input_tokens = models.BigIntegerField()
    least_output_tokens = models.BigIntegerField()
    most_output_tokens = models.BigIntegerField()
    request_count = models.BigIntegerField()
    difference_share = models.FloatField(help_text="Of what was counted, beyond what the readings leave open.")
    is_within = models.BooleanField()
    checked_at = models.DateTimeField()

    tenancy_reason = "replicas are shared by all tenants"
    app_access = "none"

    class Meta:
        constraints = [models.UniqueConstraint(fields=["replica", "day"], name="metering_check_once")]

    @property
    def difference_percent(self) -> float:
        return 100 * self.difference_share


class Deployment(OrganizationModel):
    """The wish that an adapter version answers requests."""

    id = IdField(prefix="dep")
    adapter_version = models.ForeignKey("adapters.AdapterVersion", on_delete=models.PROTECT, related_name="deployments")
    created_at = models.DateTimeField(db_default=Now())
    removed_at = models.DateTimeField(null=True)
    last_requested_at = models.DateTimeField(null=True, help_text="To within seconds; decides which stay loaded.")
    # Requests per second as decaying sums. With the quick sum an adapter spreads to more replicas at once; with the
    # slow sum it gives them up only after minutes.
    quick_demand = models.FloatField(default=0.0)
    slow_demand = models.FloatField(default=0.0)
    demand_at = models.DateTimeField(null=True, help_text="When both were right; they have faded since.")
    pinned_at = models.DateTimeField(null=True, help_text="Kept warm, and paid for, since.")
    warm_billed_until = models.DateTimeField(null=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["adapter_version"], condition=models.Q(removed_at=None), name="deployment_once"
            )
        ]


class Alias(OrganizationModel):
    """A name that stands for a version of one adapter and, for a share of its requests, for another version."""

    id = IdField(prefix="alias")
    adapter = models.ForeignKey("adapters.Adapter", on_delete=models.PROTECT, related_name="aliases")
    name = models.CharField(max_length=240, help_text="Of an imported alias, the whole name.")
    model_name = models.CharField(max_length=240, help_text="ft:<base>:<organization>:<suffix>:<name>")
    version = models.ForeignKey("adapters.AdapterVersion", on_delete=models.PROTECT, related_name="+")
    canary_version = models.ForeignKey("adapters.AdapterVersion", on_delete=models.PROTECT, related_name="+", null=True)
    canary_percent = models.PositiveSmallIntegerField(default=0)
    previous_version = models.ForeignKey(
        "adapters.AdapterVersion", on_delete=models.PROTECT, related_name="+", null=True, help_text="To return to."
    )
    moved_at = models.DateTimeField(db_default=Now())
    created_at = models.DateTimeField(db_default=Now())

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["adapter", "name"], name="alias_once"),
            # Two organizations may import the same name. Each request finds that of its own organization.
            models.UniqueConstraint(fields=["organization", "model_name"], name="alias_model_name_once"),
            models.CheckConstraint(
                condition=models.Q(canary_version=None, canary_percent=0)
                | models.Q(canary_version__isnull=False, canary_percent__gte=1, canary_percent__lte=99),
                name="alias_canary_share",
            ),
        ]


class Placement(OrganizationModel):
    """The decision of apps.serving.placement that a replica holds an adapter version."""

    replica = models.ForeignKey(Replica, on_delete=models.CASCADE, related_name="placements")
    adapter_version = models.ForeignKey("adapters.AdapterVersion", on_delete=models.CASCADE, related_name="placements")
    placed_at = models.DateTimeField(db_default=Now())

    class Meta:
        constraints = [models.UniqueConstraint(fields=["replica", "adapter_version"], name="placement_once")]


class LoadedAdapter(OrganizationModel):
    """A replica's report on one adapter version."""

    replica = models.ForeignKey(Replica, on_delete=models.CASCADE, related_name="loaded")
    adapter_version = models.ForeignKey("adapters.AdapterVersion", on_delete=models.CASCADE, related_name="loaded")
    state = models.CharField(max_length=12)
    reason = models.CharField(max_length=300, blank=True)
    observed_at = models.DateTimeField(db_default=Now())

    class Meta:
        constraints = [models.UniqueConstraint(fields=["replica", "adapter_version"], name="loaded_once")]
