"""The rotation of keys: a new key takes the place of an old one, and both work until an overlap ends."""

import datetime

from django.db import transaction
from django.utils.translation import gettext

from apps.accounts.login.key_operations import IssuedKey, issue_key, lock_active
from apps.accounts.members.memberships import lock_members
from apps.accounts.models import ApiKey, KeyKind, Organization, User
from apps.accounts.queries import KeyIdentity, KeyLimits, find_service_account, get_key, get_key_limits
from apps.core import audit
from apps.core.errors import InvalidState, InvalidValue, PermissionDenied

MAX_OVERLAP = datetime.timedelta(days=30)  # of a rotated key and the new one


@transaction.atomic
def rotate_key(
    *,
    organization: Organization,
    key_id: str,
    overlap: datetime.timedelta,
    by: User,
    now: datetime.datetime,
    identity: KeyIdentity | None = None,
) -> IssuedKey:
    """Create a key like this one. This one ends after the overlap; both work until then.

    The new key has the same project, name, scopes, limits and expiry. A key is rotated once, because its expiry is then
    the end of the overlap. Only the key's creator may rotate it, because the new key acts in their name. If the creator
    is a service account, those who manage it may do so too. `identity`, the calling key, may rotate only keys with no
    more rights than its own, and itself only with an overlap: it may have to ask again for a lost answer. Raises
    NotFound, PermissionDenied, InvalidState, InvalidValue.
    """
    key = get_key(organization=organization, id=key_id)
    account = None
    if key.created_by_id != by.pk:
        account = find_service_account(organization=organization, user_id=key.created_by_id)
    if key.created_by_id != by.pk and account is None:
        raise PermissionDenied(
            gettext("Only the creator of a key may rotate it. Create your own key, or revoke this one.")
        )
    lock_members(organization, by)  # before the key, as a removal does
    lock_active(key, now)
    if not datetime.timedelta(0) <= overlap <= MAX_OVERLAP:
        text = gettext("The overlap must be from 0 to %(hours)s hours.") % {"hours": MAX_OVERLAP.days * 24}
        raise InvalidValue(text, param="overlap_hours")
    if not overlap and identity and identity.key_id == key.pk:
        text = gettext(
            "This is the key that you call with, so it must stay valid until you have the new one. Send an overlap of "
            "at least 1 hour, and then revoke this key with the new one."
        )
        raise InvalidValue(text, param="overlap_hours")
    _require_latest(key, now)
    limits = KeyLimits(key.requests_per_minute, key.tokens_per_minute, key.concurrent_requests)
    issued = issue_key(
        organization=organization, name=key.name, scopes=frozenset(key.scopes), by=by, expires_at=key.expires_at,
        limits=limits, now=now, identity=identity, service_account_id=account.pk if account else "",
        project_id=key.project_id,
    )  # fmt: skip
    if limits != get_key_limits(key_id=issued.key.pk):
        raise PermissionDenied(gettext("This API key has lower limits than that one, so it may not rotate it."))
    issued.key.first_key = key.first_key or key.pk
    issued.key.save(update_fields=["first_key"])
    ends_at = min(now + overlap, key.expires_at or now + overlap)
    ApiKey.objects.filter(pk=key.pk).update(expires_at=ends_at)
    audit.record(
        organization=organization, by=by.pk, action="key.rotate", target=key.pk,
        new_key=issued.key.pk, ends_at=ends_at.isoformat(),
    )  # fmt: skip
    return issued


def _require_latest(key: ApiKey, now: datetime.datetime) -> None:
    """Raise InvalidState if another key replaced this one. Only the newest of the line may be rotated."""
    line = ApiKey.objects.for_organization(key.organization_id).filter(
        first_key=key.first_key or key.pk, kind=KeyKind.SECRET, created_at__gt=key.created_at
    )
    newest = line.order_by("created_at").last()
    if newest is None:
        return
    text = gettext("This key was replaced already. Create another one.")
    if newest.status(now=now) == "active":
        text = gettext("The key %(key)s replaced this one. Rotate that key, or create another one.")
    raise InvalidState(text % {"key": newest.pk}, code="key_already_rotated")
