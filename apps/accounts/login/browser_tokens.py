"""Expired tokens of members' browsers. Each visit to the playground creates one."""

import datetime

from apps.accounts.models import ApiKey, KeyKind

# Much longer than the gateway caches keys, so that a late request still gets the answer that its token expired.
TOKEN_RETENTION = datetime.timedelta(days=1)


def sweep_expired_tokens(*, now: datetime.datetime) -> int:
    """Delete members' tokens that expired over a day ago; return how many. Usage keeps their ids; API keys stay."""
    expired = ApiKey.objects.filter(kind=KeyKind.MEMBER, expires_at__lt=now - TOKEN_RETENTION)
    deleted: int = expired.delete()[0]
    return deleted
