"""The caller of a request, found before its body is read: its key or session, their owner, and its address.

The result is cached for a minute. It decides how much a request may use and when it runs, but never what the caller may
do. The view asks the database for that.
"""

import hashlib
import time
from collections import OrderedDict
from typing import NamedTuple

from asgiref.sync import sync_to_async
from django.conf import settings
from django.db import InterfaceError, InternalError, OperationalError, close_old_connections
from django.http import parse_cookie
from django.utils.translation import gettext

from apps.accounts.login.api_keys import is_well_formed
from apps.accounts.login.sessions import find_session
from apps.accounts.queries import find_key, list_memberships_of
from apps.accounts.shares import get_share_holder
from apps.core.database.tenancy import tenant
from apps.core.errors import Unavailable
from apps.core.http.asgi import Scope
from apps.core.http.origin import network_of
from apps.interfaces.web.shell.access import SESSION_ORGANIZATION

_KEPT_SECONDS, _MAX_KEPT = 60.0, 10_000


class CallerIds(NamedTuple):
    """Ids, each prefixed with its kind, so that one table can hold the limits of all kinds."""

    credential: str  # the key or the session
    person: str
    organization: str | None  # the share holder; None for a person without an organization


_known: "OrderedDict[bytes, tuple[float, CallerIds]]" = OrderedDict()


def address_of(scope: Scope) -> str:
    """Return the network that limits count as one: an IPv4 address, or the /64 of one IPv6 customer."""
    host = (scope.get("client") or ("unknown",))[0]
    try:
        return f"address {network_of(host)}"
    except ValueError:
        return f"address {host}"


def credential_of(scope: Scope) -> tuple[str, str]:
    """Return the secret of a bearer key, or else a session key. Either may be empty or wrong."""
    headers = dict(scope["headers"])
    scheme, _, secret = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
    secret = secret.strip()
    if scheme.lower() == "bearer" and is_well_formed(secret):
        return secret, ""
    cookies = parse_cookie(headers.get(b"cookie", b"").decode("latin-1"))
    return "", cookies.get(settings.SESSION_COOKIE_NAME, "")


def recall(credential: tuple[str, str]) -> CallerIds | None:
    """Return the caller if it was found within the last minute."""
    until, caller = _known.get(_digest(credential), (0.0, None))
    return caller if time.monotonic() < until else None


async def find(credential: tuple[str, str]) -> CallerIds | None:
    """Return the caller, from the database if it is not cached; return None for a wrong key or session.

    Raises Unavailable if the database does not answer.
    """
    if caller := recall(credential):
        return caller
    if not any(credential):
        return None
    try:
        caller = await sync_to_async(_look_up, thread_sensitive=False)(*credential)
    except (OperationalError, InterfaceError, InternalError) as error:
        message = gettext("The database did not answer. Try again in a few seconds.")
        raise Unavailable(message, retry_after_seconds=5) from error
    if caller is not None:
        digest = _digest(credential)
        _known[digest] = (time.monotonic() + _KEPT_SECONDS, caller)
        _known.move_to_end(digest)
        while len(_known) > _MAX_KEPT:
            _known.popitem(last=False)
    return caller


def _digest(credential: tuple[str, str]) -> bytes:
    return hashlib.sha256("\0".join(credential).encode()).digest()


def _look_up(secret: str, session_key: str) -> CallerIds | None:
    """Find the caller in the database. Runs in a thread with a separate connection."""
    try:
        return _of_key(secret) if secret else _of_session(session_key)
    finally:
        close_old_connections()


def _of_key(secret: str) -> CallerIds | None:
    found = find_key(secret=secret)
    if found is None:
        return None
    with tenant(organization=found.organization_id):
        holder = get_share_holder(organization=found.organization_id)
    return CallerIds(f"key {found.key_id}", f"person {found.created_by_id}", f"organization {holder}")


def _of_session(session_key: str) -> CallerIds | None:
    found = find_session(session_key)
    if found is None:
        return None
    session, user = found
    with tenant(user=user):
        holders = {each.organization_id: each.organization.share_holder for each in list_memberships_of(user=user)}
    wanted = session.get(SESSION_ORGANIZATION, "")
    chosen = holders.get(wanted) or next(iter(holders.values()), None)
    digest = hashlib.sha256(session_key.encode()).hexdigest()
    return CallerIds(f"session {digest}", f"person {user.pk}", f"organization {chosen}" if chosen else None)
