"""The keys of an organization's programs."""

import datetime
from typing import Any, ClassVar

import pgtrigger
from django.contrib.postgres.fields import ArrayField
from django.db import models
from django.db.models.functions import Now

from apps.accounts.models.people import User
from apps.core.database.tenancy import OrganizationModel, OrganizationQuerySet
from apps.core.ids import IdField
from apps.core.messages.key_invalidation import key_news


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
    project = models.ForeignKey(
        "accounts.Project", on_delete=models.PROTECT, related_name="+", help_text="Of all that is created with it."
    )
    kind = models.CharField(max_length=8, choices=KeyKind, default=KeyKind.SECRET)
    name = models.CharField(max_length=80)
    prefix = models.CharField(max_length=20, help_text="First characters, to recognise the key by.")
    hmac = models.CharField(max_length=64, unique=True)
    scopes = ArrayField(models.CharField(max_length=32))
    created_by = models.ForeignKey(User, on_delete=models.PROTECT, related_name="+")
    issued_by = models.ForeignKey(
        User,
        on_delete=models.PROTECT,
        null=True,
        related_name="+",
        help_text="Of a service account's key: who created it, and so knows it.",
    )
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
    spend_limit_nano = models.BigIntegerField(null=True, help_text="Of its whole life; null: no limit of its own.")
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
