"""Queries on datasets: lists, one version, its rows, and the rows as a base model sees them."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from itertools import groupby, islice

import msgspec
from django.db.models import Count, Exists, F, Func, JSONField, OuterRef, Q, QuerySet, Subquery, Sum, Window
from django.db.models.functions import Lower, RowNumber
from django.utils.translation import gettext

from apps.accounts.members.visibility import visible
from apps.accounts.models import Organization
from apps.catalog.models import BaseModel
from apps.contracts.chat import (
    ChatRow,
    Line,
    MessageRole,
    PreferenceRow,
    Row,
    RowError,
    RowKind,
    parse_line_as,
    split_lines,
)
from apps.core.database.tenancy import sum_by_organization
from apps.core.errors import InvalidState, NotFound
from apps.core.objects.store import read_chunks, store
from apps.datasets.lifecycle import UNVALIDATED, DatasetVersionStatus, UploadStatus
from apps.datasets.models import Dataset, DatasetVersion, TokenCount
from apps.datasets.problems import MAX_LINE_BYTES, LineError, from_row_error, too_long
from apps.datasets.rows import kind_of
from apps.datasets.stream import LINES_PER_OFFSET

DOWNLOAD_SECONDS = 300
_MOST_OTHERS = 100
_RAW_LIMIT_CHARS = 20_000
_KEY_BYTES = 8  # that an inspection stores for each row
_SAMPLED_ROWS, _SAMPLED_BYTES, _SYSTEM_CHARS = 200, 256 * 1024, 16_000
# In SQL: it runs for every upload and job, and building the statements took longer than running them.
_KEPT = """
        SELECT {columns}, kept.bytes + kept.rows_bytes + CASE
            WHEN EXISTS (SELECT FROM datasets_versioninspection AS found WHERE found.version_id = kept.id)
            THEN coalesce(%(key_bytes)s * kept.rows, 0) ELSE 0 END AS amount
        FROM datasets_datasetversion AS kept
        WHERE kept.organization_id = ANY(%(organizations)s) AND kept.status <> %(deleted)s
        UNION ALL
        SELECT {columns}, greatest(
            kept.bytes, (SELECT sum(part.bytes) FROM datasets_uploadpart AS part WHERE part.upload_id = kept.id)
        ) FROM datasets_upload AS kept
        WHERE kept.organization_id = ANY(%(organizations)s) AND kept.id <> %(but_upload)s
            AND (kept.status = %(pending)s OR kept.signed_until > statement_timestamp())
"""
_USED_BYTES = f"""
    SELECT organization_id, sum(amount)::bigint FROM ({_KEPT.format(columns="kept.organization_id")}) AS used
    GROUP BY organization_id
"""  # noqa: S608 - constants
# Who made each kept file and upload in progress, when, and its bytes: part of a statement, with its parameters.
KEPT_BY_MAKER = _KEPT.format(columns="kept.created_by AS maker, kept.created_at")
KEPT_PARAMETERS = {
    "deleted": DatasetVersionStatus.DELETED.value,
    "pending": UploadStatus.PENDING.value,
    "key_bytes": _KEY_BYTES,
}


class UnknownFile(NotFound):
    """No file of the organization has this id."""

    code = "file_not_found"


class RowPreview(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a file as a page shows it: a row, or the reason why it is not one. `raw` is cut for display."""

    line: int
    raw: str
    row: Row | None = None
    error: LineError | None = None


def list_versions(*, organization: Organization | str, purpose: str | None = None) -> QuerySet[DatasetVersion]:
    """Return the files that the request sees and that are not deleted, newest first, without their long columns."""
    versions = visible(list_kept(organization=organization), project="dataset__project")
    if purpose is not None:
        versions = versions.filter(purpose=purpose)
    return versions.select_related("dataset").defer("line_offsets").order_by("-created_at", "-id")


def list_with_deleted(*, organization: Organization | str) -> QuerySet[DatasetVersion]:
    """Return the files that the request sees, also those that are deleted."""
    return visible(DatasetVersion.objects.for_organization(organization), project="dataset__project")


def list_kept(*, organization: Organization | str) -> QuerySet[DatasetVersion]:
    """Return all files that the organization keeps, also those that the request does not see."""
    return DatasetVersion.objects.for_organization(organization).exclude(status=DatasetVersionStatus.DELETED)


def with_first_errors(versions: QuerySet[DatasetVersion], *, most: int) -> QuerySet[DatasetVersion]:
    """Return the versions with `first_errors`, in place of all their errors: a list of them stays small."""
    template = f"jsonb_path_query_array(%(expressions)s, '$[0 to {most - 1}]')"
    first = Func(F("errors"), template=template, output_field=JSONField())
    return versions.defer("line_offsets", "errors").annotate(first_errors=first)


def list_unusable(*, organization: Organization | str) -> QuerySet[DatasetVersion]:
    """Return the files with errors that were neither replaced nor dismissed: each is the newest of its dataset."""
    return list_versions(organization=organization).filter(
        ~Exists(_newer()), status=DatasetVersionStatus.INVALID, dismissed_at=None
    )


