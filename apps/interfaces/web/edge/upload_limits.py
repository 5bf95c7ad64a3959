"""The limits of large bodies. They are checked before the body is read, because Django writes all of it to disk first.

A body above the default limit, declared or counted, is accepted only from a key or session that the database knows. The
view decides what that caller may do.
"""

from apps.core.errors import DomainError, Status
from apps.core.http.asgi import DEFAULT_BODY_BYTES, MIB, Scope
from apps.core.http.body_limits import BodyAllowance, BodyLimit
from apps.interfaces.web.edge import callers

# A multipart envelope around the largest file the API accepts, 512 MB (OpenAI's own limit).
UPLOAD_BYTES = 513 * MIB
PART_BYTES = 65 * MIB  # the same around one part of an upload


class NotSignedIn(DomainError):
    """A large body came from an unknown caller."""

    code = "invalid_api_key"
    status = Status.UNAUTHENTICATED


async def authorize_upload(scope: Scope) -> BodyAllowance:
    """Return the limit of a whole file for a known caller, or the default limit for others."""
    return await _judge(scope, UPLOAD_BYTES)


async def judge_part(scope: Scope) -> BodyAllowance:
    """Return the limit of a part for a known caller, or the default limit for others."""
    return await _judge(scope, PART_BYTES)


async def _judge(scope: Scope, limit_bytes: int) -> BodyAllowance:
    if await callers.find(callers.credential_of(scope)):
        return BodyAllowance(limit_bytes)
    message = f"A body above {DEFAULT_BODY_BYTES // MIB} MiB needs a valid API key, or a session that is signed in."
    return BodyAllowance(DEFAULT_BODY_BYTES, NotSignedIn(message))


UPLOAD_LIMITS = (
    BodyLimit("POST", "/v1/files", UPLOAD_BYTES, authorize_upload),
    BodyLimit("POST", "/v1/uploads/", PART_BYTES, judge_part),
    BodyLimit("POST", "/datasets", UPLOAD_BYTES, authorize_upload),
    BodyLimit("POST", "/adapters/upload", UPLOAD_BYTES, authorize_upload),
    BodyLimit("POST", "/api/v1/adapters", UPLOAD_BYTES, authorize_upload),
)
