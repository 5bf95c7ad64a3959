"""Changing organizations, memberships, invitations and keys. Each change is audited in its own transaction."""

import datetime
import hashlib
import hmac
import secrets
from dataclasses import asdict, dataclass

from django.conf import settings
from django.db import IntegrityError, transaction
from django.db.models import Q, QuerySet
from django.utils.text import slugify

from apps.accounts import keys
from apps.accounts.models import ApiKey, Invitation, KeyKind, Membership, Organization, User
from apps.accounts.queries import (
    NO_LIMITS,
    KeyIdentity,
    KeyLimits,
    find_membership,
    get_invitation,
    get_key,
    get_membership,
)
from apps.accounts.roles import ROLES, SCOPES, Owner, Permission, has_permission
from apps.core import audit, outbox
from apps.core.errors import InvalidState, InvalidValue, NotFound, PermissionDenied
from apps.core.tenancy import set_organization

INVITATION_LIFETIME = datetime.timedelta(days=7)
MEMBER_TOKEN_LIFETIME = datetime.timedelta(minutes=10)
USE_NOTED_EVERY = datetime.timedelta(minutes=1)
_SLUG_LENGTH = 40
_SLUG_ATTEMPTS = 8


class LastOwner(InvalidState):
    """An organization keeps at least one owner, who alone can give its management away."""

    code = "last_owner"


class AlreadyMember(InvalidState):
    code = "already_member"


class InvitationClosed(InvalidState):
    """The invitation was accepted, withdrawn or has expired."""

    code = "invitation_closed"


@dataclass(frozen=True)
class IssuedKey:
    """A new key with its secret, which exists nowhere else from now on."""

    key: ApiKey
    secret: str


# --- Organizations ----------------------------------------------------------------------------------------------------


@transaction.atomic
def create_organization(*, name: str, owner: User, now: datetime.datetime) -> Organization:
    """Create an organization owned by `owner`. The `tenant` block in progress, if any, acts for it from here on."""
    organization = _insert_organization(name=_clean_name(name), now=now)
    Membership.objects.create(organization=organization, user=owner, role=Owner.name, created_at=now)
    audit.record(
        organization=organization, by=owner.pk, action="organization.create", target=organization.pk, name=name
    )
    return organization


def _insert_organization(*, name: str, now: datetime.datetime) -> Organization:
    """Insert under the first free slug. Other organizations are invisible here, so the unique index is asked."""
    for attempt in range(_SLUG_ATTEMPTS):
        organization = Organization(name=name, slug=_slug(name, attempt), created_at=now)
        set_organization(organization)
        try:
            with transaction.atomic():
                organization.save(force_insert=True)
        except IntegrityError:
            continue
        return organization
    raise InvalidState("No free address was found for this name. Choose another.", param="name")


def _slug(name: str, attempt: int) -> str:
    base = slugify(name) or "organization"
    suffix = "" if attempt == 0 else f"-{secrets.token_hex(2)}"
    return base[: _SLUG_LENGTH - len(suffix)].rstrip("-") + suffix


@transaction.atomic
def rename_organization(*, organization: Organization, name: str, by: User) -> None:
    """Change the shown name. The slug stays: it is part of the names of the organization's models."""
    before, organization.name = organization.name, _clean_name(name)
    organization.save(update_fields=["name"])
    audit.record(
        organization=organization,
        by=by.pk,
        action="organization.rename",
        target=organization.pk,
        before=before,
        after=organization.name,
    )


def _clean_name(name: str) -> str:
    cleaned = " ".join(name.split())
    if not cleaned:
        raise InvalidValue("A name is required.", param="name")
    return cleaned[:80]


# --- Members ----------------------------------------------------------------------------------------------------------


@transaction.atomic
def change_role(*, organization: Organization, membership_id: str, role: str, by: User) -> Membership:
    """Give a member another role. Raises PermissionDenied, LastOwner, NotFound, InvalidValue."""
    acting = _lock_members(organization, by)
    membership = get_membership(organization=organization, id=membership_id)
    _require_grantable(acting, _known_role(role), membership.role)
    if membership.role == Owner.name and role != Owner.name:
        _require_another_owner(membership)
    before, membership.role = membership.role, role
    membership.save(update_fields=["role"])
    audit.record(
        organization=organization, by=by.pk, action="member.change_role", target=membership.user_id,
        before=before, after=role,
    )  # fmt: skip
    return membership


@transaction.atomic
def remove_member(*, organization: Organization, membership_id: str, by: User, now: datetime.datetime) -> None:
    """End a membership and revoke the member's keys. Anybody may leave; others need the right to manage members."""
    acting = _lock_members(organization, by)
    membership = get_membership(organization=organization, id=membership_id)
    if membership.user_id != by.pk:
        _require_grantable(acting, membership.role)
    if membership.role == Owner.name:
        _require_another_owner(membership)
    kept = ApiKey.objects.for_organization(organization).filter(created_by=membership.user_id, revoked_at=None)
    revoked = kept.update(revoked_at=now, revoked_by=by)
    membership.delete()
    audit.record(
        organization=organization, by=by.pk, action="member.remove", target=membership.user_id, keys_revoked=revoked
    )


