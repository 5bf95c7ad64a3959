"""Anneal's own calls on files: map columns, and repair bad rows into a new version."""

from typing import Any

import msgspec
from rest_framework.request import Request
from rest_framework.response import Response

from apps.accounts.roles import Permission
from apps.core.database.clock import db_now
from apps.core.errors import MissingParameter
from apps.datasets import queries
from apps.datasets.intake import versions
from apps.datasets.validation.formats import read_mapping
from apps.datasets.validation.preview import formats, preview
from apps.datasets.validation.repair import RepairMode
from apps.interfaces.api.openai.files import file_object
from apps.interfaces.api.requests.parsers import read_body
from apps.interfaces.api.views import ApiView


class RepairRequest(msgspec.Struct, forbid_unknown_fields=True):
    mode: RepairMode = RepairMode.REPAIR


class FileRepair(ApiView):
    """Write a new version with the bad rows repaired (`repair`) or left out (`drop`). Poll it like any upload."""

    required_scope = {"POST": Permission.DATASET_WRITE}

    def post(self, request: Request, file_id: str) -> Response:
        mode = read_body(request.data, RepairRequest).mode
        repaired = versions.repair_version(
            version=queries.get_version(organization=self.organization, id=file_id),
            mode=mode,
            by=self.actor,
            now=db_now(),
        )
        return Response(file_object(repaired))


class ColumnsRequest(msgspec.Struct, forbid_unknown_fields=True):
    mapping: dict[str, Any]


class FileColumns(ApiView):
    """GET: the columns of a file and its first rows as converted, also under `?mapping=`. POST: apply a mapping."""

    required_scope = {"GET": Permission.VIEW, "POST": Permission.DATASET_WRITE}

    def get(self, request: Request, file_id: str) -> Response:
        version = queries.get_version(organization=self.organization, id=file_id)
        mapping = read_mapping(request.query_params.get("mapping"))
        shown = msgspec.to_builtins(preview(version=version, mapping=mapping))
        return Response({"object": "file.columns", "id": version.pk} | shown | {"formats": formats()})

    def post(self, request: Request, file_id: str) -> Response:
        version = queries.get_version(organization=self.organization, id=file_id)
        mapping = read_mapping(read_body(request.data, ColumnsRequest).mapping)
        if mapping is None:
            raise MissingParameter("Missing required parameter: 'mapping.format'.", param="mapping.format")
        mapped = versions.remap_version(
            version=version,
            mapping=mapping,
            by=self.actor,
            now=db_now(),
        )
        return Response(file_object(mapped))
