"""Metered requests, and the usage series that add them up for rating."""

import pgtrigger
from django.contrib.postgres.indexes import BrinIndex
from django.db import models
from django.db.models import F, Q
from django.db.models.functions import Now

from apps.core.database.tenancy import OrganizationModel


class UsageEvent(OrganizationModel):
    """One metered request, or several refused ones. Its id comes from the gateway's spool, so a replay adds nothing.

    Thousands of rows are written per second: there is no index beyond those the queries need. Recording looks up
    referenced rows once per batch; a foreign key would look up and lock them for each row.
    """

    organization = models.ForeignKey(
        "accounts.Organization", on_delete=models.PROTECT, related_name="+", db_index=False, db_constraint=False
    )
    id = models.CharField(max_length=40, primary_key=True)
    key_id = models.CharField(max_length=40)
    model_name = models.CharField(max_length=200)
    adapter_version_id = models.CharField(max_length=40, blank=True)
    slice_id = models.CharField(max_length=40, blank=True, help_text="The hold it was reserved from.")
    input_price = models.ForeignKey(
        "catalog.PriceRule", on_delete=models.PROTECT, related_name="+", null=True, db_index=False, db_constraint=False
    )
    output_price = models.ForeignKey(
        "catalog.PriceRule", on_delete=models.PROTECT, related_name="+", null=True, db_index=False, db_constraint=False
    )
    input_tokens = models.BigIntegerField()
    cached_input_tokens = models.BigIntegerField(default=0)
    output_tokens = models.BigIntegerField()
    finish = models.CharField(
        max_length=16, help_text="stop, length, aborted; a Refusal; lost: the gateway died meanwhile"
    )
    request_count = models.IntegerField(db_default=1, help_text="More than one: refused alike, and counted together.")
    latency_ms = models.PositiveIntegerField(default=0)
    first_token_ms = models.PositiveIntegerField(null=True)
    occurred_at = models.DateTimeField()
    # The engine's work for the request, charged or not. The prompt counts once for each choice.
    replica_id = models.CharField(max_length=40, blank=True, db_default="", help_text="Which replica answered.")
    engine_input_tokens = models.BigIntegerField(db_default=0)
    engine_output_tokens = models.BigIntegerField(db_default=0)
    output_bytes = models.BigIntegerField(null=True, help_text="Of the answer, as the gateway saw it.")
    body_sha256 = models.CharField(max_length=64)

    is_append_only = True

    class Meta:
        indexes = [
            models.Index(fields=["organization", "-occurred_at"], name="usage_newest"),
            BrinIndex(fields=["occurred_at"], name="usage_by_time"),
        ]
        constraints = [
            models.CheckConstraint(condition=Q(input_tokens__gte=0, output_tokens__gte=0), name="usage_tokens_positive")
        ]
        triggers = [pgtrigger.Protect(name="usage_append_only", operation=pgtrigger.Update | pgtrigger.Delete)]


class UsageConflict(OrganizationModel):
    """A usage record that reuses another record's id, or costs more than was reserved. It is kept and not charged."""

    id = models.BigAutoField(primary_key=True)
    event_id = models.CharField(max_length=40)
    body = models.JSONField()
    body_sha256 = models.CharField(max_length=64)
    created_at = models.DateTimeField(db_default=Now())

    is_append_only = True

    class Meta:
        constraints = [models.UniqueConstraint(fields=["event_id", "body_sha256"], name="usage_conflict_once")]
        triggers = [pgtrigger.Protect(name="usage_conflict_append_only", operation=pgtrigger.Update | pgtrigger.Delete)]


class UsageSeries(OrganizationModel):
    """Quantity of one SKU at one price that a key used of an adapter version on one day, and the cost posted."""

    sku = models.CharField(max_length=120)
    price_rule = models.ForeignKey("catalog.PriceRule", on_delete=models.PROTECT, related_name="+")
    subject = models.CharField(max_length=200, help_text="The model it was used of, or what was stored.")
    key_id = models.CharField(max_length=40, blank=True)
    adapter_version_id = models.CharField(max_length=40, blank=True)
    day = models.DateField()
    quantity = models.BigIntegerField(default=0)
    request_count = models.BigIntegerField(default=0)
    rated_quantity = models.BigIntegerField(default=0, help_text="How much of the quantity is paid for.")
    rated_request_count = models.BigIntegerField(default=0)
    posted_nano = models.BigIntegerField(default=0)
    invoiced_nano = models.BigIntegerField(default=0, help_text="Of what is posted, on invoices.")

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["organization", "price_rule", "subject", "key_id", "adapter_version_id", "day"],
                name="usage_series_once",
            ),
            models.CheckConstraint(condition=Q(quantity__gte=0, posted_nano__gte=0), name="usage_series_positive"),
            models.CheckConstraint(
                condition=Q(rated_quantity__lte=F("quantity"), rated_request_count__lte=F("request_count")),
                name="usage_series_rated_within",
            ),
        ]
        indexes = [
            models.Index(
                fields=["organization"],
                condition=Q(request_count__gt=F("rated_request_count")),
                name="usage_series_unrated",
            ),
            models.Index(fields=["organization", "day"], name="usage_series_day"),
            BrinIndex(fields=["day"], name="usage_series_by_day"),
        ]


class StorageSample(OrganizationModel):
    """The bytes an organization stored in one hour; added to its series once."""

    id = models.BigAutoField(primary_key=True)
    hour_at = models.DateTimeField()
    bytes = models.BigIntegerField()
    created_at = models.DateTimeField(db_default=Now())

    is_append_only = True

    class Meta:
        constraints = [models.UniqueConstraint(fields=["organization", "hour_at"], name="storage_sample_once")]
        triggers = [pgtrigger.Protect(name="storage_sample_append_only", operation=pgtrigger.Update | pgtrigger.Delete)]


class VolumeRebate(OrganizationModel):
    """The rebate of a price's tiers on a month's volume, and how much of it is posted."""

    price_rule = models.ForeignKey("catalog.PriceRule", on_delete=models.PROTECT, related_name="+")
    month = models.DateField()
    quantity = models.BigIntegerField(default=0)
    posted_nano = models.BigIntegerField(default=0)
    invoiced_nano = models.BigIntegerField(default=0, help_text="Of what is posted, on invoices.")

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["organization", "price_rule", "month"], name="volume_rebate_once"),
            models.CheckConstraint(condition=Q(quantity__gte=0, posted_nano__gte=0), name="volume_rebate_positive"),
        ]