def _lock_members(organization: Organization, by: User) -> Membership:
    """Serialise changes to who is a member, so that two owners cannot remove each other; return the actor's own row."""
    members = Membership.objects.for_organization(organization).select_for_update().order_by("id")
    acting = next((member for member in members if member.user_id == by.pk), None)
    if acting is None:
        raise NotFound("No such organization.")
    return acting


def _require_grantable(acting: Membership, *roles: str) -> None:
    """A member manages only roles that hold no more than the member's own: an admin makes and unmakes no owner."""
    if not has_permission(acting.role, Permission.MEMBER_MANAGE):
        raise PermissionDenied(f"Your role, {acting.role}, does not allow managing members.")
    for role in roles:
        if not ROLES[role].permissions <= ROLES[acting.role].permissions:
            raise PermissionDenied(f"Only an owner may do this to an {role}." if role == Owner.name else "Not allowed.")


def _require_another_owner(membership: Membership) -> None:
    owners = Membership.objects.for_organization(membership.organization_id).filter(role=Owner.name)
    if not owners.exclude(pk=membership.pk).exists():
        raise LastOwner("An organization needs an owner: make somebody else one first.", param="role")


def _known_role(role: str) -> str:
    if role not in ROLES:
        raise InvalidValue(f"A role is one of {', '.join(ROLES)}.", param="role")
    return role


# --- Invitations ------------------------------------------------------------------------------------------------------


@transaction.atomic
def invite_member(*, organization: Organization, email: str, role: str, by: User, now: datetime.datetime) -> Invitation:
    """Mail somebody a link that makes its reader a member; an open invitation of the same address is replaced.

    Raises AlreadyMember, PermissionDenied, InvalidValue.
    """
    acting = _lock_members(organization, by)
    _require_grantable(acting, _known_role(role))
    email = email.strip().lower()
    if Membership.objects.for_organization(organization).filter(user__email=email).exists():
        raise AlreadyMember(f"{email} is already a member.", param="email")
    _open_invitations(organization, email).update(revoked_at=now)
    invitation = Invitation(
        organization=organization, email=email, role=role, invited_by=by,
        created_at=now, expires_at=now + INVITATION_LIFETIME,
    )  # fmt: skip
    invitation.token_sha256 = _sha256(invitation_token(invitation.pk))
    invitation.save(force_insert=True)
    outbox.publish(
        topic="mail",
        key=f"invitation:{invitation.pk}",
        payload={"kind": "invitation", "invitation_id": invitation.pk},
    )
    audit.record(
        organization=organization, by=by.pk, action="member.invite", target=invitation.pk, email=email, role=role
    )
    return invitation


def _open_invitations(organization: Organization, email: str) -> QuerySet[Invitation]:
    rows = Invitation.objects.for_organization(organization)
    return rows.filter(email__iexact=email, accepted_at=None, revoked_at=None)


def invitation_token(invitation_id: str) -> str:
    """Return the secret of an invitation's link, derived and so kept nowhere: neither in the row nor in the outbox."""
    digest = hmac.new(settings.SIGNING_KEY.encode(), f"invitation:{invitation_id}".encode(), hashlib.sha256)
    return digest.hexdigest()


