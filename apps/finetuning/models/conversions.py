"""Models of the conversions of finished models: another form, ordered after training for a price."""

from django.db import models
from django.db.models import Q

from apps.adapters.models import AdapterVersion
from apps.core.database.tenancy import OrganizationModel
from apps.core.database.transitions import choices_of, status_trigger
from apps.core.ids import IdField
from apps.finetuning.lifecycle import CONVERSION_OPEN, CONVERSION_TRANSITIONS, CONVERSION_UNMADE, ConversionStatus
from apps.finetuning.models.pools import Worker


class Conversion(OrganizationModel):
    """An order to merge a version into its base model, or to convert it to GGUF, at the price its customer confirmed.

    The lease is the worker's while the order is running. An attempt stores its files under one manifest.
    """

    id = IdField(prefix="conv")
    version = models.ForeignKey(AdapterVersion, on_delete=models.PROTECT, related_name="+")
    kind = models.CharField(max_length=16, help_text="The export: merged_16bit or gguf.")
    status = models.CharField(
        max_length=10, choices=choices_of(CONVERSION_TRANSITIONS), default=ConversionStatus.WAITING
    )
    created_by = models.CharField(max_length=64)
    created_at = models.DateTimeField()
    bytes = models.BigIntegerField(help_text="As quoted; once it has succeeded, what was made.")
    price_rule = models.ForeignKey("catalog.PriceRule", on_delete=models.PROTECT, null=True, related_name="+")
    price_nano = models.BigIntegerField(help_text="The confirmed price. It is held, and never exceeded.")
    hold_id = models.CharField(max_length=40, blank=True)
    cost_nano = models.BigIntegerField(default=0)
    worker = models.ForeignKey(Worker, on_delete=models.SET_NULL, null=True, related_name="+")
    leased_at = models.DateTimeField(null=True, help_text="When a worker last took it.")
    heartbeat_at = models.DateTimeField(null=True)
    attempt = models.PositiveIntegerField(default=0)
    failures = models.PositiveSmallIntegerField(default=0, help_text="Of attempts; an interruption by a run is none.")
    object_prefix = models.CharField(max_length=300, blank=True, help_text="Of the attempt's files.")
    manifest = models.JSONField(default=dict)
    manifest_sha256 = models.CharField(max_length=64, blank=True)
    verified_at = models.DateTimeField(null=True, help_text="When the stored files were hashed.")
    ended_at = models.DateTimeField(null=True)
    problem = models.CharField(max_length=300, blank=True, help_text="Why the last attempt made nothing.")

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["version", "kind"], condition=~Q(status__in=CONVERSION_UNMADE), name="conversion_once"
            ),
            models.CheckConstraint(
                condition=Q(price_nano__gte=0, cost_nano__gte=0, bytes__gte=0), name="conversion_amounts"
            ),
            models.CheckConstraint(condition=Q(price_nano=0) | ~Q(hold_id=""), name="conversion_priced"),
        ]
        indexes = [models.Index(fields=["created_at"], condition=Q(status__in=CONVERSION_OPEN), name="conversion_open")]
        triggers = [status_trigger("conversion_status", CONVERSION_TRANSITIONS)]
