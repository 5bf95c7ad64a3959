"""Changes of memberships of people and service accounts: change the role, and end the membership. Each is audited."""

import datetime

from django.db import transaction
from django.db.models import QuerySet
from django.utils.translation import gettext

from apps.accounts.models import ApiKey, Invitation, Membership, Organization, User
from apps.accounts.queries import KeyIdentity, MemberKind, get_membership, with_made
from apps.accounts.roles import ROLES, Owner, Permission, has_permission
from apps.core import audit
from apps.core.errors import InvalidState, InvalidValue, NotFound, PermissionDenied

# What manages people, keys or the organization.
MANAGING = frozenset({Permission.MEMBER_MANAGE, Permission.KEY_MANAGE, Permission.ORGANIZATION_MANAGE})


@transaction.atomic
def change_role(
    *,
    organization: Organization,
    membership_id: str,
    role: str,
    by: User,
    now: datetime.datetime,
    identity: KeyIdentity | None = None,
    kind: MemberKind = MemberKind.PERSON,
) -> Membership:
    """Give a member another role, and revoke everything with which they could return to the old one.

    These are invitations that the member may no longer send, and service account keys that the member knows (see
    `_revoke_managing_keys`). `identity` is the calling key, if there is one. Raises PermissionDenied, InvalidState,
    NotFound, InvalidValue.
    """
    acting = lock_members(organization, by)
    membership = get_membership(organization=organization, id=membership_id, kind=kind)
    require_grantable(acting, known_role(role), membership.role, identity=identity)
    if membership.role == Owner.name and role != Owner.name:
        _require_another_owner(membership)
    before, membership.role = membership.role, role
    membership.save(update_fields=["role"])
    revoked = _revoke_invitations_by(membership, now, keep=_grantable_roles(role))
    keys_revoked = _revoke_managing_keys(membership, now, by, role=role)
    audit.record(
        organization=organization, by=by.pk, action="member.change_role", target=membership.user_id,
        before=before, after=role, invitations_revoked=revoked, keys_revoked=keys_revoked,
    )  # fmt: skip
    return membership


@transaction.atomic
def remove_member(
    *,
    organization: Organization,
    membership_id: str,
    by: User,
    now: datetime.datetime,
    identity: KeyIdentity | None = None,
    kind: MemberKind = MemberKind.PERSON,
) -> None:
    """End a membership, revoke the member's keys, and close the invitations the member sent or could use.

    Any member may leave. Removing others needs the right to manage members; `identity`, the calling key, needs it too.
    Keys of service accounts that a person created stay, and are counted in the audit log, unless they manage people,
    keys or the organization. Everything that the keys of a service account made ends with the account.
    """
    acting = lock_members(organization, by)
    membership = get_membership(organization=organization, id=membership_id, kind=kind)
    if identity or membership.user_id != by.pk:
        require_grantable(acting, membership.role, identity=identity)
    if membership.role == Owner.name:
        _require_another_owner(membership)
    keys = ApiKey.objects.for_organization(organization)
    own = keys.filter(created_by=membership.user_id)
    ended = with_made(own) if kind is MemberKind.SERVICE_ACCOUNT else own.filter(revoked_at=None)
    keys_revoked = revoke_keys(ended, now=now, by=by) + _revoke_managing_keys(membership, now, by)
    known = keys.filter(issued_by=membership.user_id, revoked_at=None)
    invitations_revoked = _revoke_invitations_by(membership, now) + _revoke_invitations_to(membership, now)
    membership.delete()
    audit.record(
        organization=organization, by=by.pk, action="member.remove", target=membership.user_id,
        keys_revoked=keys_revoked, invitations_revoked=invitations_revoked, service_account_keys=known.count(),
    )  # fmt: skip


def _revoke_managing_keys(membership: Membership, now: datetime.datetime, by: User, *, role: str = "") -> int:
    """Revoke the keys of service accounts with which their creator could return; return how many.

    Keys made with these are revoked too.

    If `role` manages members, these are the keys with a scope of `MANAGING` that the role lacks; otherwise the keys
    with any of these scopes.
    """
    scopes = MANAGING
    if role and has_permission(role, Permission.MEMBER_MANAGE):
        scopes = MANAGING - ROLES[role].permissions
    known = ApiKey.objects.for_organization(membership.organization_id).filter(issued_by=membership.user_id)
    return revoke_keys(with_made(known.filter(scopes__overlap=sorted(scopes))), now=now, by=by)


