"""Who an invitation lets in, and what closes it."""

import datetime
from collections.abc import Callable
from typing import Any

import pytest
from django.core import mail
from django.db import connection, transaction
from django.db.models import F

from apps.accounts.login.addresses import mark_verified
from apps.accounts.members.invitations import (
    MAX_A_DAY,
    MAX_OPEN,
    MAX_TO_ADDRESS,
    InvitationClosed,
    TooManyInvitations,
    accept_invitation,
    invitation_token,
    invite_member,
    revoke_invitation,
)
from apps.accounts.members.memberships import change_role, remove_member
from apps.accounts.models import Invitation, Membership, Organization, User
from apps.accounts.notices.mail import plain_name, send
from apps.core.database.clock import db_now
from apps.core.database.tenancy import tenant
from apps.core.errors import InvalidState, InvalidValue, PermissionDenied
from apps.core.models import AuditEntry, OutboxMessage
from tests.factories.accounts import make_member, make_organization, make_user


def invite(organization: Organization, by: User, email: str = "new@example.com", role: str = "viewer") -> Invitation:
    return invite_member(organization=organization, email=email, role=role, by=by, now=db_now(), only_for_address=False)


def accept(invitation: Invitation, user: User) -> Membership:
    return accept_invitation(token=invitation_token(invitation.pk), user=user, now=db_now())


def give(organization: Organization, user: User, role: str, by: User) -> None:
    membership = Membership.objects.get(organization=organization, user=user)
    change_role(organization=organization, membership_id=membership.pk, role=role, by=by, now=db_now())


def remove(organization: Organization, user: User, by: User) -> None:
    membership = Membership.objects.get(organization=organization, user=user)
    remove_member(organization=organization, membership_id=membership.pk, by=by, now=db_now())


def test_inviting_twice_leaves_one_open_invitation(organization: Organization, alice: User) -> None:
    for role in ("viewer", "member"):
        invite_member(organization=organization, email="New@example.com ", role=role, by=alice, now=db_now())

    assert Invitation.objects.get(revoked_at=None).role == "member"
    assert OutboxMessage.objects.filter(topic="mail").count() == 1  # an address is mailed once a day


def test_a_member_is_not_invited_again(organization: Organization, alice: User, bob: User) -> None:
    with pytest.raises(InvalidState, match="already a member"):
        invite_member(organization=organization, email=bob.email.upper(), role="viewer", by=alice, now=db_now())


def test_an_admin_neither_changes_nor_withdraws_the_invitation_of_an_owner(organization, alice, ann):
    invitation = invite(organization, alice, role="owner")

    for hours in (0, 48):
        age(hours=hours)
        with pytest.raises(PermissionDenied, match="Only an owner"):
            invite(organization, ann, role="viewer")
    with pytest.raises(PermissionDenied, match="Only an owner"):
        revoke_invitation(organization=organization, invitation_id=invitation.pk, by=ann, now=db_now())

    invitation.refresh_from_db()
    assert (invitation.role, invitation.invited_by, invitation.revoked_at) == ("owner", alice, None)


def test_a_removed_admin_does_not_come_back_by_an_invitation_of_their_own(organization, alice, ann):
    invitation = invite(organization, ann, role="admin")

    remove(organization, ann, by=alice)

    with pytest.raises(InvitationClosed):
        accept(invitation, ann)
    assert AuditEntry.objects.get(action="member.remove").details["invitations_revoked"] == 1


def test_the_invitations_of_a_member_who_leaves_are_closed(organization, alice, ann):
    invitation = invite(organization, ann)

    remove(organization, ann, by=ann)

    with pytest.raises(InvitationClosed):
        accept(invitation, make_user("friend"))


def test_a_removed_member_does_not_come_back_by_an_invitation_to_their_address(organization, alice, ann):
    member = make_user("guest")
    accepted, kept = invite(organization, alice, "other@example.com"), invite(organization, ann, member.email.upper())
    accept(accepted, member)

    remove(organization, member, by=alice)

    with pytest.raises(InvitationClosed):
        accept(kept, member)


@pytest.mark.parametrize(
    ("was", "becomes", "closed", "open_still"),
    [
        ("admin", "member", ["viewer", "admin"], []),
        ("owner", "admin", ["owner"], ["viewer", "admin"]),
        ("owner", "viewer", ["viewer", "owner"], []),
        ("admin", "owner", [], ["viewer", "admin"]),
    ],
)
def test_a_new_role_closes_the_invitations_that_it_could_not_send(
    organization, alice, was, becomes, closed, open_still
):
    sender = make_member(organization, was)
    sent = {role: invite(organization, sender, f"{role}@example.com", role) for role in {*closed, *open_still}}

    give(organization, sender, becomes, by=alice)

    for role in closed:
        with pytest.raises(InvitationClosed):
            accept(sent[role], make_user())
    for role in open_still:
        assert accept(sent[role], make_user()).role == role