def _sha256(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def find_invitation(*, token: str) -> Invitation:
    """Return the invitation of a link. Run it under `system()`: its reader is no member yet. Raises NotFound."""
    rows = Invitation.objects.filter(token_sha256=_sha256(token))
    invitation = rows.select_related("organization", "invited_by").first()
    if invitation is None:
        raise NotFound("No such invitation.")
    return invitation


@transaction.atomic
def accept_invitation(*, token: str, user: User, now: datetime.datetime) -> Membership:
    """Make `user` a member. Run it under `system()`. Raises NotFound, InvitationClosed, AlreadyMember.

    Whoever holds the link may use it once: the address it was mailed to need not be the reader's login.
    """
    invitation = find_invitation(token=token)
    open_now = Invitation.objects.filter(pk=invitation.pk, accepted_at=None, revoked_at=None, expires_at__gt=now)
    if not open_now.update(accepted_at=now, accepted_by=user):
        raise InvitationClosed("This invitation was used, withdrawn or has expired. Ask for a new one.")
    if find_membership(organization=invitation.organization, user=user):
        raise AlreadyMember(f"You are already a member of {invitation.organization.name}.")
    membership = Membership.objects.create(
        organization=invitation.organization, user=user, role=invitation.role, created_at=now
    )
    audit.record(
        organization=invitation.organization, by=user.pk, action="member.join", target=user.pk,
        invitation=invitation.pk, role=invitation.role,
    )  # fmt: skip
    return membership


@transaction.atomic
def revoke_invitation(*, organization: Organization, invitation_id: str, by: User, now: datetime.datetime) -> None:
    """Withdraw an open invitation. Raises NotFound, InvitationClosed."""
    invitation = get_invitation(organization=organization, id=invitation_id)
    open_now = Invitation.objects.filter(pk=invitation.pk, accepted_at=None, revoked_at=None)
    if not open_now.update(revoked_at=now):
        raise InvitationClosed("This invitation was already used or withdrawn.")
    audit.record(organization=organization, by=by.pk, action="member.uninvite", target=invitation.pk)


# --- Keys -------------------------------------------------------------------------------------------------------------


@transaction.atomic
def issue_key(
    *,
    organization: Organization,
    name: str,
    scopes: frozenset[str],
    by: User,
    expires_at: datetime.datetime | None,
    now: datetime.datetime,
    limits: KeyLimits = NO_LIMITS,
) -> IssuedKey:
    """Make an API key that may do at most what its maker may. Raises InvalidValue, PermissionDenied."""
    _require_scopes(organization, frozenset(scopes), by)
    if expires_at is not None and expires_at <= now:
        raise InvalidValue("The key would be expired at once.", param="expires_at")
    issued = _issue(
        keys.new_secret(keys.LIVE_PREFIX), organization=organization, kind=KeyKind.SECRET, name=_clean_name(name),
        scopes=sorted(scopes), created_by=by, created_at=now, expires_at=expires_at, **asdict(limits),
    )  # fmt: skip
    audit.record(
        organization=organization, by=by.pk, action="key.create", target=issued.key.pk,
        name=issued.key.name, scopes=issued.key.scopes,
    )  # fmt: skip
    return issued


@transaction.atomic
def issue_member_token(
    *,
    membership: Membership,
    now: datetime.datetime,
    name: str = "Playground",
    lifetime: datetime.timedelta = MEMBER_TOKEN_LIFETIME,
) -> IssuedKey:
    """Make a key that asks in a member's name for minutes: inference only. Raises PermissionDenied.

    Not audited one by one: it grants nothing the session does not, and what it does is metered.
    """
    scopes = frozenset({Permission.INFERENCE.value})
    _require_role(membership, scopes)
    return _issue(
        keys.new_secret(keys.WEB_PREFIX), organization_id=membership.organization_id, kind=KeyKind.MEMBER, name=name,
        scopes=sorted(scopes), created_by_id=membership.user_id, created_at=now, expires_at=now + lifetime,
    )  # fmt: skip


def _issue(secret: str, **fields: object) -> IssuedKey:
    key = ApiKey.objects.create(hmac=keys.fingerprint(secret), prefix=keys.shown_prefix(secret), **fields)
    return IssuedKey(key=key, secret=secret)


def _require_scopes(organization: Organization, scopes: frozenset[str], by: User) -> None:
    if not scopes or not scopes <= frozenset(SCOPES):
        raise InvalidValue(f"Choose at least one scope of {', '.join(SCOPES)}.", param="scopes")
    membership = find_membership(organization=organization, user=by)
    if membership is None:
        raise NotFound("No such organization.")
    _require_role(membership, scopes)


def _require_role(membership: Membership, scopes: frozenset[str]) -> None:
    missing = sorted(scope for scope in scopes if not has_permission(membership.role, Permission(scope)))
    if missing:
        raise PermissionDenied(
            f"Your role, {membership.role}, does not hold {', '.join(missing)}: a key may do no more than its maker.",
            param="scopes",
        )


@transaction.atomic
def revoke_key(*, organization: Organization, key_id: str, by: User, now: datetime.datetime) -> ApiKey:
    """Revoke a key; one already revoked stays as it is. Members revoke their own, admins anybody's.

    Raises NotFound, PermissionDenied.
    """
    key = get_key(organization=organization, id=key_id)
    membership = find_membership(organization=organization, user=by)
    may_manage_all = membership and has_permission(membership.role, Permission.MEMBER_MANAGE)
    if key.created_by_id != by.pk and not may_manage_all:
        raise PermissionDenied("Only an owner or admin may revoke another member's key.")
    if ApiKey.objects.filter(pk=key.pk, revoked_at=None).update(revoked_at=now, revoked_by=by):
        audit.record(organization=organization, by=by.pk, action="key.revoke", target=key.pk)
    key.refresh_from_db()
    return key


def note_key_use(*, identity: KeyIdentity, now: datetime.datetime) -> None:
    """Remember when a key was last used, to the minute: a write per request would cost more than it tells."""
    if identity.last_used_at is not None and now - identity.last_used_at < USE_NOTED_EVERY:
        return
    stale = Q(last_used_at=None) | Q(last_used_at__lte=now - USE_NOTED_EVERY)
    ApiKey.objects.filter(stale, pk=identity.key_id).update(last_used_at=now)
