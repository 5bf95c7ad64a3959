"""Tables that every feature writes to: the audit log, the outbox and answers to repeat."""

import pgtrigger
from django.db import models
from django.db.models.functions import Coalesce, Now

from apps.core.database.policies import OWN_ORGANIZATION
from apps.core.database.tenancy import OrganizationModel


class AuditEntry(models.Model):
    """One action in the audit log. Append-only. `organization` is null for operator actions on the platform itself."""

    id = models.BigAutoField(primary_key=True)
    organization = models.ForeignKey("accounts.Organization", on_delete=models.PROTECT, null=True, related_name="+")
    actor = models.CharField(max_length=64)
    action = models.CharField(max_length=64)
    target = models.CharField(max_length=128)
    details = models.JSONField(default=dict)
    ip = models.GenericIPAddressField(null=True, help_text="Where the request came from; null outside of a request.")
    user_agent = models.CharField(max_length=200, blank=True, db_default="")
    created_at = models.DateTimeField(db_default=Now())

    is_append_only = True
    tenant_condition = OWN_ORGANIZATION

    class Meta:
        indexes = [
            models.Index(fields=["organization", "-id"], name="audit_by_organization"),
            models.Index(fields=["organization", "actor", "-id"], name="audit_by_actor"),
            models.Index(fields=["organization", "target", "-id"], name="audit_by_target"),
        ]
        triggers = [pgtrigger.Protect(name="append_only", operation=pgtrigger.Update | pgtrigger.Delete)]


def _acting_organization() -> Coalesce:
    """Return the SQL for the organization that a transaction acts for; "" if there is none."""
    setting = models.Func(models.Value("anneal.organization"), models.Value(True), function="current_setting")
    return Coalesce(setting, models.Value(""), output_field=models.CharField())


class OutboxMessage(models.Model):
    """One effect to carry out after commit."""

    id = models.BigAutoField(primary_key=True)
    topic = models.CharField(max_length=64)
    key = models.CharField(max_length=200, unique=True)
    payload = models.JSONField(default=dict)
    lane = models.CharField(max_length=16, default="control", help_text="Whose worker carries it out.")
    is_urgent = models.BooleanField(default=False, help_text="Goes before the others of its lane.")
    share = models.CharField(
        max_length=64,
        db_default=_acting_organization(),
        help_text="The organization whose turn it waits for, if any.",
    )
    attempts = models.PositiveSmallIntegerField(default=0)
    next_attempt_at = models.DateTimeField(db_default=Now())
    taken_at = models.DateTimeField(null=True, help_text="When it was last tried.")
    sent_at = models.DateTimeField(null=True)
    last_error = models.CharField(max_length=500, blank=True)
    traceparent = models.CharField(max_length=55, blank=True, db_default="", help_text="The trace that it continues.")
    created_at = models.DateTimeField(db_default=Now())

    tenancy_reason = "delivered by the system for all tenants; the app role may only add"
    app_access = "add"

    class Meta:
        indexes = [
            models.Index(fields=["lane", "next_attempt_at"], name="outbox_due", condition=models.Q(sent_at=None)),
            models.Index(fields=["lane", "share", "-taken_at"], name="outbox_served"),
        ]


class IdempotentAnswer(OrganizationModel):
    """The answer to the first request with an `Idempotency-Key`."""

    id = models.CharField(primary_key=True, max_length=64, help_text="SHA-256 of organization, API key and header.")
    request_sha256 = models.CharField(max_length=64, help_text="Of method, address and body.")
    answer_sealed = models.BinaryField(help_text="The JSON; it may hold a secret that is shown once.")
    created_at = models.DateTimeField(db_default=Now())

    app_access = "extend"

    class Meta:
        indexes = [models.Index(fields=["created_at"], name="idempotent_answer_age")]
