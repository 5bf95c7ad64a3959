"""People, the organizations they belong to, and the keys their programs use."""

import datetime
from enum import StrEnum
from typing import Any, ClassVar, overload

import pgtrigger
from django.contrib.auth.base_user import AbstractBaseUser, BaseUserManager
from django.contrib.postgres.fields import ArrayField
from django.db import models
from django.db.models.functions import Coalesce, Lower, Now
from django.utils.translation import gettext_noop

from apps.accounts.roles import ROLE_CHOICES
from apps.core.database.policies import OWN_ORGANIZATION
from apps.core.database.tenancy import OrganizationModel, OrganizationQuerySet
from apps.core.ids import IdField
from apps.core.messages.key_invalidation import key_news

_OWN_USER = "user_id = nullif(current_setting('anneal.user', true), '')"


class UserManager(BaseUserManager["User"]):
    def create_user(self, email: str, password: str | None = None, **fields: object) -> "User":
        """Create a person. The e-mail address is the login and is kept in lower case."""
        user = self.model(email=email.strip().lower(), **fields)
        user.set_password(password)
        user.save(using=self._db)
        return user


class User(AbstractBaseUser):
    """A person. Their permissions depend on their membership in each organization."""

    id = IdField(prefix="user")
    email = models.EmailField(unique=True)
    name = models.CharField(max_length=120, blank=True)
    is_active = models.BooleanField(default=True)
    is_operator = models.BooleanField(default=False, help_text="May open the operator console of this installation.")
    wants_job_mail = models.BooleanField(default=True, db_default=True, help_text="Mail when a job of theirs ends.")
    wants_balance_mail = models.BooleanField(default=True, db_default=True, help_text="Mail when a balance is low.")
    wants_budget_mail = models.BooleanField(default=True, db_default=True, help_text="Mail when a budget is reached.")
    wants_invoice_mail = models.BooleanField(default=True, db_default=True, help_text="Mail when an invoice is issued.")
    time_zone = models.CharField(
        max_length=64, blank=True, db_default="", help_text="IANA name; empty: the zone of the person's browser."
    )
    language = models.CharField(
        max_length=8,
        blank=True,
        db_default="",
        help_text="Of pages and mails; empty: of the browser, and English mails.",
    )
    created_at = models.DateTimeField(db_default=Now())

    objects: ClassVar[UserManager] = UserManager()

    USERNAME_FIELD = "email"
    EMAIL_FIELD = "email"
    REQUIRED_FIELDS: ClassVar[list[str]] = []

    tenancy_reason = "a person may belong to several organizations; memberships say which"
    app_access = "write"
    app_kept_columns = ("is_operator",)

    class Meta:
        constraints = [models.UniqueConstraint(Lower("email"), name="user_email_case_insensitive")]
        triggers = [key_news("user_key_news", pgtrigger.UpdateOf("is_active"), organization="''")]

    def __str__(self) -> str:
        return self.name or self.email


class Organization(models.Model):
    """The tenant: owns every dataset, job, adapter, key and cent."""

    id = IdField(prefix="org")
    name = models.CharField(max_length=80)
    slug = models.SlugField(max_length=40, unique=True, help_text="Part of the names of its fine-tuned models.")
    created_at = models.DateTimeField(db_default=Now())
    suspended_at = models.DateTimeField(null=True)
    founded_by = models.ForeignKey(User, on_delete=models.PROTECT, null=True, related_name="+")
    has_own_share = models.BooleanField(
        db_default=False,
        help_text="It has paid, or an operator has set its limits. Until then it has one share of queues and limits "
        "together with the others its founder made.",
    )
    requires_second_factor = models.BooleanField(
        default=False, help_text="Its pages open only for members who have shown a second factor."
    )

    tenancy_reason = "the tenant itself"
    tenant_condition = (
        "id = nullif(current_setting('anneal.organization', true), '') OR id IN (SELECT organization_id FROM "  # noqa: S608 - constants
        f"accounts_membership WHERE {_OWN_USER})"
    )
    app_kept_columns = ("has_own_share",)

    class Meta:
        triggers = [key_news("organization_key_news", pgtrigger.UpdateOf("suspended_at"), organization="NEW.id")]

    def __str__(self) -> str:
        return self.name

    @property
    def share_holder(self) -> str:
        """The id that fair shares and limits count by: the organization's, or its founder's while it shares."""
        return self.pk if self.has_own_share else self.founded_by_id or self.pk

    # The same in SQL, for a table that is called `organization` in the statement.
    SHARE_HOLDER_SQL = (
        "CASE WHEN organization.has_own_share THEN organization.id"
        " ELSE coalesce(organization.founded_by_id, organization.id) END"
    )

    @classmethod
    def share_holder_by(cls, path: str = "") -> models.Case:
        """Return the SQL of `share_holder`. `path` leads to the organization, as in "organization__"."""
        own = models.F(f"{path}id")
        return models.Case(
            models.When(**{f"{path}has_own_share": True}, then=own),
            default=Coalesce(models.F(f"{path}founded_by_id"), own),
            output_field=models.CharField(),
        )


