"""Who may send a large file: asked before its body is read, because Django writes all of it to the disk first.

A body above the default limit, declared or counted, is taken only from a key or a session that the database knows. What
either may do with it is decided by the view.
"""

from importlib import import_module
from types import SimpleNamespace
from typing import cast

from asgiref.sync import sync_to_async
from django.conf import settings
from django.contrib.auth import get_user
from django.db import close_old_connections
from django.http import HttpRequest, parse_cookie

from apps.accounts.keys import is_well_formed
from apps.accounts.queries import find_key
from apps.core.errors import DomainError, Status
from apps.core.http import DEFAULT_BODY_BYTES, MIB, Allowance, BodyLimit, Scope

# A multipart envelope around the largest file the API takes, 512 MB (OpenAI's own limit).
UPLOAD_BYTES = 513 * MIB
PART_BYTES = 65 * MIB  # the same around a part of an upload


class NotSignedIn(DomainError):
    """A large body came from nobody we know."""

    code = "invalid_api_key"
    status = Status.UNAUTHENTICATED


async def judge_upload(scope: Scope) -> Allowance:
    """Return the whole limit for a caller we know, else the default one."""
    return await _judge(scope, UPLOAD_BYTES)


async def judge_part(scope: Scope) -> Allowance:
    """Return the limit of a part for a caller we know, else the default one."""
    return await _judge(scope, PART_BYTES)


async def _judge(scope: Scope, limit_bytes: int) -> Allowance:
    headers = dict(scope["headers"])
    secret = _bearer_secret(headers.get(b"authorization", b"").decode("latin-1"))
    session_key = parse_cookie(headers.get(b"cookie", b"").decode("latin-1")).get(settings.SESSION_COOKIE_NAME, "")
    if (secret or session_key) and await sync_to_async(_is_known, thread_sensitive=False)(secret, session_key):
        return Allowance(limit_bytes)
    message = f"A body above {DEFAULT_BODY_BYTES // MIB} MiB needs a valid API key, or a session that is signed in."
    return Allowance(DEFAULT_BODY_BYTES, NotSignedIn(message))


UPLOAD_LIMITS = (
    BodyLimit("POST", "/v1/files", UPLOAD_BYTES, judge_upload),
    BodyLimit("POST", "/v1/uploads/", PART_BYTES, judge_part),
    BodyLimit("POST", "/datasets", UPLOAD_BYTES, judge_upload),
)


def _bearer_secret(authorization: str) -> str:
    scheme, _, secret = authorization.partition(" ")
    return secret.strip() if scheme.lower() == "bearer" and is_well_formed(secret.strip()) else ""


def _is_known(secret: str, session_key: str) -> bool:
    """Tell whether the key or the session belongs to somebody; runs in a thread with a connection of its own."""
    try:
        return bool(secret and find_key(secret=secret)) or bool(session_key and _is_signed_in(session_key))
    finally:
        close_old_connections()


def _is_signed_in(session_key: str) -> bool:
    session = import_module(settings.SESSION_ENGINE).SessionStore(session_key)
    # Of the request get_user looks at the session only.
    return get_user(cast(HttpRequest, SimpleNamespace(session=session))).is_authenticated
