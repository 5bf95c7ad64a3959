"""Operations on keys: create, change and revoke them, each audited in its own transaction."""

import datetime
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from django.db import transaction
from django.db.models import Q
from django.utils.translation import gettext

from apps.accounts.login import api_keys, browser_tokens
from apps.accounts.members.memberships import (
    MANAGING,
    lock_members,
    lock_memberships_of,
    require_not_revoked,
    revoke_keys,
)
from apps.accounts.members.projects import project_of_new_key
from apps.accounts.members.service_accounts import lock_service_account
from apps.accounts.models import ApiKey, Invitation, KeyKind, Membership, Organization, User, default_project_id
from apps.accounts.operations import clean_name
from apps.accounts.queries import (
    NO_LIMITS,
    KeyIdentity,
    KeyLimits,
    get_key,
    get_key_limits,
    with_made,
)
from apps.accounts.roles import SCOPES, Permission, has_permission
from apps.core import audit
from apps.core.errors import InvalidState, InvalidValue, PermissionDenied, RateLimited

MEMBER_TOKEN_LIFETIME = datetime.timedelta(minutes=10)
MAX_KEYS = 1_000  # active ones of an organization
MAX_MEMBER_TOKENS = 200  # valid at once, of the playground or of one job's judge
USE_NOTED_EVERY = datetime.timedelta(minutes=1)


@dataclass(frozen=True)
class IssuedKey:
    """A new key with its secret, which is stored nowhere else."""

    key: ApiKey
    secret: str


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
    identity: KeyIdentity | None = None,
    service_account_id: str = "",
    project_id: str = "",
) -> IssuedKey:
    """Create an API key that may do at most what its creator may, and what `identity`, the calling key, may.

    The creator is `by`, or the service account with that id if `by` and `identity` may manage it. A service account's
    key stays when `by` leaves. It names the person who knows it, even if a service account's key creates it. Project
    and limits default to those of the calling key, or else to the default project and no limits. Raises InvalidValue,
    PermissionDenied, NotFound, and InvalidState above MAX_KEYS and for an archived project.
    """
    if service_account_id:
        creator = lock_service_account(organization=organization, id=service_account_id, by=by, identity=identity)
    else:
        creator = lock_members(organization, by)
    if identity:
        require_not_revoked(identity)
    issued_by = _issuer(by, identity) if service_account_id or by.service_account_of_id else None
    _require_scopes(creator, frozenset(scopes))
    project = project_of_new_key(
        organization=organization, id=project_id, membership=creator, own=identity.project_id if identity else "",
        scopes=identity.scopes if identity else None,
    )  # fmt: skip
    if identity:
        limits = _within(identity, scopes, expires_at, limits)
    if expires_at is not None and expires_at <= now:
        raise InvalidValue(gettext("This key would expire immediately. Choose a later date."), param="expires_at")
    active = ApiKey.objects.for_organization(organization).usable(now=now).filter(kind=KeyKind.SECRET)
    if active.count() >= MAX_KEYS:
        raise InvalidState(
            gettext("An organization has at most %(max_keys)s active keys. Revoke one that is not needed.")
            % {"max_keys": f"{MAX_KEYS:,}"}
        )
    issued = _issue(
        api_keys.new_secret(api_keys.LIVE_PREFIX), organization=organization, kind=KeyKind.SECRET,
        name=clean_name(name), scopes=sorted(scopes), created_by_id=creator.user_id, created_at=now,
        project=project, expires_at=expires_at, issued_by=issued_by,
        made_with=identity.key_id if identity else "", **asdict(limits),
    )  # fmt: skip
    audit.record(
        organization=organization, by=by.pk, action="key.create", target=issued.key.pk,
        name=issued.key.name, scopes=issued.key.scopes, project=project.pk,
        service_account=creator.user_id if service_account_id else None,
    )  # fmt: skip
    return issued


def _within(
    identity: KeyIdentity, scopes: frozenset[str], expires_at: datetime.datetime | None, limits: KeyLimits
) -> KeyLimits:
    """Return the limits of a new key. Raise PermissionDenied if it would do more or live longer than the caller."""
    if missing := sorted(scopes - identity.scopes):
        text = gettext("This API key lacks %(missing)s, so it cannot give them to another key. Leave them out.") % {
            "missing": ", ".join(missing)
        }
        raise PermissionDenied(text, param="scopes")
    if identity.expires_at is not None and (expires_at is None or expires_at > identity.expires_at):
        text = gettext("A key must not outlive the key that creates it: send at most %(timestamp)s.") % {
            "timestamp": int(identity.expires_at.timestamp())
        }
        raise PermissionDenied(text, param="expires_at")
    return _limits_within(identity, limits)


