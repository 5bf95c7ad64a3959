"""Notifications: events of an organization for each member that they concern, with an unread mark."""

import datetime
from typing import Any

from django.db.models import Exists, F, OuterRef, QuerySet, Window
from django.db.models.functions import RowNumber
from django.utils.translation import gettext

from apps.accounts.models import DeliveryStatus, Notification, Organization, OrganizationEvent, User, WebhookDelivery
from apps.accounts.roles import ROLES, Permission, has_permission
from apps.core.database.tenancy import OrganizationQuerySet
from apps.core.errors import InvalidValue

KEPT = datetime.timedelta(days=90)
MAX_KEPT = 5_000  # of one organization, the newest
LOG_KEPT = datetime.timedelta(days=30)
MAX_LOGGED = 1_000  # deliveries of one webhook, the newest
MANAGERS = tuple(role for role in ROLES if has_permission(role, Permission.MEMBER_MANAGE))
PAYERS = tuple(role for role in ROLES if has_permission(role, Permission.ORGANIZATION_MANAGE))
_PRUNED_AT_ONCE = 10_000


def list_notifications(*, organization: Organization, user: User) -> OrganizationQuerySet:
    """Return a member's notifications in the organization, newest first."""
    return Notification.objects.for_organization(organization).filter(user=user).order_by("-id")


def mark_read(*, organization: Organization, user: User, now: datetime.datetime, notification_id: str = "") -> int:
    """Mark one notification of a member as read, or all; return how many were unread. Raises InvalidValue."""
    rows = list_notifications(organization=organization, user=user)
    if notification_id:
        rows = rows.filter(pk=notification_id)
        if not rows.exists():
            raise InvalidValue(
                gettext("You have no such notification. Use the id of one that is listed."), param="notification"
            )
    return rows.filter(read_at=None).update(read_at=now)


def prune(*, now: datetime.datetime) -> int:
    """Delete events, notifications and deliveries that are too old or too many; return how many.

    Pending deliveries stay, with their events.
    """
    pending = WebhookDelivery.objects.filter(status=DeliveryStatus.PENDING)
    ended = WebhookDelivery.objects.exclude(status=DeliveryStatus.PENDING)
    events = OrganizationEvent.objects.exclude(Exists(pending.filter(event=OuterRef("pk"))))
    return (
        _prune(Notification.objects.all(), now - KEPT, per="organization", most=MAX_KEPT)
        + _prune(ended, now - LOG_KEPT, per="endpoint", most=MAX_LOGGED)
        + _prune(events, now - KEPT, per="organization", most=MAX_KEPT)
    )


def _prune(rows: QuerySet[Any], since: datetime.datetime, *, per: str, most: int) -> int:
    """Delete the rows created before `since`, and those beyond the newest `most` of each `per`; return how many."""
    place = Window(RowNumber(), partition_by=F(per), order_by=F("id").desc())
    too_old = rows.filter(created_at__lt=since)
    too_many = rows.annotate(place=place).filter(place__gt=most)
    found = {pk for each in (too_old, too_many) for pk in each.values_list("pk", flat=True)[:_PRUNED_AT_ONCE]}
    return rows.filter(pk__in=found).delete()[0]
