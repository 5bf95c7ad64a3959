"""Queries on stored completions."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
from django.db.models import QuerySet
from django.utils.translation import gettext

from apps.accounts.members.visibility import visible
from apps.accounts.models import Organization
from apps.batches.completions.models import StoredCompletion
from apps.core.errors import NotFound

MAX_TABLE_ROWS, MAX_TABLE_BYTES = 10_000, 16 * 1024 * 1024  # of completions that a table has
_MOST_NAMES = 100
_READ_AT_ONCE = 4  # each may have 8 MiB
_MOST_READ, _MOST_SHOWN = 64 * 1024, 200  # bytes of a completion that a list reads, characters that it shows


def list_completions(
    *, organization: Organization | str, model_name: str | None = None, metadata: Mapping[str, str] | None = None
) -> QuerySet[StoredCompletion]:
    """Return the organization's stored completions, oldest first. Each has all pairs of `metadata`.

    Those of private projects that the request does not see are left out.
    """
    kept = StoredCompletion.objects.for_organization(organization).filter(deleted_at=None)
    found = visible(kept).order_by("created_at", "id")
    if model_name is not None:
        found = found.filter(model_name=model_name) if "\x00" not in model_name else found.none()
    if metadata:
        has_nul = any("\x00" in text for pair in metadata.items() for text in pair)
        found = found.none() if has_nul else found.filter(metadata__contains=dict(metadata))
    return found


def list_with_deleted(*, organization: Organization | str) -> QuerySet[StoredCompletion]:
    """Return the stored completions that the request sees, also those that were deleted a short time ago."""
    return visible(StoredCompletion.objects.for_organization(organization))


def get_completion(*, organization: Organization | str, id: str) -> StoredCompletion:
    """Return one stored completion. Raises NotFound, the same for unknown and foreign ids."""
    found = list_completions(organization=organization).filter(pk=id).first() if "\x00" not in id else None
    if found is None:
        raise NotFound(
            gettext("No such stored completion: %(id)s. Send `store: true` to have a completion stored.")
            % {"id": id[:80]},
            param="completion_id",
            code="completion_not_found",
        )
    return found


def read_request(completion: StoredCompletion) -> dict[str, Any]:
    """Return the messages, tools and settings of the request."""
    return msgspec.json.decode(completion.request, type=dict[str, Any])


def read_answer(completion: StoredCompletion) -> dict[str, Any]:
    """Return choices and usage."""
    return msgspec.json.decode(completion.answer, type=dict[str, Any])


def list_model_names(*, organization: Organization | str) -> list[str]:
    """Return the names of models with stored completions, the first ones in their order."""
    rows = visible(StoredCompletion.objects.for_organization(organization)).order_by("model_name")
    return list(rows.values_list("model_name", flat=True).distinct()[:_MOST_NAMES])


def last_questions(*, completions: Sequence[StoredCompletion]) -> dict[str, str]:
    """Return the beginning of the last user message of each completion, by its id. Large completions are left out."""
    small = [each.pk for each in completions if each.bytes <= _MOST_READ]
    found = StoredCompletion.objects.filter(pk__in=small).defer("answer") if small else ()
    return {each.pk: _question_of(read_request(each))[:_MOST_SHOWN] for each in found}


def read_table(*, completions: QuerySet[StoredCompletion]) -> Iterator[tuple[StoredCompletion, str, str]]:
    """Yield the first completions with their last question and first answer, up to the limit of a table."""
    read_bytes = 0
    for completion in completions[:MAX_TABLE_ROWS].iterator(_READ_AT_ONCE):
        read_bytes += completion.bytes
        if read_bytes > MAX_TABLE_BYTES:
            return
        choices = read_answer(completion)["choices"]
        yield completion, _question_of(read_request(completion)), text_of(choices[0]["message"]) if choices else ""


def _question_of(request: Mapping[str, object]) -> str:
    messages = request.get("messages")
    asked = [each for each in messages if each.get("role") == "user"] if isinstance(messages, list) else []
    return text_of(asked[-1]) if asked else ""


def text_of(message: Mapping[str, object]) -> str:
    """Return the content of a message as text. A part that is no text is replaced by its type."""
    content = message.get("content") or ""
    if not isinstance(content, list):
        return str(content)
    return "\n".join(part.get("text") or f"[{part.get('type')}]" for part in content)
