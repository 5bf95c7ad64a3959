"""Changes and deletion of stored completions."""

import datetime
from collections.abc import Iterator, Mapping

import msgspec
from django.conf import settings
from django.db import transaction
from django.db.models import Q, QuerySet
from django.utils.translation import gettext

from apps.accounts.members.projects import project_of_new, require_work_in
from apps.accounts.members.visibility import Sight, seeing
from apps.accounts.models import Organization
from apps.batches.completions.models import StoredCompletion
from apps.batches.completions.queries import list_completions, read_answer, read_request
from apps.core import audit
from apps.core.database.locks import lock_row
from apps.core.errors import InvalidValue, NotFound
from apps.datasets.intake.versions import create_version
from apps.datasets.models import DatasetVersion

MAX_METADATA, MAX_METADATA_KEY, MAX_METADATA_VALUE = 16, 64, 512
# Of a dataset made of stored completions, while its creator waits.
MAX_ROWS, MAX_READ_BYTES = 10_000, 64 * 1024 * 1024
TOMBSTONE = datetime.timedelta(hours=1)  # a living gateway ships what a dead one left within seconds
_DELETED_AT_ONCE = 500
_READ_AT_ONCE = 4  # each may have 8 MiB
_ROW_MEMBERS = ("role", "content", "name", "tool_calls", "tool_call_id")


@transaction.atomic
def set_metadata(*, completion: StoredCompletion, metadata: Mapping[str, str], by: str) -> StoredCompletion:
    """Replace the metadata of a stored completion.

    Raises InvalidValue, NotFound for a deleted one, and PermissionDenied for a viewer of its project.
    """
    check_metadata(metadata)
    require_work_in(project_id=completion.project_id, actor=by)
    completion = lock_row(completion)
    if completion.deleted_at is not None:
        raise NotFound(gettext("This was deleted in the meantime."))
    before, completion.metadata = completion.metadata, dict(metadata)
    completion.bytes += len(msgspec.json.encode(completion.metadata)) - len(msgspec.json.encode(before))
    completion.save(update_fields=["metadata", "bytes"])
    return completion


def check_metadata(metadata: Mapping[str, str]) -> None:
    """Raise InvalidValue for metadata beyond OpenAI's limits."""
    if len(metadata) > MAX_METADATA or any(
        len(key) > MAX_METADATA_KEY or len(value) > MAX_METADATA_VALUE for key, value in metadata.items()
    ):
        raise InvalidValue(
            gettext(
                "metadata has at most %(max_metadata)s pairs, keys up to %(max_metadata_key)s and values up to "
                "%(max_metadata_value)s characters."
            )
            % {
                "max_metadata": MAX_METADATA,
                "max_metadata_key": MAX_METADATA_KEY,
                "max_metadata_value": MAX_METADATA_VALUE,
            },
            param="metadata",
        )


@transaction.atomic
def delete_completion(*, completion: StoredCompletion, by: str, now: datetime.datetime) -> None:
    """Delete the content of a stored completion for good. The empty row is deleted after TOMBSTONE.

    Raises PermissionDenied for a viewer of its project.
    """
    require_work_in(project_id=completion.project_id, actor=by)
    completion.request = completion.answer = "{}"
    completion.metadata, completion.bytes, completion.deleted_at = {}, 0, now
    completion.save(update_fields=["request", "answer", "metadata", "bytes", "deleted_at"])
    audit.record(organization=completion.organization_id, by=by, action="completion.deleted", target=completion.pk)


def delete_expired(*, now: datetime.datetime) -> int:
    """Delete completions stored for longer than the installation keeps them, and empty rows; return how many."""
    before = now - datetime.timedelta(days=settings.STORED_COMPLETION_DAYS)
    ended = StoredCompletion.objects.filter(Q(created_at__lt=before) | Q(deleted_at__lt=now - TOMBSTONE))
    deleted = 0
    while ids := list(ended.values_list("pk")[:_DELETED_AT_ONCE]):
        deleted += StoredCompletion.objects.filter(pk__in=[pk for (pk,) in ids]).delete()[0]
    return deleted


def create_dataset(
    *,
    organization: Organization | str,
    name: str,
    by: str,
    now: datetime.datetime,
    model_name: str | None = None,
    metadata: Mapping[str, str] | None = None,
    among: QuerySet[StoredCompletion] | None = None,
    project: str = "",
) -> DatasetVersion:
    """Make a dataset of the newest stored completions, within the limits above. It is validated like an upload.

    The dataset is in `project`, or else in that of `by`. It contains no completion of another private project, because
    all who see the dataset can read it. With `among`, all are of these. Raises InvalidValue if there are none,
    StorageFull, and as `project_of_new`.
    """
    project_id = project_of_new(organization=organization, by=by, wanted=project)
    with seeing(Sight(project_ids=frozenset({project_id}))):
        found = list_completions(organization=organization, model_name=model_name, metadata=metadata)
    found = found if among is None else found.filter(pk__in=among.values("pk"))
    newest = found.order_by("-created_at", "-id")[:MAX_ROWS]
    if not newest.exists():
        text = gettext(
            "No stored completion that the dataset may contain has this model and this metadata. Leave one out, send "
            "`store: true` with chats, or make the dataset in the project of the completions."
        )
        raise InvalidValue(text, param="stored_completions")
    return create_version(
        organization=organization,
        filename=f"{name}.jsonl",
        purpose="fine-tune",
        chunks=_lines(newest),
        by=by,
        now=now,
        dataset_name=name,
        project=project_id,
    )


def _lines(completions: QuerySet[StoredCompletion]) -> Iterator[bytes]:
    """Yield a row for each first choice that has an answer: the messages of the request, then the answer."""
    read_bytes = 0
    for completion in completions.iterator(_READ_AT_ONCE):
        read_bytes += completion.bytes
        if read_bytes > MAX_READ_BYTES:
            return
        request, choices = read_request(completion), read_answer(completion)["choices"]
        answer = choices[0]["message"] if choices else {}
        if not answer.get("content") and not answer.get("tool_calls"):
            continue
        row: dict[str, object] = {"messages": [_row_message(one) for one in (*request["messages"], answer)]}
        if tools := request.get("tools"):
            row["tools"] = tools
        yield msgspec.json.encode(row) + b"\n"


def _row_message(message: Mapping[str, object]) -> dict[str, object]:
    """Return the message without its empty fields. If all its parts are text, they become one text."""
    given = {name: message[name] for name in _ROW_MEMBERS if message.get(name) is not None}
    if isinstance(parts := given.get("content"), list):
        parts = [{name: value for name, value in part.items() if value is not None} for part in parts]
        is_text = all("text" in part for part in parts)
        given["content"] = "\n".join(part["text"] for part in parts) if is_text else parts
    return given
