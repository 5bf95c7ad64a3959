"""Tokens of members' browsers that expired: one is made for each visit to the playground."""

import datetime

from apps.accounts.models import ApiKey, KeyKind

# Long after the gateway's cache of keys: a late request is still told that its token expired.
TOKEN_RETENTION = datetime.timedelta(days=1)


def sweep_expired_tokens(*, now: datetime.datetime) -> int:
    """Delete members' tokens that expired a day ago; return how many. Usage keeps their ids; API keys stay."""
    expired = ApiKey.objects.filter(kind=KeyKind.MEMBER, expires_at__lt=now - TOKEN_RETENTION)
    deleted: int = expired.delete()[0]
    return deleted
