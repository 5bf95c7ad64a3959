"""Requests by the hour: how many, how they ended, and how long they took."""

from django.contrib.postgres.fields import ArrayField
from django.contrib.postgres.indexes import BrinIndex
from django.db import models

from apps.core.database.tenancy import OrganizationModel


class TrafficHour(OrganizationModel):
    """The requests of one hour with one key for one model. Refused requests may name no model.

    A count of the two histograms belongs to the bucket of apps/billing/usage/traffic.py with the same place.
    """

    organization = models.ForeignKey(
        "accounts.Organization", on_delete=models.PROTECT, related_name="+", db_index=False
    )
    model_name = models.CharField(max_length=200, blank=True)
    adapter_version_id = models.CharField(max_length=40, blank=True)
    key_id = models.CharField(max_length=40, blank=True)
    hour_at = models.DateTimeField()
    requests = models.BigIntegerField(help_text="All of them, however they ended.")
    aborted = models.BigIntegerField(help_text="The client left before the end of its answer.")
    rate_limited = models.BigIntegerField()
    over_quota = models.BigIntegerField(help_text="No credit, or a budget is reached.")
    not_found = models.BigIntegerField()
    invalid = models.BigIntegerField(help_text="Refused for another reason with a 4xx status.")
    failed = models.BigIntegerField(help_text="The platform's fault: 5xx, or the gateway died meanwhile.")
    input_tokens = models.BigIntegerField()
    cached_input_tokens = models.BigIntegerField()
    output_tokens = models.BigIntegerField()
    cost_nano = models.BigIntegerField(help_text="To a nano for each batch; the ledger has what was charged.")
    first_token_counts = ArrayField(models.IntegerField())
    latency_counts = ArrayField(models.IntegerField(), help_text="Of whole answers.")

    app_access = "read"

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["organization", "model_name", "adapter_version_id", "hour_at", "key_id"],
                name="traffic_hour_once",
            )
        ]
        indexes = [
            models.Index(fields=["organization", "hour_at"], name="traffic_hour_newest"),
            BrinIndex(fields=["hour_at"], name="traffic_by_time"),
        ]
