"""Events of an organization, and the notifications, mails and webhooks that announce them."""

from enum import StrEnum

from django.contrib.postgres.fields import ArrayField
from django.db import models
from django.db.models.functions import Now
from django.utils.translation import gettext_noop

from apps.accounts.models.people import OWN_USER, User
from apps.core.database.policies import OWN_ORGANIZATION
from apps.core.database.tenancy import OrganizationModel
from apps.core.ids import IdField


class NotificationKind(models.TextChoices):
    JOB = "job", gettext_noop("Fine-tune")
    BALANCE = "balance", gettext_noop("Low balance")
    BUDGET = "budget", gettext_noop("Budget")
    INVOICE = "invoice", gettext_noop("Invoice")
    CREDIT = "credit", gettext_noop("Credit")
    MEMBER = "member", gettext_noop("Member")
    WEBHOOK = "webhook", gettext_noop("Webhook")


class Notification(OrganizationModel):
    """One event that concerns one member. It is deleted after some time, whether it was read or not."""

    id = IdField(prefix="note")
    user = models.ForeignKey(User, on_delete=models.CASCADE, related_name="+")
    kind = models.CharField(max_length=8, choices=NotificationKind)
    title = models.CharField(max_length=200)
    path = models.CharField(max_length=200, help_text="The page about it.")
    key = models.CharField(max_length=200, help_text="Of the event: an event that is repeated is one notification.")
    created_at = models.DateTimeField(db_default=Now())
    read_at = models.DateTimeField(null=True)

    tenant_condition = f"{OWN_ORGANIZATION} OR {OWN_USER}"

    class Meta:
        constraints = [models.UniqueConstraint(fields=["organization", "user", "key"], name="notification_once")]
        indexes = [
            models.Index(fields=["organization", "user", "-id"], name="notification_newest"),
            models.Index(fields=["user", "organization"], condition=models.Q(read_at=None), name="notification_unread"),
            models.Index(fields=["created_at"], name="notification_age"),
        ]


class OrganizationEvent(OrganizationModel):
    """Something that happened in an organization. Notifications, mails and webhooks are made from it."""

    id = IdField(prefix="evt")
    type = models.CharField(max_length=64, help_text="Such as fine_tuning.job.succeeded.")
    subject = models.CharField(max_length=64, help_text="The id of the object that it is about.")
    data = models.JSONField(default=dict, help_text="What programs learn beside the subject's id.")
    title = models.CharField(max_length=200)
    path = models.CharField(max_length=200, help_text="The page about it.")
    key = models.CharField(max_length=200, help_text="An event that is repeated with its key is the same event.")
    created_at = models.DateTimeField(db_default=Now())

    class Meta:
        constraints = [models.UniqueConstraint(fields=["organization", "key"], name="event_once")]
        indexes = [models.Index(fields=["created_at"], name="event_age")]


class WebhookFormat(models.TextChoices):
    STANDARD = "standard", "Standard Webhooks"
    SLACK = "slack", "Slack"


class EndpointStatus(StrEnum):
    ACTIVE = "active"
    PAUSED = "paused"
    DISABLED = "disabled"


class WebhookEndpoint(OrganizationModel):
    """An address of the customer. It receives the organization's events, each signed with the endpoint's secret."""

    id = IdField(prefix="we")
    name = models.CharField(max_length=100, blank=True, db_default="", default="")
    url = models.CharField(max_length=400)
    event_types = ArrayField(models.CharField(max_length=64))
    format = models.CharField(max_length=8, choices=WebhookFormat)
    secret_sealed = models.BinaryField()
    previous_sealed = models.BinaryField(null=True, help_text="Signs as well until previous_until.")
    previous_until = models.DateTimeField(null=True)
    created_by = models.CharField(max_length=64)
    created_at = models.DateTimeField(db_default=Now())
    updated_at = models.DateTimeField(db_default=Now(), help_text="When its settings or its secret changed last.")
    paused_at = models.DateTimeField(null=True)
    disabled_because = models.CharField(max_length=200, blank=True, db_default="")
    failing_since = models.DateTimeField(null=True)

    @property
    def status(self) -> EndpointStatus:
        """Return the state; `disabled` if failures ended it."""
        if self.disabled_because:
            return EndpointStatus.DISABLED
        return EndpointStatus.PAUSED if self.paused_at else EndpointStatus.ACTIVE


class DeliveryStatus(models.TextChoices):
    PENDING = "pending", gettext_noop("Pending")
    DELIVERED = "delivered", gettext_noop("Delivered")
    FAILED = "failed", gettext_noop("Failed")


class WebhookDelivery(OrganizationModel):
    """One event for one endpoint: its attempts, and the answer to the last one."""

    id = IdField(prefix="whd")
    endpoint = models.ForeignKey(WebhookEndpoint, on_delete=models.CASCADE, related_name="deliveries")
    event = models.ForeignKey(OrganizationEvent, on_delete=models.CASCADE, related_name="+")
    status = models.CharField(max_length=10, choices=DeliveryStatus, default=DeliveryStatus.PENDING)
    attempts = models.PositiveSmallIntegerField(default=0)
    attempts_left = models.PositiveSmallIntegerField()
    response_code = models.PositiveSmallIntegerField(null=True)
    response_text = models.CharField(max_length=500, blank=True)
    error = models.CharField(max_length=200, blank=True)
    duration_ms = models.PositiveIntegerField(null=True)
    attempted_at = models.DateTimeField(null=True)
    created_at = models.DateTimeField(db_default=Now())

    class Meta:
        constraints = [models.UniqueConstraint(fields=["endpoint", "event"], name="webhook_delivery_once")]
        indexes = [
            models.Index(fields=["endpoint", "-id"], name="webhook_delivery_newest"),
            models.Index(fields=["created_at"], name="webhook_delivery_age"),
            models.Index(
                fields=["endpoint"], name="webhook_delivery_pending", condition=models.Q(status=DeliveryStatus.PENDING)
            ),
        ]