def _limits_within(identity: KeyIdentity, limits: KeyLimits) -> KeyLimits:
    """Return the limits with those of the calling key where they have none. Raise PermissionDenied if one is higher."""
    asked = asdict(limits)
    for name, most in asdict(get_key_limits(key_id=identity.key_id)).items():
        if most is not None and (asked[name] or most) > most:
            raise PermissionDenied(
                gettext("This API key is limited to %(most)s here, so it cannot give another key more.")
                % {"most": most},
                param=name,
            )
        asked[name] = asked[name] or most
    return KeyLimits(**asked)


@transaction.atomic
def issue_browser_token(*, membership: Membership, now: datetime.datetime, project_id: str) -> IssuedKey:
    """Create a key for the member's browser, as `issue_member_token` does.

    Raises PermissionDenied as well if their membership or password was changed since their request began.
    """
    known = membership.user.password
    rows = Membership.objects.for_organization(membership.organization_id)
    locked = rows.select_for_update().filter(pk=membership.pk).first()
    # In a new statement: after its wait for the lock, the one above would still see the user as before the wait.
    current = User.objects.filter(pk=membership.user_id).values_list("password", flat=True).first()
    if locked is None or current != known:
        raise PermissionDenied(gettext("Sign in again."))
    return issue_member_token(membership=locked, now=now, project_id=project_id)


@transaction.atomic
def issue_member_token(
    *,
    membership: Membership,
    now: datetime.datetime,
    name: str = browser_tokens.NAME,
    lifetime: datetime.timedelta = MEMBER_TOKEN_LIFETIME,
    project_id: str = "",
    limits: KeyLimits = NO_LIMITS,
    spend_limit_nano: int | None = None,
    most: int | None = None,
    made_with: ApiKey | None = None,
) -> IssuedKey:
    """Create a key that acts for a member. It is valid for minutes and only for inference.

    It may spend at most `spend_limit_nano`.
    `made_with` is the key whose work the new key does. It shares that key's budget and is revoked with it. Raises
    PermissionDenied, and RateLimited above `most` (MAX_MEMBER_TOKENS) of this name that are valid at once.

    These keys have no audit entries, because they grant nothing beyond the session and their use is metered.
    """
    scopes = frozenset({Permission.INFERENCE.value})
    _require_role(membership, scopes)
    tokens = ApiKey.objects.for_organization(membership.organization_id).usable(now=now)
    valid = tokens.filter(kind=KeyKind.MEMBER, created_by=membership.user_id, name=name)
    if valid.count() >= (most or MAX_MEMBER_TOKENS):
        text = gettext("Too many short-lived keys were made in the last minutes. Wait a few minutes.")
        raise RateLimited(text, retry_after_seconds=60)
    return _issue(
        api_keys.new_secret(api_keys.WEB_PREFIX), organization_id=membership.organization_id, kind=KeyKind.MEMBER,
        name=name, scopes=sorted(scopes), created_by_id=membership.user_id, created_at=now, expires_at=now + lifetime,
        project_id=project_id or default_project_id(membership.organization_id),
        made_with=made_with.pk if made_with else "",
        first_key=made_with.first_key or made_with.pk if made_with else "",
        spend_limit_nano=spend_limit_nano, **asdict(limits),
    )  # fmt: skip


def _issue(secret: str, **fields: object) -> IssuedKey:
    key = ApiKey.objects.create(hmac=api_keys.fingerprint(secret), prefix=api_keys.shown_prefix(secret), **fields)
    return IssuedKey(key=key, secret=secret)


def _issuer(by: User, identity: KeyIdentity | None) -> User | None:
    """Return the person who learns a new key of a service account: the caller, or who knows the calling key."""
    if by.service_account_of_id is None:
        return by
    return ApiKey.objects.select_related("issued_by").get(pk=identity.key_id if identity else "").issued_by


def _require_scopes(creator: Membership, scopes: frozenset[str]) -> None:
    if not scopes or not scopes <= frozenset(SCOPES):
        raise InvalidValue(
            gettext("Choose at least one scope of %(scopes)s.") % {"scopes": ", ".join(SCOPES)}, param="scopes"
        )
    _require_role(creator, scopes)


def _require_role(membership: Membership, scopes: frozenset[str]) -> None:
    missing = sorted(scope for scope in scopes if not has_permission(membership.role, Permission(scope)))
    if missing:
        raise PermissionDenied(
            gettext("The role %(role)s lacks %(missing)s, and a key may do no more than its creator.")
            % {"role": membership.role, "missing": ", ".join(missing)},
            param="scopes",
        )


