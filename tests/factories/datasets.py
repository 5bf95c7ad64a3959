"""Training files, uploaded and validated by the same operations as in production."""

import json
from typing import Any

from apps.accounts.models import Organization
from apps.core.database.clock import db_now
from apps.datasets.intake.uploads import create_upload
from apps.datasets.intake.versions import create_version
from apps.datasets.models import DatasetVersion, Upload
from apps.datasets.validation.leases import validate_version


def chat_row(question: str = "Where is my card?", answer: str = "card_arrival") -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def jsonl(rows: int = 12) -> bytes:
    """A valid file of so many rows."""
    before, after = jsonl_of(chat_row("Where is card #?")).split(b"#")  # once: some files have 200,000 rows
    return b"".join(b"%b%d%b" % (before, row, after) for row in range(rows))


def jsonl_of(*rows: dict[str, Any]) -> bytes:
    """These rows as a file."""
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def make_version(organization: Organization, content: bytes | None = None, **fields: Any) -> DatasetVersion:
    """An uploaded file that is not validated yet."""
    defaults: dict[str, Any] = {"filename": "train.jsonl", "purpose": "fine-tune", "by": "user_1", "now": db_now()}
    defaults["chunks"] = [jsonl() if content is None else content]
    return create_version(organization=organization, **(defaults | fields))


def make_ready_version(organization: Organization, content: bytes | None = None, **fields: Any) -> DatasetVersion:
    """An uploaded file after its validation: ready, or invalid when `content` has errors."""
    version = make_version(organization, content, **fields)
    validated = validate_version(version_id=version.pk, now=db_now())
    assert validated is not None
    return validated


def make_upload(organization: Organization, **fields: Any) -> Upload:
    """An upload that has been announced; `is_planned=True` makes it a browser's."""
    defaults: dict[str, Any] = {
        "filename": "train.jsonl",
        "purpose": "fine-tune",
        "bytes": len(jsonl()),
        "mime_type": "application/jsonl",
        "by": "user_1",
        "now": db_now(),
    }
    return create_upload(organization=organization, **(defaults | fields))
