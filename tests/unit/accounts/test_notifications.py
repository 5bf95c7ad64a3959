"""Notifications reach the members whom an event concerns, once, and are kept for a while."""

import datetime

import pytest
from django.db import connection, transaction

from apps.accounts.members.invitations import accept_invitation, invitation_token, invite_member
from apps.accounts.models import Notification, Organization
from apps.accounts.notices.events import announce
from apps.accounts.notices.notifications import KEPT, MANAGERS, list_notifications, mark_read, prune
from apps.core.database.clock import db_now
from tests.factories.accounts import make_user


def tell(organization: Organization, key: str = "k", **readers: list[str] | tuple[str, ...]) -> None:
    announce(
        organization=organization,
        type="budget.reached",
        subject="bud_1",
        title=lambda: "x" * 300,
        path="/budgets",
        key=key,
        **readers,
    )


def readers_of(organization: Organization) -> set[str]:
    return set(Notification.objects.for_organization(organization).values_list("user__email", flat=True))


def test_an_event_is_noted_once_for_each_member_with_the_role(organization, alice, ann, bob, charlie, rival):
    tell(organization, roles=MANAGERS)
    tell(organization, roles=MANAGERS)

    assert readers_of(organization) == {alice.email, ann.email}
    assert Notification.objects.count() == 2


def test_only_members_are_notified(organization, bob, charlie, rival):
    tell(organization, users=[bob.pk, charlie.pk, "user_unknown"])

    assert readers_of(organization) == {bob.email}


@pytest.mark.parametrize("role", ["anneal_internal", "anneal_gateway", "anneal_sys"])
def test_each_process_in_which_events_happen_may_notify(organization, alice, role):
    """Runs end in the worker API, and budgets are reached in the gateway."""
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("SELECT set_config('role', %s, true)", [role])
        tell(organization, users=[alice.pk])
        cursor.execute("SELECT set_config('role', 'anneal_owner', true)")

    assert readers_of(organization) == {alice.email}


def test_owners_and_admins_learn_who_joined(organization, alice, ann, bob):
    invitation = invite_member(
        organization=organization, email="new@example.com", role="viewer", by=alice, now=db_now()
    )
    accept_invitation(token=invitation_token(invitation.pk), user=make_user("newcomer"), now=db_now())

    assert readers_of(organization) == {alice.email, ann.email}
    note = Notification.objects.filter(user=alice).get()
    assert note.title == "Newcomer joined as viewer"


def test_one_or_all_of_ones_own_are_marked_as_read(organization, alice, ann):
    for key in "abc":
        tell(organization, key, roles=MANAGERS)
    newest = list_notifications(organization=organization, user=alice)[0]

    mine = {"organization": organization, "user": alice, "now": db_now()}
    assert mark_read(**mine, notification_id=newest.pk) == 1
    assert mark_read(**mine) == 2
    assert Notification.objects.filter(user=ann, read_at=None).count() == 3


@pytest.mark.parametrize("reason", ["age", "number"])
def test_old_and_excess_ones_are_deleted(organization, rival, alice, charlie, monkeypatch, reason):
    for key in "abc":
        tell(organization, key, users=[alice.pk])
    tell(rival, users=[charlie.pk])
    newest = list_notifications(organization=organization, user=alice)[0]
    if reason == "age":
        Notification.objects.exclude(pk=newest.pk).filter(user=alice).update(created_at=db_now() - KEPT)
        assert prune(now=db_now() + datetime.timedelta(seconds=1)) == 2
    else:
        monkeypatch.setattr("apps.accounts.notices.notifications.MAX_KEPT", 1)
        assert prune(now=db_now()) == 4  # with their events

    assert list(list_notifications(organization=organization, user=alice)) == [newest]
    assert readers_of(rival) == {charlie.email}