@transaction.atomic
def revoke_key(
    *, organization: Organization, key_id: str, by: User, now: datetime.datetime, identity: KeyIdentity | None = None
) -> ApiKey:
    """Revoke a key, the keys that were made or rotated with it, and the open invitations that these keys sent.

    Revoking it again changes nothing.

    Members may revoke their own keys, and admins all keys. `identity`, the calling key, needs the scopes for this. It
    stays unless it is the key to revoke, so a program can revoke the key that its own key replaced. Raises NotFound,
    PermissionDenied.
    """
    key = get_key(organization=organization, id=key_id)
    membership = lock_members(organization, by)  # so that it finds the keys that this key is making
    _require_own_or_managed(key, membership, identity)
    rows = ApiKey.objects.for_organization(organization).filter(pk=key.pk)
    # The key that asks stays, and what was made with it.
    if revoked := revoke_keys(with_made(rows, but=identity.key_id if identity else ""), now=now, by=by):
        audit.record(organization=organization, by=by.pk, action="key.revoke", target=key.pk, keys_revoked=revoked)
    key.refresh_from_db()
    return key


def lock_active(key: ApiKey, now: datetime.datetime) -> None:
    """Lock the key and read it again. Raises InvalidState unless it is active."""
    key.refresh_from_db(from_queryset=ApiKey.objects.for_organization(key.organization_id).select_for_update())
    if (status := key.status(now=now)) != "active":
        text = gettext("The key is %(status)s. Create another one.") % {"status": status}
        raise InvalidState(text, code="key_not_active")


@transaction.atomic
def change_key(
    *,
    organization: Organization,
    key_id: str,
    name: str | None,
    limits: Mapping[str, int | None],
    by: User,
    now: datetime.datetime,
    identity: KeyIdentity,
) -> ApiKey:
    """Give a key these limits, by the names in KeyLimits, and another name unless it is None.

    Members may change their own keys, and admins all keys. `identity`, the calling key, needs the scopes for this, and
    gives no limit above its own. Raises NotFound, PermissionDenied, InvalidState, InvalidValue.
    """
    key = get_key(organization=organization, id=key_id)
    membership = lock_members(organization, by)
    require_not_revoked(identity)
    _require_own_or_managed(key, membership, identity)
    lock_active(key, now)
    within = asdict(_limits_within(identity, KeyLimits(**limits)))
    values = {field: within[field] for field in limits} | ({} if name is None else {"name": clean_name(name)})
    changed = {field: value for field, value in values.items() if getattr(key, field) != value}
    if changed:
        ApiKey.objects.filter(pk=key.pk).update(**changed)
        audit.record(organization=organization, by=by.pk, action="key.change", target=key.pk, **changed)
        key.refresh_from_db()
    return key


def _require_own_or_managed(key: ApiKey, membership: Membership, identity: KeyIdentity | None) -> None:
    """Raise PermissionDenied unless the member, and the calling key, may revoke or change the key."""
    is_own = key.created_by_id == membership.user_id
    if not is_own and not has_permission(membership.role, Permission.MEMBER_MANAGE):
        raise PermissionDenied(gettext("Only an owner or admin may revoke or change another member's key."))
    if identity and key.pk != identity.key_id:
        needed = set(key.scopes) if is_own else {Permission.MEMBER_MANAGE.value}
        if missing := sorted(needed - identity.scopes):
            raise PermissionDenied(
                gettext("This API key lacks %(missing)s, so it may not revoke or change that key.")
                % {"missing": ", ".join(missing)}
            )


@transaction.atomic
def revoke_keys_of(*, user: User, now: datetime.datetime) -> int:
    """Revoke every key that a person created, in all organizations; return the number of API keys.

    Run it under `system()`. Keys of service accounts that the person knows and that manage people, keys or the
    organization are revoked too, as at the end of a membership, and the person's open invitations are closed. An
    intruder who had the password could return with one of these.
    """
    lock_memberships_of(user=user)  # finds keys and invitations that are being made
    known = ApiKey.objects.filter(issued_by=user, revoked_at=None, scopes__overlap=sorted(MANAGING))
    managing = [key.pk for key in with_made(known)]
    alive = ApiKey.objects.filter(Q(created_by=user) | Q(pk__in=managing), revoked_at=None)
    shown = alive.filter(kind=KeyKind.SECRET).count()
    invited = Invitation.objects.still_open().filter(invited_by=user)
    for organization_id in {each.organization_id for rows in (alive, invited) for each in rows.only("organization_id")}:
        closed = invited.for_organization(organization_id).update(revoked_at=now)
        revoked = revoke_keys(alive.for_organization(organization_id), now=now, by=user)
        audit.record(
            organization=organization_id, by=user.pk, action="key.revoke_all", target=user.pk, keys_revoked=revoked,
            invitations_revoked=closed,
        )  # fmt: skip
    return shown


def note_key_use(*, identity: KeyIdentity, now: datetime.datetime) -> None:
    """Store when a key was last used, to the minute. A write for each request would cost more than it is worth."""
    if identity.last_used_at is not None and now - identity.last_used_at < USE_NOTED_EVERY:
        return
    stale = Q(last_used_at=None) | Q(last_used_at__lte=now - USE_NOTED_EVERY)
    ApiKey.objects.filter(stale, pk=identity.key_id).update(last_used_at=now)
