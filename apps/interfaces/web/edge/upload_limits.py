"""Who may send a large file: asked before its body is read, because Django writes all of it to the disk first.

A body above the default limit, declared or counted, is taken only from a key or a session that the database knows. What
either may do with it is decided by the view.
"""

from apps.core.errors import DomainError, Status
from apps.core.http.asgi import DEFAULT_BODY_BYTES, MIB, Allowance, BodyLimit, Scope
from apps.interfaces.web.edge import callers

# A multipart envelope around the largest file the API takes, 512 MB (OpenAI's own limit).
UPLOAD_BYTES = 513 * MIB
PART_BYTES = 65 * MIB  # the same around a part of an upload


class NotSignedIn(DomainError):
    """A large body came from nobody we know."""

    code = "invalid_api_key"
    status = Status.UNAUTHENTICATED


async def authorize_upload(scope: Scope) -> Allowance:
    """Return the whole limit for a caller we know, else the default one."""
    return await _judge(scope, UPLOAD_BYTES)


async def judge_part(scope: Scope) -> Allowance:
    """Return the limit of a part for a caller we know, else the default one."""
    return await _judge(scope, PART_BYTES)


async def _judge(scope: Scope, limit_bytes: int) -> Allowance:
    if await callers.find(callers.credential_of(scope)):
        return Allowance(limit_bytes)
    message = f"A body above {DEFAULT_BODY_BYTES // MIB} MiB needs a valid API key, or a session that is signed in."
    return Allowance(DEFAULT_BODY_BYTES, NotSignedIn(message))


UPLOAD_LIMITS = (
    BodyLimit("POST", "/v1/files", UPLOAD_BYTES, authorize_upload),
    BodyLimit("POST", "/v1/uploads/", PART_BYTES, judge_part),
    BodyLimit("POST", "/datasets", UPLOAD_BYTES, authorize_upload),
)