def list_newest(*, organization: Organization | str) -> QuerySet[DatasetVersion]:
    """Return the newest file of each dataset, without long columns.

    Each has `dataset_name` to sort by, and `job_count`, the number of jobs that train on any version of its dataset.
    """
    rows = list_versions(organization=organization).filter(~Exists(_newer())).defer("line_offsets", "errors", "layout")
    # Counted by a subquery, for the rows of a page alone: a join would count the jobs of every dataset.
    of_dataset = DatasetVersion.objects.filter(dataset=OuterRef("dataset")).order_by().values("dataset")
    jobs = Subquery(of_dataset.annotate(count=Count("jobs")).values("count"))
    return rows.annotate(dataset_name=Lower("dataset__name"), job_count=jobs)


def list_datasets(*, organization: Organization | str) -> QuerySet[Dataset]:
    """Return the datasets that the request sees and that have files, by name.

    Each has its `version_count` and the `bytes` of its files.
    """
    kept = Q(versions__deleted_at=None)
    rows = list_datasets_with_deleted(organization=organization).filter(deleted_at=None)
    counted = rows.annotate(version_count=Count("versions", kept), bytes=Sum("versions__bytes", filter=kept))
    return counted.filter(version_count__gt=0).order_by("name", "id")


def list_datasets_with_deleted(*, organization: Organization | str) -> QuerySet[Dataset]:
    """Return the datasets that the request sees, also those that are deleted."""
    return visible(Dataset.objects.for_organization(organization))


def get_dataset(*, organization: Organization | str, id: str) -> Dataset:
    """Return one dataset that has files, as `list_datasets` does. Raises NotFound."""
    found = list_datasets(organization=organization).filter(pk=id).first()
    if found is None:
        raise NotFound(gettext("No such dataset."))
    return found


def list_older(*, newest: Iterable[DatasetVersion], most: int) -> dict[str, list[DatasetVersion]]:
    """Return up to `most` files before each of these, newest first, by the id of their dataset."""
    found: dict[str, list[DatasetVersion]] = {version.dataset_id: [] for version in newest}
    place = Window(RowNumber(), partition_by=F("dataset_id"), order_by=F("number").desc())
    rows = DatasetVersion.objects.filter(dataset__in=found).exclude(status=DatasetVersionStatus.DELETED)
    rows = rows.defer("line_offsets", "errors", "layout").annotate(place=place)
    for version in rows.filter(place__gt=1, place__lte=1 + most).order_by("-number"):
        found[version.dataset_id].append(version)
    return found


def _newer() -> QuerySet[DatasetVersion]:
    return DatasetVersion.objects.exclude(status=DatasetVersionStatus.DELETED).filter(
        dataset=OuterRef("dataset"), number__gt=OuterRef("number")
    )


def get_version(*, organization: Organization | str, id: str, param: str = "file_id") -> DatasetVersion:
    """Return one file that is not deleted.

    Raises UnknownFile, the same for unknown and foreign ids and for private projects that the request does not see.
    """
    versions = visible(list_kept(organization=organization), project="dataset__project").select_related("dataset")
    found = versions.filter(pk=id).first() if "\x00" not in id else None
    if found is None:
        raise UnknownFile(gettext("No such file: %(id)s.") % {"id": id[:80]}, param=param)
    return found


def list_siblings(*, version: DatasetVersion) -> QuerySet[DatasetVersion]:
    """Return all versions of the same dataset that are not deleted, newest first."""
    versions = DatasetVersion.objects.filter(dataset_id=version.dataset_id).exclude(status=DatasetVersionStatus.DELETED)
    return versions.defer("line_offsets", "errors").order_by("-number")


def require_none_unwritten(version: DatasetVersion) -> None:
    """Raise InvalidState while another version waits to be written from this file, which must not change until then."""
    waiting = version.derived.filter(status__in=UNVALIDATED, sha256="").first()
    if waiting is not None:
        text = gettext("Version %(number)s of %(name)s is being made from this file. Try again in a moment.") % {
            "number": waiting.number,
            "name": waiting.dataset.name,
        }
        raise InvalidState(text, param="file_id")


def list_others(*, version: DatasetVersion) -> list[DatasetVersion]:
    """Return the newest other versions of the same dataset, newest first."""
    return [each for each in list_siblings(version=version)[:_MOST_OTHERS] if each.pk != version.pk]


def find_compared(*, version: DatasetVersion, since: str) -> DatasetVersion | None:
    """Return the version `since` of the same dataset; without an id the one before, and for the first the newest.

    None means that there is no other version. Raises UnknownFile.
    """
    if since:
        found = get_version(organization=version.organization_id, id=since, param="since")
        if found.dataset_id != version.dataset_id:
            raise UnknownFile(gettext("The two files are not versions of the same dataset."), param="since")
        return found
    siblings = list_siblings(version=version)
    return siblings.filter(number__lt=version.number).first() or siblings.exclude(pk=version.pk).first()


