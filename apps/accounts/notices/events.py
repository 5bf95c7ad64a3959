"""Events of an organization, written in the transaction of their change. All channels are served from here.

An event makes a notification for each member that it concerns, perhaps a mail, and a delivery to each webhook endpoint
that wants its type.
"""

from collections.abc import Callable, Collection, Mapping

from django.conf import settings
from django.utils.translation import override

from apps.accounts.models import Membership, Notification, NotificationKind, Organization, OrganizationEvent, key_of
from apps.core.audit import require_transaction
from apps.core.messages import outbox

_JOB, _CREDIT = NotificationKind.JOB, NotificationKind.CREDIT

# Each type of event, with the kind of its notifications. The first part follows OpenAI's names.
EVENT_TYPES: dict[str, NotificationKind] = {
    "fine_tuning.job.succeeded": _JOB,
    "fine_tuning.job.failed": _JOB,
    "fine_tuning.job.cancelled": _JOB,
    "fine_tuning.job.paused": _JOB,
    "batch.completed": _JOB,
    "batch.failed": _JOB,
    "batch.expired": _JOB,
    "batch.cancelled": _JOB,
    "eval.run.succeeded": _JOB,
    "eval.run.failed": _JOB,
    "eval.run.canceled": _JOB,
    "adapter.certified": _JOB,
    "adapter.uncertified": _JOB,
    "adapter.refused": _JOB,
    "adapter.converted": _JOB,
    "adapter.not_converted": _JOB,
    "adapter.deployed": _JOB,
    "adapter.undeployed": _JOB,
    "retraining.promoted": _JOB,
    "retraining.kept": _JOB,
    "retraining.refused": _JOB,
    "retraining.failed": _JOB,
    "budget.reached": NotificationKind.BUDGET,
    "balance.low": NotificationKind.BALANCE,
    "credit.granted": _CREDIT,
    "credit.declined": _CREDIT,
    "invoice.issued": NotificationKind.INVOICE,
    "member.joined": NotificationKind.MEMBER,
    "service_account.created": NotificationKind.MEMBER,
    "webhook.disabled": NotificationKind.WEBHOOK,
}


def announce(
    *,
    organization: Organization | str,
    type: str,
    subject: str,
    title: Callable[[], str],
    path: str,
    key: str,
    roles: Collection[str] = (),
    users: Collection[str] = (),
    mail: tuple[str, Mapping[str, object]] | None = None,
    data: Mapping[str, object] | None = None,
) -> None:
    """Record an event. Notify the members with one of these roles, or those of these people who are members.

    Run it in the transaction of the change. A repeated `key` is the same event. `subject` is the id of what changed,
    `path` the page about it. `mail` is the topic and payload of the mail about it. `title` is in English, because not
    every process that announces may read people's languages.
    """
    require_transaction()
    organization_id, kind = key_of(organization), EVENT_TYPES[type]
    with override(settings.LANGUAGE_CODE):
        text = title()[: OrganizationEvent._meta.get_field("title").max_length]
    event = OrganizationEvent(
        organization_id=organization_id, type=type, subject=subject, data=dict(data or {}), title=text, path=path,
        key=key,
    )  # fmt: skip
    OrganizationEvent.objects.bulk_create([event], ignore_conflicts=True)
    outbox.publish(topic="event.created", key=event.pk, payload={"event_id": event.pk}, organization=organization_id)
    if mail is not None:
        outbox.publish(topic=mail[0], key=key, payload=mail[1], organization=organization_id)
    if roles or users:
        members = Membership.objects.filter(organization_id=organization_id)
        members = members.filter(user_id__in=users) if users else members.filter(role__in=roles)
        fields = {"organization_id": organization_id, "kind": kind, "path": path, "key": key, "title": text}
        rows = [Notification(user_id=user_id, **fields) for user_id in members.values_list("user_id", flat=True)]
        Notification.objects.bulk_create(rows, ignore_conflicts=True)


def announce_batch(*, organization: Organization | str, batch_id: str, status: str, path: str) -> None:
    """Record that a batch became `completed`, `failed`, `expired` or `cancelled`. Run it in that transaction."""
    announce(
        organization=organization,
        type=f"batch.{status}",
        subject=batch_id,
        title=lambda: f"Batch {batch_id}: {status}",
        path=path,
        key=f"batch:{batch_id}:{status}",
    )
