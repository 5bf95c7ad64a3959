"""Tokens of members' browsers. Each visit to the playground creates one; they end with the sessions of their member."""

import datetime

from apps.accounts.models import ApiKey, KeyKind, User
from apps.core.database.tenancy import system

NAME = "Playground"

# Longer than a month, because a budget counts what they spent in the month before it was set. Much longer than the
# gateway caches keys, so that a late request still gets the answer that its token expired.
TOKEN_RETENTION = datetime.timedelta(days=32)


def sweep_expired_tokens(*, now: datetime.datetime) -> int:
    """Delete members' tokens that expired over a month ago; return how many. Usage records keep their ids.

    API keys stay.
    """
    expired = ApiKey.objects.filter(kind=KeyKind.MEMBER, expires_at__lt=now - TOKEN_RETENTION)
    deleted: int = expired.delete()[0]
    return deleted


def revoke_browser_tokens(*, user: User, now: datetime.datetime) -> None:
    """Revoke the tokens of a person's browsers, in all organizations. A browser that is signed in gets a new one."""
    with system():
        tokens = ApiKey.objects.filter(created_by=user, kind=KeyKind.MEMBER, name=NAME, revoked_at=None)
        tokens.filter(expires_at__gt=now).update(revoked_at=now, revoked_by=user)
