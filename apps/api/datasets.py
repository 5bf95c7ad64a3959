"""Our own calls on files: choose which column is what, and repair bad rows into a new version."""

from typing import Any

import msgspec
from rest_framework.request import Request
from rest_framework.response import Response

from apps.accounts.roles import Permission
from apps.api.body_errors import MissingParameter
from apps.api.files import file_object
from apps.api.parsers import read_body
from apps.api.views import ApiView
from apps.core.clock import db_now
from apps.datasets import intake, queries
from apps.datasets.formats import read_mapping
from apps.datasets.preview import formats, preview
from apps.datasets.repair import RepairMode


class RepairRequest(msgspec.Struct, forbid_unknown_fields=True):
    mode: RepairMode = RepairMode.REPAIR


class FileRepair(ApiView):
    """Write a new version with the bad rows mended (`repair`) or left out (`drop`); poll it like any upload."""

    required_scope = {"POST": Permission.DATASET_WRITE}

    def post(self, request: Request, file_id: str) -> Response:
        mode = read_body(request.data, RepairRequest).mode
        repaired = intake.repair_version(
            version=queries.get_version(organization=self.organization, id=file_id),
            mode=mode,
            by=self.actor,
            now=db_now(),
        )
        return Response(file_object(repaired))


class ColumnsRequest(msgspec.Struct, forbid_unknown_fields=True):
    mapping: dict[str, Any]


class FileColumns(ApiView):
    """GET: the columns of a file and what its first rows become, under `?mapping=` too. POST: read it so."""

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
        mapped = intake.remap_version(
            version=version,
            mapping=mapping,
            by=self.actor,
            now=db_now(),
        )
        return Response(file_object(mapped))
