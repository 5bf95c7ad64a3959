"""Invitations: mailed links that make their reader a member.

An invitation is only as valid as its sender's rights. It closes when the sender leaves or loses the right to give its
role, and that right is checked again on acceptance. It also closes if the API key that sent it is revoked, because a
thief of the key may have chosen the address.
"""

import datetime
import hashlib
import hmac
import math

from django.conf import settings
from django.db import transaction
from django.db.models import Min, Q, QuerySet
from django.utils.translation import gettext

from apps.accounts.login.addresses import has_verified_address, plain_address, spellings_of
from apps.accounts.members.memberships import known_role, lock_members, require_grantable
from apps.accounts.models import Invitation, Membership, Organization, User
from apps.accounts.notices.events import announce
from apps.accounts.notices.notifications import MANAGERS
from apps.accounts.queries import KeyIdentity, get_invitation
from apps.accounts.roles import Permission, has_permission
from apps.accounts.shares import share_of
from apps.core import audit
from apps.core.database.locks import lock
from apps.core.database.tenancy import all_tenants
from apps.core.errors import InvalidState, NotFound, PermissionDenied, RateLimited
from apps.core.messages import outbox

INVITATION_LIFETIME = datetime.timedelta(days=7)
# An invitation is mail to a stranger, with words chosen by the sender.
MAX_OPEN, MAX_A_DAY = 20, 50  # per organization
# A day, from all organizations and from those that share: anyone can found some, and none may use up what others have.
MAX_TO_ADDRESS, MAX_OF_ONE_TO_ADDRESS = 3, 2
_A_DAY = datetime.timedelta(days=1)


class InvitationClosed(InvalidState):
    """The invitation was accepted, was withdrawn or has expired, or its sender may no longer give its role."""

    code = "invitation_closed"


class TooManyInvitations(RateLimited):
    """The organization or the address has reached its limit of invitations for now."""

    code = "too_many_invitations"


@transaction.atomic
def invite_member(
    *,
    organization: Organization,
    email: str,
    role: str,
    by: User,
    now: datetime.datetime,
    only_for_address: bool | None = None,
    identity: KeyIdentity | None = None,
) -> Invitation:
    """Mail a link that makes its reader a member, replacing an open invitation of the same address.

    An organization mails an address at most once a day. Within that day, the invitation is changed instead, and its
    link stays the same. With `only_for_address`, the reader's account must have that address, verified. By default this
    applies to roles that manage members. `identity` is the calling key, if there is one. Raises InvalidState,
    PermissionDenied, TooManyInvitations, InvalidValue.
    """
    if by.service_account_of_id:
        raise PermissionDenied(gettext("A service account cannot invite people. Use the API key of a person."))
    acting = lock_members(organization, by)
    require_grantable(acting, known_role(role), identity=identity)
    email = plain_address(email)
    if Membership.objects.for_organization(organization).filter(user__email=email).exists():
        raise InvalidState(
            gettext("%(email)s is already a member.") % {"email": email}, param="email", code="already_member"
        )
    if only_for_address is None:
        only_for_address = has_permission(role, Permission.MEMBER_MANAGE)
    rows = Invitation.objects.for_organization(organization).still_open()
    for replaced in rows.filter(email__iexact=email, expires_at__gt=now):
        require_grantable(acting, replaced.role, identity=identity)
    made_with = identity.key_id if identity else ""
    fields = {"role": role, "invited_by": by, "only_for_address": only_for_address, "made_with": made_with}
    invitation: Invitation | None = rows.filter(email__iexact=email, created_at__gt=now - _A_DAY).first()
    if invitation is None:
        _require_room(organization, by, email, now)
        invitation = _mail(organization, email, now, **fields)
    else:
        for name, value in fields.items():
            setattr(invitation, name, value)
        invitation.save(update_fields=list(fields))
    audit.record(
        organization=organization, by=by.pk, action="member.invite", target=invitation.pk, email=email, role=role,
        only_for_address=only_for_address,
    )  # fmt: skip
    return invitation


