"""Batches with a file of requests."""

import json
from collections.abc import Sequence

from apps.accounts.models import Organization, User
from apps.batches.files import create_file
from apps.batches.models import Batch
from apps.batches.operations import create_batch
from apps.core.database.clock import db_now

CHAT = "/v1/chat/completions"


def make_line(custom_id: str, **changes: object) -> dict[str, object]:
    return {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": {"model": "triage"}} | changes


def make_batch(organization: Organization, by: User, lines: Sequence[object], *, name: str = "asks.jsonl") -> Batch:
    """A batch that is not validated yet."""
    content = "\n".join(json.dumps(line) for line in lines).encode()
    file = create_file(organization=organization, filename=name, chunks=[content], by=by.pk, now=db_now())
    return create_batch(organization=organization, input_file_id=file.pk, endpoint=CHAT, by=by.pk, now=db_now())
