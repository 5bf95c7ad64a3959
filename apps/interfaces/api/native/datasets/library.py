"""Datasets, their versions, the rows of a version as a base model sees them, and what the inspection found."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Annotated, Any, Literal, TypedDict

import msgspec
from msgspec import Meta
from rest_framework.request import Request

from apps.accounts.roles import Permission
from apps.batches.completions.operations import create_dataset
from apps.catalog.models import BaseModel
from apps.catalog.queries import chat_renderer, get_base_model
from apps.contracts.chat import ChatRenderer, PreferenceRow, RenderedRow, RowError, TrainOn
from apps.contracts.splits.split import row_contents
from apps.contracts.templating.process import PAGE_SECONDS, renders_within
from apps.core.database.clock import db_now
from apps.datasets import operations, queries
from apps.datasets.inspection.inspections import find_inspection
from apps.datasets.lifecycle import DatasetVersionStatus
from apps.datasets.queries import RowPreview
from apps.interfaces.api.openai.files import FileObject, file_object, listed_object
from apps.interfaces.api.requests.pagination import ListObject, PageQuery, SearchQuery, page, with_words_of
from apps.interfaces.api.views import ApiView

_MAX_TEXT = 20_000  # characters of a row
_MAX_SPANS = 1_000
_MAX_RENDERED = 500_000  # characters of all rows of a page
_LISTED_ERRORS = 5  # of each version in a list


class DatasetsQuery(SearchQuery):
    status: Annotated[
        Literal["uploaded", "validating", "ready", "invalid"] | None, Meta(description="Of the newest version.")
    ] = None


class ChosenCompletions(msgspec.Struct, forbid_unknown_fields=True):
    """Which stored completions become rows: those of a model, and those with all of these pairs."""

    model: str | None = None
    metadata: dict[str, str] | None = None


class CreateDataset(msgspec.Struct, forbid_unknown_fields=True):
    name: Annotated[str, Meta(min_length=1, max_length=120)]
    stored_completions: ChosenCompletions


class DatasetObject(TypedDict):
    object: Literal["dataset"]
    id: str
    name: str
    project_id: str
    created_at: int
    version_count: int
    bytes: int


class DeletedDataset(TypedDict):
    id: str
    object: Literal["dataset"]
    deleted: Literal[True]


class DatasetList(ApiView):
    required_scope = {"GET": Permission.VIEW, "POST": Permission.DATASET_WRITE}
    examples = {"POST": {"name": "support", "stored_completions": {"metadata": {"topic": "billing"}}}}

    def get(self, request: Request, query: DatasetsQuery) -> ListObject[DatasetObject]:
        """List datasets, newest first. `q` searches their names."""
        rows = with_words_of(query, queries.list_datasets(organization=self.organization), fields=("name",))
        if query.status:
            newest = queries.list_newest(organization=self.organization).filter(status=query.status)
            rows = rows.filter(pk__in=newest.order_by().values("dataset"))
        places = queries.list_datasets_with_deleted(organization=self.organization)
        return page(query, rows, _dataset_object, places=places)

    def post(self, request: Request, body: CreateDataset) -> FileObject:
        """Make a dataset of the newest stored completions, or the next version of the dataset with this name.

        It takes at most 10,000 completions and 64 MiB.

        Each row has the messages of a request and its first answer. Completions of private projects other than the
        dataset's are left out. The file is checked like an upload.
        """
        source = body.stored_completions
        version = create_dataset(
            organization=self.organization,
            name=body.name,
            model_name=source.model,
            metadata=source.metadata,
            by=self.actor,
            now=db_now(),
        )
        return file_object(version)


class DatasetDetail(ApiView):
    required_scope = {"GET": Permission.VIEW, "DELETE": Permission.DATASET_WRITE}

    def get(self, request: Request, dataset_id: str) -> DatasetObject:
        """Return a dataset."""
        return _dataset_object(queries.get_dataset(organization=self.organization, id=dataset_id))

    def delete(self, request: Request, dataset_id: str) -> DeletedDataset:
        """Delete a dataset with all its versions, or nothing while a job uses one of them or one is being checked."""
        operations.delete_dataset(organization=self.organization, dataset_id=dataset_id, by=self.actor, now=db_now())
        return {"id": dataset_id, "object": "dataset", "deleted": True}


class DatasetVersionList(ApiView):
    required_scope = {"GET": Permission.VIEW}

    def get(self, request: Request, dataset_id: str, query: PageQuery) -> ListObject[FileObject]:
        """List the versions of a dataset, newest first. Each is a file, and its id that of the file."""
        dataset = queries.get_dataset(organization=self.organization, id=dataset_id)
        rows = queries.list_versions(organization=self.organization).filter(dataset=dataset)
        places = queries.list_with_deleted(organization=self.organization).filter(dataset=dataset)
        return page(query, queries.with_first_errors(rows, most=_LISTED_ERRORS), listed_object, places=places)


def _dataset_object(dataset: Any) -> DatasetObject:
    return {
        "object": "dataset",
        "id": dataset.pk,
        "name": dataset.name,
        "project_id": dataset.project_id,
        "created_at": int(dataset.created_at.timestamp()),
        "version_count": dataset.version_count,
        "bytes": dataset.bytes or 0,
    }


class RowsQuery(msgspec.Struct):
    first_line: Annotated[int, Meta(ge=1, le=2**53)] = 1
    limit: Annotated[int, Meta(ge=1, le=20)] = 20
    model: Annotated[str, Meta(description="A base model, to see rows as it does.")] | None = None
    train_on: TrainOn = TrainOn.ASSISTANT


class SequenceObject(TypedDict):
    """A row as the model sees it. `trained_spans` are the first and the end character of each trained part of `text`.

    A preference has two sequences, the preferred answer first.
    """

    text: str
    is_cut: bool
    tokens: int
    trained_tokens: int
    trained_spans: list[list[int]]


class RowProblem(TypedDict):
    message: str
    fix: str


class RowObject(TypedDict):
    """`raw` is the line as stored, up to 20,000 characters. Without a model there are no `sequences`."""

    line: int
    raw: str
    error: RowProblem | None
    sequences: list[SequenceObject]


class RowsObject(TypedDict):
    """The next page begins at `next_line`; null at the end of the file."""

    object: Literal["file.rows"]
    id: str
    model: str | None
    rows: list[RowObject]
    next_line: int | None


class FileRows(ApiView):
    required_scope = {"GET": Permission.VIEW}

    def get(self, request: Request, file_id: str, query: RowsQuery) -> RowsObject:
        """Return rows of a file, with `model` also as that model sees them: tokens, and what is trained.

        A page with `model` ends early if its rows are long.
        """
        version = queries.get_version(organization=self.organization, id=file_id)
        if version.status != DatasetVersionStatus.READY:
            text = f"The file is {version.status}: its rows can be read once it is processed. Try again then."
            if version.status == DatasetVersionStatus.INVALID:
                text = "The file has errors, so its rows cannot be read. Fix them and upload it again."
            raise operations.NotReady(text, param="file_id")
        base_model: BaseModel | None = get_base_model(name=query.model) if query.model else None
        renderer = chat_renderer(base_model=base_model) if base_model else None
        found = queries.read_rows(version=version, first_line=query.first_line, limit=query.limit + 1)
        count = min(query.limit, _count_to_render(found)) if renderer else query.limit
        with renders_within(PAGE_SECONDS):
            rows = [_row_object(row, renderer, query.train_on) for row in found[:count]]
        return {
            "object": "file.rows",
            "id": version.pk,
            "model": query.model,
            "rows": rows,
            "next_line": found[count].line if len(found) > count else None,
        }


def _count_to_render(previews: Sequence[RowPreview]) -> int:
    """Return how many rows one request renders: the first, and those that follow within _MAX_RENDERED characters."""
    sizes = accumulate(sum(map(len, row_contents(each.row))) if each.row is not None else 0 for each in previews)
    return max(1, sum(size <= _MAX_RENDERED for size in sizes))


def _row_object(preview: RowPreview, renderer: ChatRenderer | None, train_on: TrainOn) -> RowObject:
    error: RowProblem | None = None
    sequences: list[SequenceObject] = []
    if preview.error:
        error = {"message": preview.error.message, "fix": preview.error.fix}
    elif preview.row is not None and renderer is not None:
        try:
            if isinstance(preview.row, PreferenceRow):
                pair = renderer.render_pair(preview.row)
                sequences = [_sequence_object(side) for side in (pair.chosen, pair.rejected)]
            else:
                sequences = [_sequence_object(renderer.render(preview.row, train_on=train_on))]
        except RowError as refused:
            error = {"message": refused.message, "fix": refused.fix}
    return {"line": preview.line, "raw": _whole(preview.raw), "error": error, "sequences": sequences}


def _sequence_object(rendered: RenderedRow) -> SequenceObject:
    spans = [[start, min(end, _MAX_TEXT)] for start, end in rendered.spans[:_MAX_SPANS] if start < _MAX_TEXT]
    return {
        "text": _whole(rendered.text[:_MAX_TEXT]),
        "is_cut": len(rendered.text) > _MAX_TEXT,
        "tokens": rendered.n_tokens,
        "trained_tokens": rendered.n_trained,
        "trained_spans": spans,
    }


def _whole(text: str) -> str:
    """Return the text without halves of surrogate pairs, which UTF-8 cannot hold."""
    return text.encode("utf-8", "replace").decode()


class FindingObject(TypedDict):
    code: str
    rows: int
    first_lines: list[int]


class FindingsObject(TypedDict):
    """`is_inspected` is false until the inspection that follows an upload is done."""

    object: Literal["file.findings"]
    id: str
    is_inspected: bool
    distinct_rows: int | None
    findings: list[FindingObject]


class FileFindings(ApiView):
    required_scope = {"GET": Permission.VIEW}

    def get(self, request: Request, file_id: str) -> FindingsObject:
        """Return what the inspection of a file found: copies, different answers, personal data."""
        version = queries.get_version(organization=self.organization, id=file_id)
        inspection = find_inspection(version=version)
        return {
            "object": "file.findings",
            "id": version.pk,
            "is_inspected": inspection is not None,
            "distinct_rows": inspection.distinct_rows if inspection else None,
            "findings": [
                {
                    "code": found["code"],
                    "rows": found["rows"],
                    "first_lines": [row["line"] for row in found["first"]],
                }
                for found in (inspection.findings if inspection else [])
            ],
        }