def storage_used_bytes(*, organizations: Collection[str], but_upload: str = "") -> Counter[str]:
    """Return the bytes of each organization's files and of its uploads in progress or still writable.

    `but_upload` is left out: its file is counted instead.
    """
    return sum_by_organization(_USED_BYTES, organizations=list(organizations), but_upload=but_upload, **KEPT_PARAMETERS)


def find_token_count(*, version: DatasetVersion, base_model: BaseModel) -> TokenCount | None:
    """Return the stored count, if any; `operations.count_tokens` computes it."""
    return _counts(version, base_model).filter(refusal__isnull=True).first()


def find_refusal(*, version: DatasetVersion, base_model: BaseModel) -> LineError | None:
    """Return the row that the model's chat template refused when the tokens were counted."""
    found = _counts(version, base_model).filter(refusal__isnull=False).first()
    return msgspec.convert(found.refusal, LineError) if found else None


def _counts(version: DatasetVersion, base_model: BaseModel) -> QuerySet[TokenCount]:
    return TokenCount.objects.filter(
        version=version, base_model=base_model, chat_template_sha256=base_model.chat_template_sha256
    )


def list_current_counts(*, version: DatasetVersion) -> QuerySet[TokenCount]:
    """Return the file's counts and refusals under the current chat template of each base model."""
    current = version.token_counts.filter(chat_template_sha256=F("base_model__chat_template_sha256"))
    return current.select_related("base_model").order_by("base_model__name")


def list_token_counts(*, versions: Iterable[DatasetVersion], base_model: BaseModel | None) -> QuerySet[TokenCount]:
    """Return the stored counts of several files under one model."""
    if base_model is None:
        return TokenCount.objects.none()
    return TokenCount.objects.filter(
        refusal__isnull=True,
        version__in=[version.pk for version in versions],
        base_model=base_model,
        chat_template_sha256=base_model.chat_template_sha256,
    )


def download_url(*, version: DatasetVersion) -> str:
    """Return a URL under which a browser can save the file for five minutes."""
    return store().signed_url(
        version.object_key, "GET", expires_seconds=DOWNLOAD_SECONDS, base="public", filename=version.filename
    )


def read_rows(*, version: DatasetVersion, first_line: int = 1, limit: int = 20) -> list[RowPreview]:
    """Return up to `limit` rows from line `first_line` on, reading little more of the file than necessary."""
    kind = kind_of(version)
    lines = iterate_lines(version=version, first_line=first_line)
    return [preview_of(line, kind) for line in islice(lines, limit)]


def iterate_lines(*, version: DatasetVersion, first_line: int = 1) -> Iterator[Line]:
    """Yield the lines that are not blank from `first_line` on. The index of lines finds the first one."""
    index = max(0, min((first_line - 1) // LINES_PER_OFFSET, len(version.line_offsets) - 1))
    offset = version.line_offsets[index] if version.line_offsets else 0
    before = index * LINES_PER_OFFSET
    with store().open_stream(version.data_key, offset=offset) as stream:
        for line in split_lines(read_chunks(stream), max_line_bytes=MAX_LINE_BYTES):
            if before + line.number >= first_line:
                yield Line(before + line.number, line.data, line.is_too_long)


def lines_at(*, version: DatasetVersion, numbers: Iterable[int]) -> Iterator[Line]:
    """Yield the lines of these numbers, which ascend, without blank ones. Lines near each other are read together."""
    for _, near in groupby(numbers, key=lambda number: (number - 1) // LINES_PER_OFFSET):
        wanted = set(near)
        for line in iterate_lines(version=version, first_line=min(wanted)):
            if line.number in wanted:
                yield line
            if line.number >= max(wanted):
                break


def find_system_message(*, version: DatasetVersion) -> str:
    """Return the most frequent system message of the file's first rows; "" if most have none or it is too long."""
    kind, found = kind_of(version), Counter[str]()
    with store().open_stream(version.data_key) as stream:
        head = stream.read(_SAMPLED_BYTES)
    for line in islice(split_lines([head], max_line_bytes=MAX_LINE_BYTES), _SAMPLED_ROWS):
        preview = preview_of(line, kind)
        if preview.row is not None:  # the last line may be cut
            found[_system_message_of(preview.row)] += 1
    message = max(found, key=lambda text: found[text], default="")
    return message if len(message) <= _SYSTEM_CHARS else ""


def _system_message_of(row: Row) -> str:
    match row:
        case ChatRow(messages=messages) | PreferenceRow(prompt=messages):
            first = messages[0]
            return first.content if first.role in (MessageRole.SYSTEM, MessageRole.DEVELOPER) else ""
        case _:
            return ""


def preview_of(line: Line, kind: RowKind) -> RowPreview:
    """Return a line as a page shows it."""
    raw = line.data[: 4 * _RAW_LIMIT_CHARS].decode("utf-8", "replace")[:_RAW_LIMIT_CHARS]
    if line.is_too_long:
        return RowPreview(line=line.number, raw=raw, error=too_long(line.number))
    try:
        return RowPreview(line=line.number, raw=raw, row=parse_line_as(line, kind))
    except RowError as error:
        return RowPreview(line=line.number, raw=raw, error=from_row_error(error))