def test_invitations_of_other_people_and_other_organizations_stay_open(organization, alice, ann, bob):
    second = make_organization("Second", owner=ann)
    by_alice, elsewhere = invite(organization, alice), invite(second, ann)

    remove(organization, ann, by=alice)

    assert accept(by_alice, make_user()).organization == organization
    assert accept(elsewhere, make_user()).organization == second


@pytest.mark.parametrize("loss", ["membership", "role", "account"])
def test_acceptance_asks_again_whether_the_sender_may_give_the_role(organization, alice, ann, loss):
    """However the sender lost the right, even by a change that revoked nothing."""
    invitation = invite(organization, ann, role="admin")
    match loss:
        case "membership":
            Membership.objects.filter(user=ann).delete()
        case "role":
            Membership.objects.filter(user=ann).update(role="member")
        case "account":
            User.objects.filter(pk=ann.pk).update(is_active=False)

    with pytest.raises(InvitationClosed, match="can no longer give this role"):
        accept(invitation, make_user())
    invitation.refresh_from_db()
    assert invitation.accepted_at is None


def test_a_suspended_organization_takes_nobody_in(organization, alice):
    invitation = invite(organization, alice)
    Organization.objects.filter(pk=organization.pk).update(suspended_at=db_now())

    with pytest.raises(InvitationClosed, match="suspended"):
        accept(invitation, make_user())


@pytest.mark.parametrize(("role", "is_bound"), [("viewer", False), ("member", False), ("admin", True), ("owner", True)])
def test_roles_that_manage_members_are_for_the_invited_address_by_default(organization, alice, role, is_bound):
    invitation = invite_member(organization=organization, email="new@example.com", role=role, by=alice, now=db_now())

    assert invitation.only_for_address is is_bound


def test_a_bound_invitation_is_for_the_verified_owner_of_its_address(organization, alice):
    invited, stranger = make_user("invited", is_verified=False), make_user("stranger")
    invitation = invite_member(organization=organization, email=invited.email, role="admin", by=alice, now=db_now())

    for user in (stranger, invited):
        with pytest.raises(PermissionDenied, match=invited.email):
            accept(invitation, user)
    mark_verified(user=invited)

    assert accept(invitation, invited).role == "admin"


def test_acceptance_locks_members_before_the_invitation_as_a_removal_does(organization, alice, ann):
    """The same order in both, so that neither can slip between the other's check and change, nor deadlock with it."""
    invitation, guest = invite(organization, ann), make_user()
    locks: list[str] = []

    def note(execute, sql, params, many, context):
        if "FOR UPDATE" in sql or sql.startswith("UPDATE"):
            locks.append("members" if "accounts_membership" in sql.split("WHERE")[0] else "invitation")
        return execute(sql, params, many, context)

    with connection.execute_wrapper(note), transaction.atomic():
        accept(invitation, guest)

    assert locks[:2] == ["members", "invitation"]


# --- how much mail strangers get --------------------------------------------------------------------------------------


def age(**by: int) -> None:
    """Let every invitation have been made a while ago."""
    Invitation.objects.update(created_at=F("created_at") - datetime.timedelta(**by))


def test_only_people_with_a_confirmed_address_invite(organization):
    unknown = make_user("unknown", is_verified=False)
    Membership.objects.create(organization=organization, user=unknown, role="admin")

    with pytest.raises(PermissionDenied, match="Confirm your own"):
        invite(organization, unknown)
    assert not OutboxMessage.objects.exists()


@pytest.mark.parametrize(
    "email",
    ["x<new@example.com>", '"new"@example.com', "new@example..com", "a,new@example.com", "new@" + "\xfc" * 70 + ".com"],
)
def test_another_spelling_of_a_mailbox_is_no_address(organization, alice, email):
    with pytest.raises(InvalidValue) as refused:
        invite(organization, alice, email)
    assert refused.value.param == "email" and not OutboxMessage.objects.exists()


@pytest.mark.parametrize("domain", ["\uff45xample.com", "exam\xadple.com", "EXAMPLE.com"])
def test_a_domain_in_other_letters_is_the_same_domain(organization, alice, domain):
    invite(organization, alice)

    assert invite(organization, alice, f"new@{domain}").email == "new@example.com"
    assert OutboxMessage.objects.filter(topic="mail").count() == 1


def test_a_domain_is_kept_as_it_is_spelled_and_counted_as_one(organization, alice):
    assert invite(organization, alice, "ada@B\xfccher.example").email == "ada@b\xfccher.example"
    assert invite(organization, alice, "ada@xn--bcher-kva.example").email == "ada@xn--bcher-kva.example"

    with pytest.raises(TooManyInvitations):
        invite(organization, alice, "ada+again@B\xfccher.example")


