"""Batches with a file of requests."""

import json
from collections.abc import Sequence

from apps.accounts.models import Organization, User
from apps.batches.files import create_file
from apps.batches.models import Batch, BatchFile
from apps.batches.operations import create_batch
from apps.core.database.clock import db_now

CHAT = "/v1/chat/completions"


def make_line(custom_id: str, **changes: object) -> dict[str, object]:
    return {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": {"model": "triage"}} | changes


def make_batch_file(
    organization: Organization,
    *,
    by: str,
    lines: Sequence[object] = (make_line("a"), make_line("b")),
    name: str = "asks.jsonl",
) -> BatchFile:
    """The requests of a batch that does not exist yet."""
    content = "\n".join(json.dumps(line) for line in lines).encode()
    return create_file(organization=organization, filename=name, chunks=[content], by=by, now=db_now())


def make_batch(organization: Organization, by: User, lines: Sequence[object], *, name: str = "asks.jsonl") -> Batch:
    """A batch that is not validated yet."""
    file = make_batch_file(organization, by=by.pk, lines=lines, name=name)
    return create_batch(organization=organization, input_file_id=file.pk, endpoint=CHAT, by=by.pk, now=db_now())