def revoke_keys(keys: QuerySet[ApiKey], *, now: datetime.datetime, by: User) -> int:
    """Revoke the keys, and close the open invitations that were sent with them; return the number of keys.

    The caller has locked the members, so that no key sends another invitation meanwhile.
    """
    ids = list(keys.order_by().values_list("pk", flat=True))
    Invitation.objects.still_open().filter(made_with__in=ids).update(revoked_at=now)
    return ApiKey.objects.filter(pk__in=ids).update(revoked_at=now, revoked_by=by)


def require_not_revoked(identity: KeyIdentity) -> None:
    """Raise PermissionDenied if the calling key was revoked since its request began.

    Revocations and demotions lock the members too: one that comes later finds what the key made, and ends it.
    """
    if not ApiKey.objects.filter(pk=identity.key_id, revoked_at=None).exists():
        raise PermissionDenied(gettext("This API key was revoked."))


def _revoke_invitations_by(
    membership: Membership, now: datetime.datetime, *, keep: frozenset[str] = frozenset()
) -> int:
    """Close the open invitations a member sent, except for roles in `keep`; return how many."""
    rows = Invitation.objects.for_organization(membership.organization_id).still_open()
    return rows.filter(invited_by=membership.user_id).exclude(role__in=keep).update(revoked_at=now)


def _revoke_invitations_to(membership: Membership, now: datetime.datetime) -> int:
    """Close the open invitations to the member's address, which would let them return; return how many."""
    rows = Invitation.objects.for_organization(membership.organization_id).still_open()
    return rows.filter(email__iexact=membership.user.email).update(revoked_at=now)


def lock_members(organization: Organization, by: User) -> Membership:
    """Lock all members, so that two owners cannot remove each other; return the actor's own membership."""
    members = Membership.objects.for_organization(organization).select_for_update().order_by("id")
    acting = next((member for member in members if member.user_id == by.pk), None)
    if acting is None:
        raise NotFound(gettext("No such organization."))
    return acting


def lock_memberships_of(*, user: User) -> None:
    """Lock a person's memberships in all organizations. Who makes a key holds one of them. Run it under `system()`."""
    list(Membership.objects.filter(user=user).select_for_update().order_by("id"))


def _grantable_roles(role: str) -> frozenset[str]:
    """Return the roles that a member with `role` may give."""
    if not has_permission(role, Permission.MEMBER_MANAGE):
        return frozenset()
    return frozenset(name for name, each in ROLES.items() if each.permissions <= ROLES[role].permissions)


def require_grantable(acting: Membership, *roles: str, identity: KeyIdentity | None = None) -> None:
    """Raise PermissionDenied unless the member and the calling key may manage all these roles.

    Both manage only roles with no more permissions than their own: an admin cannot make or remove an owner. The caller
    has locked the members.
    """
    if identity:
        require_not_revoked(identity)
    if not has_permission(acting.role, Permission.MEMBER_MANAGE):
        raise PermissionDenied(gettext("Your role, %(role)s, does not allow managing members.") % {"role": acting.role})
    for role in roles:
        if not ROLES[role].permissions <= ROLES[acting.role].permissions:
            raise PermissionDenied(
                gettext("Only an owner may do this to an %(role)s.") % {"role": role}
                if role == Owner.name
                else gettext("Not allowed.")
            )
        if identity and (missing := sorted(ROLES[role].permissions - identity.scopes)):
            text = gettext("This API key lacks %(missing)s, so it cannot give, change or remove the role %(role)s.") % {
                "missing": ", ".join(missing),
                "role": role,
            }
            raise PermissionDenied(text, param="role")


def _require_another_owner(membership: Membership) -> None:
    if membership.user.service_account_of_id:
        return
    owners = Membership.objects.for_organization(membership.organization_id).people().filter(role=Owner.name)
    if not owners.exclude(pk=membership.pk).exists():
        raise InvalidState(
            gettext("An organization needs an owner: give another member that role first."),
            param="role",
            code="last_owner",
        )


def known_role(role: str) -> str:
    if role not in ROLES:
        raise InvalidValue(gettext("The role must be one of %(roles)s.") % {"roles": ", ".join(ROLES)}, param="role")
    return role