@overload
def key_of(organization: Organization | str) -> str: ...
@overload
def key_of(organization: None) -> None: ...
def key_of(organization: Organization | str | None) -> str | None:
    """Return the id of an organization that is given as a row or as its id; None stays None."""
    return organization if organization is None or isinstance(organization, str) else organization.pk


class Membership(OrganizationModel):
    id = IdField(prefix="mem")
    user = models.ForeignKey(User, on_delete=models.CASCADE, related_name="memberships")
    role = models.CharField(max_length=16, choices=ROLE_CHOICES)
    created_at = models.DateTimeField(db_default=Now())

    tenant_condition = f"{OWN_ORGANIZATION} OR {_OWN_USER}"

    class Meta:
        constraints = [models.UniqueConstraint(fields=["organization", "user"], name="membership_once")]
        triggers = [
            key_news("membership_key_news", pgtrigger.Update | pgtrigger.Delete, organization="OLD.organization_id")
        ]


class SavedView(OrganizationModel):
    """The filters and the order of a list that a member saved under a name. No other member sees it."""

    id = IdField(prefix="view")
    membership = models.ForeignKey(Membership, on_delete=models.CASCADE, related_name="saved_views")
    listing = models.CharField(max_length=40, help_text="The name of the list's address, such as web:job_list.")
    name = models.CharField(max_length=60)
    query = models.CharField(max_length=500, help_text="What follows the question mark in the list's address.")
    created_at = models.DateTimeField(db_default=Now())

    class Meta:
        constraints = [models.UniqueConstraint(fields=["membership", "listing", "name"], name="saved_view_name_once")]


class NotificationKind(models.TextChoices):
    JOB = "job", gettext_noop("Fine-tune")
    BALANCE = "balance", gettext_noop("Low balance")
    BUDGET = "budget", gettext_noop("Budget")
    INVOICE = "invoice", gettext_noop("Invoice")
    CREDIT = "credit", gettext_noop("Credit")
    MEMBER = "member", gettext_noop("Member")
    WEBHOOK = "webhook", gettext_noop("Webhook")


class Notification(OrganizationModel):
    """One event that one member should know of. It is deleted after a time, read or not."""

    id = IdField(prefix="note")
    user = models.ForeignKey(User, on_delete=models.CASCADE, related_name="+")
    kind = models.CharField(max_length=8, choices=NotificationKind)
    title = models.CharField(max_length=200)
    path = models.CharField(max_length=200, help_text="The page about it.")
    key = models.CharField(max_length=200, help_text="Of the event: an event that is repeated is one notification.")
    created_at = models.DateTimeField(db_default=Now())
    read_at = models.DateTimeField(null=True)

    tenant_condition = f"{OWN_ORGANIZATION} OR {_OWN_USER}"

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
    """An address of the customer that is sent the organization's events, each signed with the endpoint's secret."""

    id = IdField(prefix="we")
    url = models.CharField(max_length=400)
    event_types = ArrayField(models.CharField(max_length=64))
    format = models.CharField(max_length=8, choices=WebhookFormat)
    secret_sealed = models.BinaryField()
    previous_sealed = models.BinaryField(null=True, help_text="Signs as well until previous_until.")
    previous_until = models.DateTimeField(null=True)
    created_by = models.CharField(max_length=64)
    created_at = models.DateTimeField(db_default=Now())
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


class InvitationQuerySet(OrganizationQuerySet):
    def still_open(self) -> "InvitationQuerySet":
        """Return the invitations neither accepted nor revoked. Some of them may have expired."""
        return self.filter(accepted_at=None, revoked_at=None)


