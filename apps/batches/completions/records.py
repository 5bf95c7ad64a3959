"""Completions on their way from a gateway: its recorder writes them to disk, and then adds them here."""

import datetime
from collections.abc import Sequence

import msgspec
from django.conf import settings
from django.utils.module_loading import import_string

from apps.accounts.models import ApiKey, default_project_id
from apps.batches.completions.models import StoredCompletion

MAX_COMPLETIONS = 100_000  # of an organization
MAX_COMPLETION_BYTES = 8 * 1024 * 1024  # of a request and its answer


class CompletionRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One answered request. `request` and `answer` are JSON objects."""

    id: str
    organization_id: str
    key_id: str
    request_id: str
    model_name: str
    created: int
    metadata: dict[str, str]
    request: msgspec.Raw
    answer: msgspec.Raw

    @property
    def bytes(self) -> int:
        """Return the bytes that count as storage."""
        return len(self.request) + len(self.answer) + len(msgspec.json.encode(self.metadata))


class CompletionAllowance(msgspec.Struct):
    """The bytes that an organization may still store; None without a limit."""

    bytes: int | None
    count: int

    @property
    def is_used_up(self) -> bool:
        return self.count <= 0 or (self.bytes is not None and self.bytes <= 0)

    def use(self, byte_count: int) -> None:
        self.count -= 1
        if self.bytes is not None:
            self.bytes -= byte_count


def get_allowance(*, organization: str) -> CompletionAllowance:
    """Return how much the organization may still store."""
    left: int | None = import_string(settings.STORAGE_LEFT)(organization=organization)
    stored = StoredCompletion.objects.for_organization(organization).filter(deleted_at=None).count()
    return CompletionAllowance(bytes=left, count=MAX_COMPLETIONS - stored)


def record_completions(*, records: Sequence[CompletionRecord]) -> None:
    """Store the completions in the projects of their keys.

    One that is already stored, or was deleted within the last hour, stays as it is.
    """
    keys = ApiKey.objects.filter(pk__in={record.key_id for record in records})
    projects = dict(keys.values_list("pk", "project_id"))
    rows = [
        StoredCompletion(
            id=record.id,
            organization_id=record.organization_id,
            project_id=projects.get(record.key_id) or default_project_id(record.organization_id),
            key_id=record.key_id,
            request_id=record.request_id,
            model_name=record.model_name,
            metadata=record.metadata,
            request=bytes(record.request).decode(),
            answer=bytes(record.answer).decode(),
            bytes=record.bytes,
            created_at=datetime.datetime.fromtimestamp(record.created, datetime.UTC),
        )
        for record in records
    ]
    StoredCompletion.objects.bulk_create(rows, ignore_conflicts=True)