def test_an_address_is_mailed_once_a_day_even_if_its_invitation_was_withdrawn(organization, alice):
    first = invite(organization, alice)
    revoke_invitation(organization=organization, invitation_id=first.pk, by=alice, now=db_now())

    with pytest.raises(TooManyInvitations, match="today") as refused:
        invite(organization, alice, "NEW@example.com")
    assert 86_000 < refused.value.data["retry_after_seconds"] <= 86_400
    age(hours=25)

    assert invite(organization, alice).pk != first.pk
    assert OutboxMessage.objects.filter(topic="mail").count() == 2


@pytest.mark.slow
def test_twenty_are_open_at_once(organization, alice):
    sent = [invite(organization, alice, f"{number}@example.com") for number in range(MAX_OPEN)]

    with pytest.raises(TooManyInvitations, match="20 invitations are open"):
        invite(organization, alice, "more@example.com")
    revoke_invitation(organization=organization, invitation_id=sent[0].pk, by=alice, now=db_now())

    invite(organization, alice, "more@example.com")


@pytest.mark.slow
def test_fifty_are_sent_a_day_whatever_became_of_them(organization, alice):
    for number in range(MAX_A_DAY):
        sent = invite(organization, alice, f"{number}@example.com")
        revoke_invitation(organization=organization, invitation_id=sent.pk, by=alice, now=db_now())

    with pytest.raises(TooManyInvitations, match="50 invitations a day"):
        invite(organization, alice, "more@example.com")
    age(hours=25)

    invite(organization, alice, "more@example.com")


def test_addresses_that_differ_after_a_plus_count_as_one_of_which_others_keep_a_share(organization, alice):
    for tag in ("+1", ""):
        invite(organization, alice, f"victim{tag}@example.com")

    with pytest.raises(TooManyInvitations, match="2 invitations today"):
        invite(organization, alice, "Victim+Other@example.com")
    sharing = make_organization("Another", owner=alice)
    with pytest.raises(TooManyInvitations, match="2 invitations today"):
        invite(sharing, alice, "victim@example.com")
    other = make_organization("Other", owner=make_user())
    invite(other, Membership.objects.get(organization=other).user, "victim@example.com")
    for other in ("victim+1@example.org", "victims@example.com", "+victim@example.com"):
        invite(organization, alice, other)


def test_an_address_gets_three_mails_a_day_from_all_organizations(organization, alice):
    others = [make_organization(f"Other {number}", owner=make_user()) for number in range(MAX_TO_ADDRESS)]
    owner = Membership.objects.get(organization=others[-1]).user
    for each in others[:-1]:
        invite(each, Membership.objects.get(organization=each).user, "Victim@example.com")
    with tenant(organization=organization, user=alice):  # where the others' rows are hidden
        invite(organization, alice, "victim@example.com")

    with tenant(organization=others[-1], user=owner):
        with pytest.raises(TooManyInvitations, match="3 invitations today"):
            invite(others[-1], owner, "victim@example.com")
        invite(others[-1], owner, "friend@example.com")
    age(hours=25)

    invite(others[-1], owner, "victim@example.com")


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("St. Mary's Bakery & Co. (2)", "St. Mary's Bakery & Co. (2)"),
        ("Pay at https://evil.example/login", "Pay at https evil example login"),
        ("www.evil.example", "www evil example"),
        ("evil。example", "evil example"),
        ("Hello\r\nBcc: x@example.com\u2028now", "Hello Bcc x example com now"),
        ("x" * 80, "x" * 60),
        ("Ünïcode 会社", "Ünïcode 会社"),
        ("..//:@", ""),
    ],
)
def test_a_name_in_a_mail_is_one_short_line_without_a_link(name, shown):
    assert plain_name(name) == shown


def test_the_mail_shows_plain_names(organization, alice):
    Organization.objects.filter(pk=organization.pk).update(name="Win at evil.example\nnow")
    User.objects.filter(pk=alice.pk).update(name="http://evil.example")

    send(kind="invitation", invitation_id=invite(organization, alice).pk)

    (message,) = mail.outbox
    assert "evil.example" not in message.body + message.subject
    assert message.subject == "http evil example invites you to Win at evil example now on Anneal"


def test_a_role_that_is_lowered_at_that_moment_is_the_lower_one(organization: Organization, alice: User) -> None:
    invitation, user = invite(organization, alice, role="admin"), make_user("newcomer")
    lowered = []

    def lower(execute: Callable[..., Any], statement: str, *rest: Any) -> Any:
        """Change the invitation as one that held the members' locks until now would."""
        if "FOR UPDATE" in statement and not lowered:
            lowered.append(True)
            Invitation.objects.filter(pk=invitation.pk).update(role="viewer")
        return execute(statement, *rest)

    with connection.execute_wrapper(lower):
        membership = accept(invitation, user)

    assert lowered and membership.role == "viewer"