class Invitation(OrganizationModel):
    """A mailed link that makes its reader a member. Only the hash of its token is stored."""

    id = IdField(prefix="inv")
    email = models.EmailField()
    role = models.CharField(max_length=16, choices=ROLE_CHOICES)
    token_sha256 = models.CharField(max_length=64, unique=True)
    invited_by = models.ForeignKey(User, on_delete=models.PROTECT, related_name="+")
    created_at = models.DateTimeField(db_default=Now())
    expires_at = models.DateTimeField()
    accepted_at = models.DateTimeField(null=True)
    accepted_by = models.ForeignKey(User, on_delete=models.PROTECT, null=True, related_name="+")
    revoked_at = models.DateTimeField(null=True)
    only_for_address = models.BooleanField(
        default=False, help_text="Only an account that has verified this address may accept it."
    )

    objects: ClassVar[Any] = InvitationQuerySet.as_manager()

    def is_open(self, *, now: datetime.datetime) -> bool:
        return self.accepted_at is None and self.revoked_at is None and self.expires_at > now

    class Meta:
        constraints = [
            models.UniqueConstraint(
                "organization",
                Lower("email"),
                name="invitation_open_once",
                condition=models.Q(accepted_at=None, revoked_at=None),
            ),
            models.CheckConstraint(
                name="invitation_accepted_pair",
                condition=models.Q(accepted_at=None, accepted_by=None)
                | models.Q(accepted_at__isnull=False, accepted_by__isnull=False),
            ),
        ]


class KeyKind(models.TextChoices):
    SECRET = "secret", "API key"
    MEMBER = "member", "short-lived token of a member's browser"


class ApiKeyQuerySet(OrganizationQuerySet):
    def usable(self, *, now: datetime.datetime) -> "ApiKeyQuerySet":
        alive = models.Q(expires_at=None) | models.Q(expires_at__gt=now)
        return self.filter(alive, revoked_at=None, organization__suspended_at=None)


class ApiKey(OrganizationModel):
    """A bearer key for programs. The key is shown once; only its HMAC is stored."""

    id = IdField(prefix="key")
    kind = models.CharField(max_length=8, choices=KeyKind, default=KeyKind.SECRET)
    name = models.CharField(max_length=80)
    prefix = models.CharField(max_length=20, help_text="First characters, to recognise the key by.")
    hmac = models.CharField(max_length=64, unique=True)
    scopes = ArrayField(models.CharField(max_length=32))
    created_by = models.ForeignKey(User, on_delete=models.PROTECT, related_name="+")
    created_at = models.DateTimeField(db_default=Now())
    expires_at = models.DateTimeField(null=True)
    last_used_at = models.DateTimeField(null=True)
    revoked_at = models.DateTimeField(null=True)
    revoked_by = models.ForeignKey(User, on_delete=models.PROTECT, null=True, related_name="+")
    requests_per_minute = models.PositiveIntegerField(
        null=True, help_text="Of this key alone; null: no limit of its own."
    )
    tokens_per_minute = models.PositiveIntegerField(null=True)
    concurrent_requests = models.PositiveIntegerField(null=True)
    made_with = models.CharField(
        max_length=64, blank=True, db_default="", help_text="The key that made this one, and is revoked with it."
    )
    first_key = models.CharField(
        max_length=64, blank=True, db_default="", help_text="Of a rotated key: the first, whose budget it shares."
    )

    objects: ClassVar[Any] = ApiKeyQuerySet.as_manager()

    class Meta:
        indexes = [models.Index(fields=["made_with"]), models.Index(fields=["first_key"])]
        constraints = [
            models.CheckConstraint(
                name="api_key_revoked_pair",
                condition=models.Q(revoked_at=None, revoked_by=None)
                | models.Q(revoked_at__isnull=False, revoked_by__isnull=False),
            )
        ]
        triggers = [
            key_news(
                "api_key_news",
                pgtrigger.UpdateOf(
                    "revoked_at",
                    "expires_at",
                    "scopes",
                    "requests_per_minute",
                    "tokens_per_minute",
                    "concurrent_requests",
                ),
                organization="NEW.organization_id",
            )
        ]

    def status(self, *, now: datetime.datetime) -> str:
        """Return `active`, `revoked` or `expired`."""
        if self.revoked_at is not None:
            return "revoked"
        return "expired" if self.expires_at is not None and self.expires_at <= now else "active"
