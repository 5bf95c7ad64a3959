"""Models of the pushes of finished models to customers' repositories on a hub."""

from django.db import models
from django.db.models import Q

from apps.adapters.models import AdapterVersion
from apps.core.database.tenancy import OrganizationModel
from apps.core.database.transitions import choices_of, status_trigger
from apps.core.ids import IdField
from apps.finetuning.lifecycle import CONVERSION_OPEN, CONVERSION_TRANSITIONS, ConversionStatus


class HubPush(OrganizationModel):
    """One push of a version's files."""

    id = IdField(prefix="push")
    version = models.ForeignKey(AdapterVersion, on_delete=models.PROTECT, related_name="+")
    export = models.CharField(max_length=16, blank=True, help_text="Blank: the adapter's own files.")
    repository = models.CharField(max_length=200, help_text="owner/name")
    status = models.CharField(
        max_length=10, choices=choices_of(CONVERSION_TRANSITIONS), default=ConversionStatus.WAITING
    )
    created_by = models.CharField(max_length=64)
    created_at = models.DateTimeField()
    attempts = models.PositiveSmallIntegerField(default=0)
    ended_at = models.DateTimeField(null=True)
    commit = models.CharField(max_length=64, blank=True)
    problem = models.CharField(max_length=300, blank=True, help_text="Why the last attempt failed.")

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["version", "export", "repository"], condition=Q(status__in=CONVERSION_OPEN), name="push_once"
            )
        ]
        indexes = [models.Index(fields=["created_at"], condition=Q(ended_at=None), name="push_open")]
        triggers = [status_trigger("push_status", CONVERSION_TRANSITIONS)]


class HubPushToken(models.Model):
    """The customer's token of the hub for one push, erased when it has ended. Only the process that sends reads it."""

    push = models.OneToOneField(HubPush, on_delete=models.CASCADE, primary_key=True, related_name="+")
    token_sealed = models.BinaryField()

    tenancy_reason = "read by the system alone, for all tenants; the app role may only add"
    app_access = "add"
