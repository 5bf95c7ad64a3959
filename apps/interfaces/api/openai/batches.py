"""/v1/batches: OpenAI's Batch API."""

from typing import Annotated, Literal, TypedDict

import msgspec
from msgspec import Meta
from rest_framework.request import Request

from apps.accounts.roles import Permission
from apps.batches.lifecycle import BatchStatus
from apps.batches.models import Batch
from apps.batches.operations import cancel_batch, create_batch
from apps.batches.queries import get_batch, list_batches
from apps.core.database.clock import db_now
from apps.core.errors import InvalidValue
from apps.interfaces.api.requests.idempotency import is_client_retry
from apps.interfaces.api.requests.pagination import ListObject, SearchQuery, page, with_words_of
from apps.interfaces.api.requests.times import unix_seconds
from apps.interfaces.api.views import ApiView


class BatchesQuery(SearchQuery):
    status: BatchStatus | None = None


class OutputExpiresAfter(msgspec.Struct, forbid_unknown_fields=True):
    anchor: Literal["created_at"]
    seconds: int


class CreateBatch(msgspec.Struct, forbid_unknown_fields=True):
    input_file_id: str
    endpoint: Annotated[str, Meta(examples=["/v1/chat/completions", "/v1/completions"])]
    completion_window: str
    metadata: dict[str, str] | None = None
    output_expires_after: OutputExpiresAfter | None = None


class BatchErrorObject(TypedDict):
    code: str
    line: int | None
    message: str
    param: str | None


class BatchErrors(TypedDict):
    object: Literal["list"]
    data: list[BatchErrorObject]


class BatchCounts(TypedDict):
    total: int
    completed: int
    failed: int


class InputDetails(TypedDict):
    cached_tokens: int


class OutputDetails(TypedDict):
    reasoning_tokens: int


class BatchUsageObject(TypedDict):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class BatchObject(TypedDict):
    """OpenAI's batch, and the project that it is in."""

    id: str
    object: Literal["batch"]
    endpoint: str
    model: str | None
    errors: BatchErrors | None
    input_file_id: str
    completion_window: Literal["24h"]
    status: str
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: BatchCounts
    usage: BatchUsageObject
    metadata: dict[str, str] | None
    project_id: str


class BatchList(ApiView):
    required_scope = {"GET": Permission.VIEW, "POST": Permission.INFERENCE}
    examples = {
        "POST": {
            "input_file_id": "file-01m834k536k0gf5jc32faqfm5y",
            "endpoint": "/v1/chat/completions",
            "completion_window": "24h",
        }
    }

    def get(self, request: Request, query: BatchesQuery) -> ListObject[BatchObject]:
        """List batches, newest first. `status` and `q` are Anneal's: `q` searches files, models and ids."""
        batches = list_batches(organization=self.organization)
        rows = batches.filter(status=query.status) if query.status else batches
        rows = with_words_of(query, rows, fields=("input_file__filename", "model_name", "id"))
        return page(query, rows, batch_object, places=batches)

    def post(self, request: Request, body: CreateBatch) -> BatchObject:
        """Create a batch. Its requests are answered behind all live ones.

        Those without an answer after 24 hours expire.
        """
        if body.completion_window != "24h":
            raise InvalidValue("The completion_window must be '24h'.", param="completion_window")
        batch = create_batch(
            organization=self.organization,
            input_file_id=body.input_file_id,
            endpoint=body.endpoint,
            metadata=body.metadata,
            output_expires_after_seconds=body.output_expires_after.seconds if body.output_expires_after else None,
            by=self.actor,
            now=db_now(),
            is_retry=is_client_retry(request),
        )
        return batch_object(batch)


class BatchDetail(ApiView):
    required_scope = {"GET": Permission.VIEW}

    def get(self, request: Request, batch_id: str) -> BatchObject:
        """Return a batch with its status and counts."""
        return batch_object(get_batch(organization=self.organization, id=batch_id))


class BatchCancel(ApiView):
    required_scope = {"POST": Permission.INFERENCE}

    def post(self, request: Request, batch_id: str) -> BatchObject:
        """Cancel a batch. Requests in progress end, and what was answered is kept in its files."""
        batch = get_batch(organization=self.organization, id=batch_id)
        return batch_object(cancel_batch(batch=batch, by=self.actor, now=db_now()))


def batch_object(batch: Batch) -> BatchObject:
    """Return OpenAI's batch object."""
    return {
        "id": batch.pk,
        "object": "batch",
        "endpoint": batch.endpoint,
        "model": batch.model_name or None,
        "errors": {"object": "list", "data": batch.errors} if batch.errors else None,
        "input_file_id": batch.input_file_id,
        "completion_window": "24h",
        "status": batch.status,
        "output_file_id": batch.output_file_id,
        "error_file_id": batch.error_file_id,
        "created_at": int(batch.created_at.timestamp()),
        "in_progress_at": unix_seconds(batch.in_progress_at),
        "expires_at": int(batch.expires_at.timestamp()),
        "finalizing_at": unix_seconds(batch.finalizing_at),
        "completed_at": unix_seconds(batch.completed_at),
        "failed_at": unix_seconds(batch.failed_at),
        "expired_at": unix_seconds(batch.expired_at),
        "cancelling_at": unix_seconds(batch.cancelling_at),
        "cancelled_at": unix_seconds(batch.cancelled_at),
        "request_counts": {"total": batch.total, "completed": batch.completed, "failed": batch.failed},
        "usage": {
            "input_tokens": batch.input_tokens,
            "input_tokens_details": {"cached_tokens": batch.cached_tokens},
            "output_tokens": batch.output_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": batch.input_tokens + batch.output_tokens,
        },
        "metadata": batch.metadata,
        "project_id": batch.project_id,
    }
