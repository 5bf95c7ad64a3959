"""Anneal's own calls on files: map columns, and repair bad rows into a new version."""

from typing import Annotated, Any, Literal, TypedDict, cast

import msgspec
from msgspec import Meta
from rest_framework.request import Request

from apps.accounts.roles import Permission
from apps.core.database.clock import db_now
from apps.core.errors import MissingParameter
from apps.datasets import queries
from apps.datasets.intake import revisions
from apps.datasets.validation.formats import read_mapping
from apps.datasets.validation.preview import formats, preview
from apps.datasets.validation.repair import RepairMode
from apps.interfaces.api.openai.files import FileObject, file_object
from apps.interfaces.api.views import ApiView


class RepairRequest(msgspec.Struct, forbid_unknown_fields=True):
    mode: RepairMode = RepairMode.REPAIR


class FileRepair(ApiView):
    """Write a new version with the bad rows repaired (`repair`) or left out (`drop`). Poll it like any upload."""

    required_scope = {"POST": Permission.DATASET_WRITE}
    examples = {"POST": {"mode": "drop"}}

    def post(self, request: Request, file_id: str, body: RepairRequest) -> FileObject:
        repaired = revisions.repair_version(
            version=queries.get_version(organization=self.organization, id=file_id),
            mode=body.mode,
            by=self.actor,
            now=db_now(),
        )
        return file_object(repaired)


class ColumnsRequest(msgspec.Struct, forbid_unknown_fields=True):
    mapping: dict[str, Any]


class ColumnsQuery(msgspec.Struct):
    mapping: Annotated[str, Meta(description="A mapping as JSON text.")] | None = None


class ColumnsObject(TypedDict):
    """`rows` are the first ones, each as written and as it would be stored; `formats` are those a mapping can name.

    A row that `is_cut` is too long to preview.
    """

    object: Literal["file.columns"]
    id: str
    container: str
    columns: list[str]
    mapping: dict[str, Any] | None
    unused: list[str]
    rows: list[dict[str, Any]]
    formats: list[dict[str, Any]]


class FileColumns(ApiView):
    required_scope = {"GET": Permission.VIEW, "POST": Permission.DATASET_WRITE}
    examples = {"POST": {"mapping": {"format": "prompt_completion", "columns": {"prompt": "q", "completion": "a"}}}}

    def get(self, request: Request, file_id: str, query: ColumnsQuery) -> ColumnsObject:
        """Return the columns of a file and its first rows as converted, also under another mapping."""
        version = queries.get_version(organization=self.organization, id=file_id)
        mapping = read_mapping(query.mapping)
        shown = msgspec.to_builtins(preview(version=version, mapping=mapping))
        columns = {"object": "file.columns", "id": version.pk} | shown | {"formats": formats()}
        return cast(ColumnsObject, columns)

    def post(self, request: Request, file_id: str, body: ColumnsRequest) -> FileObject:
        """Read a file under another mapping, as a new version. Poll it like any upload."""
        version = queries.get_version(organization=self.organization, id=file_id)
        mapping = read_mapping(body.mapping)
        if mapping is None:
            raise MissingParameter("Missing required parameter: 'mapping.format'.", param="mapping.format")
        mapped = revisions.remap_version(
            version=version,
            mapping=mapping,
            by=self.actor,
            now=db_now(),
        )
        return file_object(mapped)
