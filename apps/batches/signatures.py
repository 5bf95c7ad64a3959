"""The header with which the worker of batches identifies a request to the gateway.

The id becomes the id of the charged usage record, so a request that is sent again after a crash is charged once. A
batch that a key created counts under that key's limits and budgets. The header is signed for one bearer key. Otherwise
a customer could choose ids and get answers without a charge.
"""

import hashlib
import hmac
import re

from django.conf import settings

HEADER = "x-anneal-batch-request"
ANSWER_SECONDS = 900.0  # longer than the gateway waits for a place, a model and the first token; then it is over
BUSY_CODE = "batch_capacity_busy"  # the code of a refusal before an engine saw the request: it may be sent again later
_VALUE = re.compile(r"([0-9a-z]{26})\.((?:key_[0-9a-z]{26})?)\.([0-9a-f]{64})")


def sign(ulid: str, *, authorization: str, key_id: str = "") -> str:
    """Return the header's value for the request with this ULID, of a batch that the key created, if one did."""
    text = f"batch request {ulid}.{key_id} {authorization}"
    return f"{ulid}.{key_id}.{hmac.new(settings.SIGNING_KEY.encode(), text.encode(), hashlib.sha256).hexdigest()}"


def read(value: str, *, authorization: str) -> tuple[str, str] | None:
    """Return the ULID and the key's id in the header's value; None if it was not signed for this bearer key."""
    found = _VALUE.fullmatch(value)
    if found is None:
        return None
    ulid, key_id, _ = found.groups()
    expected = sign(ulid, authorization=authorization, key_id=key_id)
    return (ulid, key_id) if hmac.compare_digest(value, expected) else None
