"""Who may make whom what, and what each change leaves behind."""

import pytest

from apps.accounts.login.key_operations import issue_key, revoke_key
from apps.accounts.members.memberships import change_role, remove_member
from apps.accounts.models import ApiKey, Membership, Organization, User
from apps.core.database.clock import db_now
from apps.core.errors import InvalidState, InvalidValue, NotFound, PermissionDenied
from apps.core.models import AuditEntry
from tests.factories.accounts import make_key


def membership_of(user: User) -> Membership:
    return Membership.objects.get(user=user)


def give(organization: Organization, user: User, role: str, by: User) -> None:
    change_role(organization=organization, membership_id=membership_of(user).pk, role=role, by=by, now=db_now())


def remove(organization: Organization, user: User, by: User) -> None:
    remove_member(organization=organization, membership_id=membership_of(user).pk, by=by, now=db_now())


def test_an_owner_gives_roles(organization: Organization, alice: User, bob: User) -> None:
    give(organization, bob, "admin", by=alice)

    assert membership_of(bob).role == "admin"
    entry = AuditEntry.objects.get(action="member.change_role")
    assert (entry.actor, entry.target, entry.details) == (
        alice.pk,
        bob.pk,
        {"before": "member", "after": "admin", "invitations_revoked": 0, "keys_revoked": 0},
    )


def test_an_admin_makes_and_unmakes_no_owner(organization: Organization, ann: User, alice: User, bob: User) -> None:
    with pytest.raises(PermissionDenied):
        give(organization, bob, "owner", by=ann)
    with pytest.raises(PermissionDenied):
        give(organization, alice, "viewer", by=ann)
    with pytest.raises(PermissionDenied):
        remove(organization, alice, by=ann)


def test_a_member_manages_nobody(organization: Organization, bob: User, vera: User) -> None:
    with pytest.raises(PermissionDenied):
        give(organization, vera, "member", by=bob)
    with pytest.raises(PermissionDenied):
        remove(organization, vera, by=bob)


def test_the_last_owner_stays(organization: Organization, alice: User) -> None:
    with pytest.raises(InvalidState, match="needs an owner"):
        give(organization, alice, "admin", by=alice)
    with pytest.raises(InvalidState, match="needs an owner"):
        remove(organization, alice, by=alice)


def test_an_owner_may_leave_when_there_is_another(organization: Organization, alice: User, bob: User) -> None:
    give(organization, bob, "owner", by=alice)

    remove(organization, alice, by=alice)

    assert not Membership.objects.filter(user=alice).exists()


def test_anybody_may_leave_and_their_keys_end(organization: Organization, bob: User) -> None:
    make_key(organization, bob, scopes=frozenset({"view"}))

    remove(organization, bob, by=bob)

    assert ApiKey.objects.get(created_by=bob).revoked_by == bob


def test_somebody_elses_member_is_not_found(organization: Organization, alice: User, charlie: User,
                                            rival: Organization) -> None:  # fmt: skip
    with pytest.raises(NotFound):
        give(organization, charlie, "viewer", by=alice)


def test_an_unknown_role_is_refused(organization: Organization, alice: User, bob: User) -> None:
    with pytest.raises(InvalidValue):
        give(organization, bob, "emperor", by=alice)


def test_a_key_does_no_more_than_its_creator(organization: Organization, vera: User) -> None:
    with pytest.raises(PermissionDenied):
        issue_key(
            organization=organization, name="k", scopes=frozenset({"job.write"}), by=vera, expires_at=None, now=db_now()
        )


@pytest.mark.parametrize("scopes", [set(), {"everything"}])
def test_a_key_has_known_scopes_only(scopes: set[str], organization: Organization, alice: User) -> None:
    with pytest.raises(InvalidValue):
        issue_key(
            organization=organization, name="k", scopes=frozenset(scopes), by=alice, expires_at=None, now=db_now()
        )


def test_a_member_revokes_their_own_keys_only(organization: Organization, bob: User, ann: User) -> None:
    bobs = make_key(organization, bob, scopes=frozenset({"view"})).key
    anns = make_key(organization, ann, scopes=frozenset({"view"})).key

    revoke_key(organization=organization, key_id=bobs.pk, by=bob, now=db_now())
    with pytest.raises(PermissionDenied):
        revoke_key(organization=organization, key_id=anns.pk, by=bob, now=db_now())

    bobs.refresh_from_db()
    assert bobs.revoked_at is not None


def test_revoking_twice_is_audited_once(organization: Organization, alice: User) -> None:
    issued = make_key(organization, alice)

    for _ in range(2):
        revoke_key(organization=organization, key_id=issued.key.pk, by=alice, now=db_now())

    assert AuditEntry.objects.filter(action="key.revoke").count() == 1
