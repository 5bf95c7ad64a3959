"""The header by which the worker of batches names a request to the gateway.

The id becomes the id of the request's usage record, so a request that is sent again after a crash is charged once. The
header is signed for one key, because a customer could otherwise choose ids and get answers without a charge.
"""

import hashlib
import hmac
import re

from django.conf import settings

HEADER = "x-anneal-batch-request"
_VALUE = re.compile(r"([0-9a-z]{26})\.([0-9a-f]{64})")


def sign(ulid: str, *, authorization: str) -> str:
    """Return the header's value for the request with this ULID."""
    text = f"batch request {ulid} {authorization}"
    return f"{ulid}.{hmac.new(settings.SIGNING_KEY.encode(), text.encode(), hashlib.sha256).hexdigest()}"


def read(value: str, *, authorization: str) -> str | None:
    """Return the ULID in the header's value; None if it was not signed for this key."""
    found = _VALUE.fullmatch(value)
    if found is None or not hmac.compare_digest(value, sign(found[1], authorization=authorization)):
        return None
    return found[1]
