"""Models of elastic pools: how many machines a pool may have, and the machines that were requested for it."""

from django.db import models
from django.db.models import F, Q
from django.db.models.functions import Now
from django.utils.translation import gettext_noop

from apps.core.database.transitions import choices_of, status_trigger
from apps.core.ids import IdField
from apps.finetuning.lifecycle import NODE_ENDED, NODE_TRANSITIONS, NodeStatus
from apps.finetuning.models.pools import GpuPool, Worker, WorkerToken


class CapacityKind(models.TextChoices):
    """What starts and stops the machines of a pool."""

    STATIC = "static", gettext_noop("You: machines join by hand")
    SLURM = "slurm", gettext_noop("Slurm: Anneal submits and cancels jobs")
    KUBERNETES = "kubernetes", gettext_noop("Kubernetes: Anneal creates and deletes Jobs")
    DSTACK = "dstack", gettext_noop("dstack: Anneal starts and stops runs")


class PoolCapacity(models.Model):
    """The limits of one pool and the state of its reconciliation. A pool without a row is static."""

    pool = models.OneToOneField(GpuPool, on_delete=models.CASCADE, primary_key=True, related_name="capacity")
    kind = models.CharField(max_length=10, choices=CapacityKind, default=CapacityKind.STATIC)
    minimum = models.PositiveSmallIntegerField(default=0)
    maximum = models.PositiveSmallIntegerField(default=1)
    gpus_per_node = models.PositiveSmallIntegerField(default=1)
    idle_seconds = models.PositiveIntegerField(default=300, help_text="A node without work for so long is released.")
    node_nano_per_hour = models.BigIntegerField(default=0, help_text="What one node costs the operator.")
    budget_nano_per_hour = models.BigIntegerField(null=True, help_text="Null: only the maximum limits the nodes.")
    on_demand_nodes = models.PositiveSmallIntegerField(
        null=True, help_text="Further nodes are spot. Null: all nodes are alike, as the settings say."
    )
    spot_node_nano_per_hour = models.BigIntegerField(default=0, help_text="What one spot node costs the operator.")
    replaces_spot = models.BooleanField(default=True, help_text="On-demand nodes start where no spot node does.")
    spot_retry_at = models.DateTimeField(null=True, help_text="On-demand nodes take the place of spot nodes before.")
    settings = models.JSONField(default=dict, help_text="Of the engine, as its Struct says.")
    wanted = models.PositiveSmallIntegerField(default=0, help_text="By the last reconciliation.")
    failures = models.PositiveSmallIntegerField(default=0, help_text="Of starts in a row; each doubles the wait.")
    retry_at = models.DateTimeField(null=True, help_text="Nothing is requested before.")
    problem = models.CharField(max_length=300, blank=True)
    busy_until = models.DateTimeField(null=True, help_text="Set while one task reconciles the pool.")

    tenancy_reason = "pools are shared by all tenants"
    app_access = "read"

    class Meta:
        constraints = [
            models.CheckConstraint(name="capacity_minimum", condition=Q(minimum__lte=F("maximum"))),
            models.CheckConstraint(
                name="capacity_amounts",
                condition=Q(node_nano_per_hour__gte=0, spot_node_nano_per_hour__gte=0, gpus_per_node__gte=1)
                & (Q(budget_nano_per_hour=None) | Q(budget_nano_per_hour__gte=0)),
            ),
        ]

    @property
    def is_elastic(self) -> bool:
        """Return whether a worker can appear without an operator."""
        return self.kind != CapacityKind.STATIC and self.maximum > 0


class CapacityToken(models.Model):
    """The token of a pool's API server, sealed. Only the process that starts nodes, and the console, may read it."""

    capacity = models.OneToOneField(PoolCapacity, on_delete=models.CASCADE, primary_key=True, related_name="+")
    token_sealed = models.BinaryField()

    tenancy_reason = "pools are shared by all tenants"
    app_access = "none"


class CapacityNode(models.Model):
    """One machine that was requested for a pool. The row exists before the request."""

    id = IdField(prefix="node")
    pool = models.ForeignKey(GpuPool, on_delete=models.CASCADE, related_name="nodes")
    fleet = models.ForeignKey(
        "serving.ReplicaFleet", on_delete=models.CASCADE, null=True, related_name="nodes", help_text="Null: it trains."
    )
    status = models.CharField(max_length=10, choices=choices_of(NODE_TRANSITIONS), default=NodeStatus.REQUESTED)
    is_spot = models.BooleanField(default=False, help_text="In a pool with nodes of both kinds.")
    external_id = models.CharField(max_length=64, blank=True, help_text="As the engine calls it.")
    reason = models.CharField(max_length=300, blank=True, help_text="Why it waits, or why it ended.")
    token = models.ForeignKey(WorkerToken, on_delete=models.SET_NULL, null=True, related_name="+")
    worker = models.OneToOneField(Worker, on_delete=models.SET_NULL, null=True, related_name="node")
    requested_at = models.DateTimeField(db_default=Now())
    ended_at = models.DateTimeField(null=True)

    tenancy_reason = "pools are shared by all tenants"
    app_access = "read"

    class Meta:
        indexes = [models.Index(fields=["pool", "-requested_at"], name="node_newest")]
        constraints = [
            models.CheckConstraint(
                name="node_ended_iff_status",
                condition=Q(ended_at=None, status__in=sorted(set(NODE_TRANSITIONS) - NODE_ENDED))
                | Q(ended_at__isnull=False, status__in=sorted(NODE_ENDED)),
            )
        ]
        triggers = [status_trigger("node_moves", NODE_TRANSITIONS)]

    @property
    def name(self) -> str:
        """Return its name in the engine. It follows from the row, so a repeated request finds the first one."""
        return name_prefix(self.pool_id) + self.pk.replace("_", "-")


def name_prefix(pool_id: str) -> str:
    """Return how the names of the pool's nodes begin; no other installation has such names."""
    return f"anneal-{pool_id.replace('_', '-')}-"