def _require_room(organization: Organization, by: User, email: str, now: datetime.datetime) -> None:
    """Raise PermissionDenied, or TooManyInvitations, which names the limit.

    The member rows are locked, so the count is exact.
    """
    if not has_verified_address(user=by):
        raise PermissionDenied(
            gettext("Confirm your own email address before you invite others."), code="address_unverified"
        )
    rows = Invitation.objects.for_organization(organization)
    today = rows.filter(created_at__gt=now - _A_DAY)
    if today.filter(email__iexact=email).exists():
        raise TooManyInvitations(
            gettext("%(email)s already got an invitation today. Try again tomorrow.") % {"email": email},
            param="email",
            retry_after_seconds=_seconds_until_tomorrow(today.filter(email__iexact=email), now),
        )
    if rows.still_open().filter(expires_at__gt=now).exclude(email__iexact=email).count() >= MAX_OPEN:
        raise TooManyInvitations(
            gettext("%(max_open)s invitations are open. Withdraw one, or wait until one is accepted.")
            % {"max_open": MAX_OPEN},
            retry_after_seconds=3600,
        )
    if today.count() >= MAX_A_DAY:
        raise TooManyInvitations(
            gettext("An organization can send %(max_a_day)s invitations a day. Try again tomorrow.")
            % {"max_a_day": MAX_A_DAY},
            retry_after_seconds=_seconds_until_tomorrow(today, now),
        )
    local, _, domain = email.rpartition("@")
    name = local.partition("+")[0] or local  # what comes after a plus leads to the same person
    theirs = Q()
    for spelled in spellings_of(domain):
        theirs |= Q(email=f"{name}@{spelled}") | Q(email__startswith=f"{name}+", email__endswith=f"@{spelled}")
    lock(f"invitations:{name}@{spelled}")
    with share_of(organization) as sharing, all_tenants():
        sent = Invitation.objects.filter(theirs, created_at__gt=now - _A_DAY)
        of_all, of_one = sent.count(), sent.filter(organization__in=sharing).count()
        wait = _seconds_until_tomorrow(sent, now)
    if of_all >= MAX_TO_ADDRESS or of_one >= MAX_OF_ONE_TO_ADDRESS:
        message = gettext("%(email)s already got %(max_to_address)s invitations today. Try again tomorrow.") % {
            "email": email,
            "max_to_address": MAX_TO_ADDRESS if of_all >= MAX_TO_ADDRESS else MAX_OF_ONE_TO_ADDRESS,
        }
        raise TooManyInvitations(message, param="email", retry_after_seconds=wait)


def _seconds_until_tomorrow(sent: QuerySet[Invitation], now: datetime.datetime) -> int:
    """Return the seconds until the first of these invitations is a day old."""
    first = sent.aggregate(at=Min("created_at"))["at"] or now
    return math.ceil((first + _A_DAY - now).total_seconds())


def _mail(organization: Organization, email: str, now: datetime.datetime, **fields: object) -> Invitation:
    """Create an invitation that replaces the address's earlier one, and queue its mail."""
    Invitation.objects.for_organization(organization).still_open().filter(email__iexact=email).update(revoked_at=now)
    invitation = Invitation(
        organization=organization, email=email, created_at=now, expires_at=now + INVITATION_LIFETIME, **fields
    )
    invitation.token_sha256 = _sha256(invitation_token(invitation.pk))
    invitation.save(force_insert=True)
    outbox.publish(
        topic="mail",
        key=f"invitation:{invitation.pk}",
        payload={"kind": "invitation", "invitation_id": invitation.pk},
    )
    return invitation


def invitation_token(invitation_id: str) -> str:
    """Return the secret of an invitation's link. It is derived, so neither the row nor the outbox stores it."""
    digest = hmac.new(settings.SIGNING_KEY.encode(), f"invitation:{invitation_id}".encode(), hashlib.sha256)
    return digest.hexdigest()


