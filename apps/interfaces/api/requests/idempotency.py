"""The header Idempotency-Key of a POST, and the digest that tells a repeat from another request."""

import hashlib
import re

import msgspec
from django.core.files.uploadedfile import UploadedFile
from django.http import QueryDict
from rest_framework.request import Request

from apps.core.database.idempotency import HEADER, MAX_ANSWER_BYTES
from apps.core.errors import InvalidValue

_KEY = re.compile(r"[!-~]{1,255}")
_CHUNK_BYTES = 1024 * 1024
_RETRIES = "X-Stainless-Retry-Count"
HEADERS = {
    HEADER: (
        "Makes a repeat safe: for 24 hours, the same request with the same value gets the first answer again, with the "
        "header `Idempotent-Replayed: true`, and changes nothing. Send 1 to 255 visible ASCII characters, such as a "
        "new UUID for each new request. Another request with the value gets 422 (`idempotency_key_reused`), and one "
        "sent while the first is in progress 409 (`idempotency_in_progress`). Errors are not kept, "
        f"because they change nothing. An answer may have up to {MAX_ANSWER_BYTES // 1024} KiB."
    )
}


def read_idempotency_key(request: Request) -> str | None:
    """Return the header of a POST; None without one. Raises InvalidValue."""
    key: str | None = request.headers.get(HEADER) if request.method == "POST" else None
    if key is not None and not _KEY.fullmatch(key):
        raise InvalidValue(f"{HEADER} has 1 to 255 visible ASCII characters, without spaces. Use a UUID.", param=HEADER)
    return key


def is_client_retry(request: Request) -> bool:
    """Return whether OpenAI's SDK repeats a request by itself, as it does after a timeout. It sends no header above.

    It must not create a second job, batch, run or webhook.
    """
    return read_idempotency_key(request) is None and request.headers.get(_RETRIES, "0") not in ("", "0")


def request_digest(request: Request) -> str:
    """Return the SHA-256 of method, address and the parsed body: a form has another boundary in each repeat.

    Files are read from disk in chunks.
    """
    digest = hashlib.sha256(f"{request.method} {request.get_full_path()}\n".encode())
    data = request.data
    if not isinstance(data, QueryDict):
        digest.update(msgspec.json.encode(data, order="sorted"))
        return digest.hexdigest()
    for name, values in sorted(data.lists()):
        for value in values:
            if isinstance(value, UploadedFile):
                digest.update(repr((name, value.name, value.size)).encode())
                for chunk in value.chunks(_CHUNK_BYTES):
                    digest.update(chunk)
            else:
                digest.update(repr((name, value)).encode())
    return digest.hexdigest()
