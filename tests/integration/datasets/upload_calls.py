"""Uploads of one small file, in parts of a thousand bytes."""

import datetime
import urllib.request
from urllib.parse import urlsplit

from django.test import Client

from apps.accounts.models import Organization
from apps.core.database.clock import db_now
from apps.core.objects.store import DirectoryStore, store
from apps.datasets.intake.uploads import add_part, cancel_upload, complete_upload, expire_uploads
from apps.datasets.models import Upload
from apps.finetuning.usage.quotas import set_quota
from tests.factories.datasets import jsonl

CONTENT = jsonl(40)
PART = 1_000


def pieces() -> list[bytes]:
    return [CONTENT[at : at + PART] for at in range(0, len(CONTENT), PART)]


def send(upload: Upload) -> list[str]:
    """Send the parts last one first, and return their ids in the order of the file."""
    ids = [add_part(upload=upload, chunks=[piece], by="user_1", now=db_now()).pk for piece in reversed(pieces())]
    return ids[::-1]


def complete(upload: Upload, **arguments: object) -> Upload:
    return complete_upload(upload=upload, now=db_now(), by="user_1", **arguments)  # type: ignore[arg-type]


def cancel(upload: Upload) -> Upload:
    return cancel_upload(upload=upload, by="user_1")


def expire(upload: Upload) -> int:
    Upload.objects.filter(pk=upload.pk).update(expires_at=db_now() - datetime.timedelta(seconds=1))
    return expire_uploads(now=db_now())


def put(url: str, content: bytes) -> bool:
    """Send a part as a browser does, to whichever store signed the URL; return whether it was taken."""
    if isinstance(store(), DirectoryStore):
        parts = urlsplit(url)
        return Client().generic("PUT", f"{parts.path}?{parts.query}", content).status_code == 200
    request = urllib.request.Request(url, content, {"Content-Type": "application/octet-stream"}, method="PUT")
    with urllib.request.urlopen(request, timeout=120) as response:
        return bool(response.status == 200)


def limit_storage(organization: Organization, byte_count: int) -> None:
    set_quota(organization=organization, by="system", now=db_now(), storage_bytes=byte_count)