def _sha256(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def find_invitation(*, token: str) -> Invitation:
    """Return the invitation of a link. Run it under `system()`: its reader is not a member yet. Raises NotFound."""
    rows = Invitation.objects.filter(token_sha256=_sha256(token))
    invitation = rows.select_related("organization", "invited_by").first()
    if invitation is None:
        raise NotFound(gettext("No such invitation."))
    return invitation


@transaction.atomic
def accept_invitation(*, token: str, user: User, now: datetime.datetime) -> Membership:
    """Make `user` a member. Run it under `system()`.

    Raises NotFound, InvitationClosed, PermissionDenied, InvalidState. Unless the invitation is only for its address,
    any account may use the link, once.
    """
    invitation = find_invitation(token=token)
    if invitation.organization.suspended_at:
        raise InvitationClosed(
            gettext("%(name)s is suspended. Ask for a new invitation later.") % {"name": invitation.organization.name}
        )
    # The locks of a removal, in its order: with them held, the sender is a member or not for the whole transaction.
    rows = Membership.objects.for_organization(invitation.organization_id)
    members = list(rows.select_for_update(of=("self",)).select_related("user").order_by("id"))
    invitation.refresh_from_db(fields=["role", "invited_by", "only_for_address"])  # changed under the same locks
    if any(member.user_id == user.pk for member in members):
        raise InvalidState(
            gettext("You are already a member of %(name)s.") % {"name": invitation.organization.name},
            code="already_member",
        )
    _require_sender_may_still_grant(invitation, members)
    if invitation.only_for_address and not has_verified_address(user=user, email=invitation.email):
        raise PermissionDenied(
            gettext("This invitation is for %(email)s. Sign in with that address to accept it.")
            % {"email": invitation.email},
            code="wrong_address",
        )
    open_now = Invitation.objects.filter(pk=invitation.pk, expires_at__gt=now).still_open()
    if not open_now.update(accepted_at=now, accepted_by=user):
        raise InvitationClosed(gettext("This invitation was used, withdrawn or has expired. Ask for a new one."))
    membership = Membership.objects.create(
        organization=invitation.organization, user=user, role=invitation.role, created_at=now
    )
    audit.record(
        organization=invitation.organization, by=user.pk, action="member.join", target=user.pk,
        invitation=invitation.pk, role=invitation.role,
    )  # fmt: skip
    announce(
        organization=invitation.organization_id,
        type="member.joined",
        subject=user.pk,
        title=lambda: gettext("%(user)s joined as %(role)s") % {"user": user, "role": gettext(invitation.role)},
        path="/members",
        key=f"joined:{invitation.pk}",
        users=[member.user_id for member in members if member.role in MANAGERS],
    )
    return membership


def _require_sender_may_still_grant(invitation: Invitation, members: list[Membership]) -> None:
    sender = next((member for member in members if member.user_id == invitation.invited_by_id), None)
    try:
        if sender is None or not sender.user.is_active or sender.user.service_account_of_id:
            raise PermissionDenied(gettext("The sender is no longer a member."))
        require_grantable(sender, invitation.role)
    except PermissionDenied as error:
        raise InvitationClosed(
            gettext("The person who invited you can no longer give this role. Ask for a new invitation.")
        ) from error


@transaction.atomic
def revoke_invitation(
    *,
    organization: Organization,
    invitation_id: str,
    by: User,
    now: datetime.datetime,
    identity: KeyIdentity | None = None,
) -> None:
    """Withdraw an open invitation. `identity` is the calling key, if there is one.

    Raises NotFound, InvitationClosed, and PermissionDenied for a role above that of `by`, or of the key.
    """
    acting = lock_members(organization, by)
    invitation = get_invitation(organization=organization, id=invitation_id)
    require_grantable(acting, invitation.role, identity=identity)
    open_now = Invitation.objects.filter(pk=invitation.pk).still_open()
    if not open_now.update(revoked_at=now):
        raise InvitationClosed(gettext("This invitation was already used or withdrawn."))
    audit.record(organization=organization, by=by.pk, action="member.uninvite", target=invitation.pk)
