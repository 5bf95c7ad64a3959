"""Notifications: what happened in an organization, for each member whom it concerns, with an unread mark."""

import datetime
from collections.abc import Callable, Collection

from django.conf import settings
from django.db.models import F, Window
from django.db.models.functions import RowNumber
from django.utils.translation import override

from apps.accounts.models import Membership, Notification, NotificationKind, Organization, User, key_of
from apps.accounts.roles import ROLES, Permission, has_permission
from apps.core.audit import require_transaction
from apps.core.database.tenancy import OrganizationQuerySet
from apps.core.errors import InvalidValue

KEPT = datetime.timedelta(days=90)
MAX_KEPT = 5_000  # of one organization, the newest
MANAGERS = tuple(role for role in ROLES if has_permission(role, Permission.MEMBER_MANAGE))
PAYERS = tuple(role for role in ROLES if has_permission(role, Permission.ORGANIZATION_MANAGE))
_PRUNED_AT_ONCE = 10_000


def notify(
    *,
    organization: Organization | str,
    kind: NotificationKind,
    title: Callable[[], str],
    path: str,
    key: str,
    roles: Collection[str] = (),
    users: Collection[str] = (),
) -> None:
    """Notify the members with one of these roles, or those of these people who are members.

    Run it in the transaction of the event. A repeated `key` is the same event. `title` is asked
    in English: not every process that notifies may read the languages of people. `path` is the page about it.
    """
    require_transaction()
    organization_id = key_of(organization)
    members = Membership.objects.filter(organization_id=organization_id)
    members = members.filter(user_id__in=users) if users else members.filter(role__in=roles)
    fields = {"organization_id": organization_id, "kind": kind, "path": path, "key": key}
    with override(settings.LANGUAGE_CODE):
        text = title()[: Notification._meta.get_field("title").max_length]
    rows = [
        Notification(user_id=user_id, title=text, **fields) for user_id in members.values_list("user_id", flat=True)
    ]
    Notification.objects.bulk_create(rows, ignore_conflicts=True)


def list_notifications(*, organization: Organization, user: User) -> OrganizationQuerySet:
    """Return a member's notifications in the organization, newest first."""
    return Notification.objects.for_organization(organization).filter(user=user).order_by("-id")


def mark_read(*, organization: Organization, user: User, now: datetime.datetime, notification_id: str = "") -> int:
    """Mark one notification of a member as read, or all; return how many were unread. Raises InvalidValue."""
    rows = list_notifications(organization=organization, user=user)
    if notification_id:
        rows = rows.filter(pk=notification_id)
        if not rows.exists():
            raise InvalidValue("You have no such notification. Use the id of one that is listed.", param="notification")
    return rows.filter(read_at=None).update(read_at=now)


def prune_notifications(*, now: datetime.datetime) -> int:
    """Delete notifications older than KEPT, and those beyond MAX_KEPT of an organization; return how many."""
    place = Window(RowNumber(), partition_by=F("organization"), order_by=F("id").desc())
    too_old = Notification.objects.filter(created_at__lt=now - KEPT)
    too_many = Notification.objects.annotate(place=place).filter(place__gt=MAX_KEPT)
    found = {pk for rows in (too_old, too_many) for pk in rows.values_list("pk", flat=True)[:_PRUNED_AT_ONCE]}
    return Notification.objects.filter(pk__in=found).delete()[0]
