"""A revoked key leaves nothing behind, not even what it was making at that moment."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from apps.accounts.login.key_operations import (
    IssuedKey,
    issue_browser_token,
    issue_key,
    revoke_key,
    revoke_keys_of,
)
from apps.accounts.login.key_rotation import rotate_key
from apps.accounts.members.invitations import invite_member
from apps.accounts.members.memberships import remove_member
from apps.accounts.models import ApiKey, Invitation, Membership, Organization, User, default_project_id
from apps.accounts.queries import KeyIdentity, find_key
from apps.core.database.clock import db_now
from apps.core.errors import PermissionDenied
from apps.core.models import AuditEntry
from tests.factories.accounts import make_key, make_member, make_service_account
from tests.support.database import beside

Revoke = Callable[[Organization, User, IssuedKey], Any]
INVITING = frozenset({"view", "member.manage"})


def identity_of(key: IssuedKey) -> KeyIdentity:
    found = find_key(secret=key.secret)
    assert found is not None
    return found


def make_with(
    identity: KeyIdentity,
    organization: Organization,
    by: User,
    *,
    account: str = "",
    scopes: frozenset[str] = frozenset({"view"}),
) -> IssuedKey:
    return issue_key(
        organization=organization, name="made", scopes=scopes, by=by, expires_at=None, now=db_now(), identity=identity,
        service_account_id=account,
    )  # fmt: skip


def invite(organization: Organization, by: User, email: str, identity: KeyIdentity | None = None) -> None:
    invite_member(organization=organization, email=email, role="viewer", by=by, now=db_now(), identity=identity)


def open_invitations() -> set[str]:
    return set(Invitation.objects.still_open().values_list("email", flat=True))


def revoke_one(organization: Organization, by: User, key: IssuedKey) -> None:
    revoke_key(organization=organization, key_id=key.key.pk, by=by, now=db_now())


def revoke_all(organization: Organization, by: User, key: IssuedKey) -> None:
    revoke_keys_of(user=by, now=db_now())


@pytest.mark.slow
def test_a_request_that_began_before_its_key_was_revoked_makes_no_key(organization, alice) -> None:
    key, other = make_key(organization, alice), make_key(organization, alice)
    account, asking = make_service_account(organization, alice), identity_of(key)
    revoke_one(organization, alice, key)

    for account_id in ("", account.pk):
        with pytest.raises(PermissionDenied, match="revoked"):
            make_with(asking, organization, alice, account=account_id)
    with pytest.raises(PermissionDenied, match="revoked"):
        rotate_key(
            organization=organization, key_id=other.key.pk, overlap=timedelta(0), by=alice, now=db_now(),
            identity=asking,
        )  # fmt: skip
    assert find_key(secret=other.secret) is not None


@pytest.mark.parametrize("revoke", [revoke_one, revoke_all])
@pytest.mark.django_db(transaction=True)
def test_a_revocation_waits_for_the_key_that_is_being_made(organization, alice, revoke: Revoke) -> None:
    key = make_key(organization, alice)
    asking = identity_of(key)

    made, _ = beside(lambda: make_with(asking, organization, alice), lambda: revoke(organization, alice, key))

    assert find_key(secret=key.secret) is None
    assert find_key(secret=made.secret) is None


def test_invitations_end_with_the_key_that_sent_them_or_that_made_that_key(organization, alice) -> None:
    leaked, other = make_key(organization, alice), make_key(organization, alice)
    child = make_with(identity_of(leaked), organization, alice, scopes=INVITING)
    for name, key in {"leaked": leaked, "child": child, "other": other}.items():
        invite(organization, alice, f"{name}@example.com", identity_of(key))
    invite(organization, alice, "page@example.com")

    revoke_one(organization, alice, leaked)

    assert open_invitations() == {"other@example.com", "page@example.com"}


def test_an_invitation_that_a_person_sends_again_stays_when_the_key_is_revoked(organization, alice) -> None:
    key = make_key(organization, alice)
    invite(organization, alice, "new@example.com", identity_of(key))
    invite(organization, alice, "new@example.com")

    revoke_one(organization, alice, key)

    assert open_invitations() == {"new@example.com"}


def test_a_request_that_began_before_its_key_was_revoked_invites_nobody(organization, alice) -> None:
    key = make_key(organization, alice)
    asking = identity_of(key)
    revoke_one(organization, alice, key)

    with pytest.raises(PermissionDenied, match="revoked"):
        invite(organization, alice, "new@example.com", asking)


def test_who_revokes_all_keys_with_a_password_closes_the_invitations_that_an_intruder_sent(organization, alice) -> None:
    ann = make_member(organization, "admin")
    invite(organization, alice, "intruder@example.com")
    invite(organization, ann, "colleague@example.com")

    revoke_all(organization, alice, make_key(organization, alice))

    assert open_invitations() == {"colleague@example.com"}
    assert AuditEntry.objects.get(action="key.revoke_all").details["invitations_revoked"] == 1


def change_password(user: User) -> None:
    fresh = User.objects.get(pk=user.pk)
    fresh.set_password("another-correct-horse")
    fresh.save()


def test_a_browser_gets_no_token_once_its_persons_password_was_changed(organization, alice) -> None:
    membership = Membership.objects.select_related("user").get(user=alice)
    change_password(alice)

    with pytest.raises(PermissionDenied, match="Sign in again"):
        issue_browser_token(membership=membership, now=db_now(), project_id=default_project_id(organization))


@pytest.mark.django_db(transaction=True)
def test_a_revocation_waits_for_the_token_that_a_browser_is_given(organization, alice) -> None:
    membership = Membership.objects.select_related("user").get(user=alice)
    project_id = default_project_id(organization)

    made, _ = beside(
        lambda: issue_browser_token(membership=membership, now=db_now(), project_id=project_id),
        lambda: revoke_keys_of(user=alice, now=db_now()),
    )

    assert find_key(secret=made.secret) is None


@pytest.mark.django_db(transaction=True)
def test_a_browser_that_waits_for_a_change_of_the_password_gets_no_token(organization, alice) -> None:
    membership = Membership.objects.select_related("user").get(user=alice)
    project_id = default_project_id(organization)

    def change() -> None:
        change_password(alice)
        revoke_keys_of(user=alice, now=db_now())

    _, refused = beside(change, lambda: issue_browser_token(membership=membership, now=db_now(), project_id=project_id))

    assert isinstance(refused, PermissionDenied)
    assert not ApiKey.objects.filter(revoked_at=None).exists()


def test_a_browser_gets_no_token_once_its_person_has_left(organization, alice) -> None:
    ann = make_member(organization, "admin")
    membership = Membership.objects.select_related("user").get(user=ann)
    remove_member(organization=organization, membership_id=membership.pk, by=alice, now=db_now())

    with pytest.raises(PermissionDenied, match="Sign in again"):
        issue_browser_token(membership=membership, now=db_now(), project_id=default_project_id(organization))
