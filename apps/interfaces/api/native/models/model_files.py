"""/api/v1/models/{model}/files: the files of a trained model, to download with a key."""

from typing import Literal, TypedDict

import msgspec
from django.http import HttpResponse
from rest_framework.request import Request

from apps.accounts.roles import Permission
from apps.core import audit
from apps.core.objects.store import attachment
from apps.core.objects.views import object_response
from apps.finetuning.results.model_files import find_file, list_files
from apps.interfaces.api.requests.handlers import Download
from apps.interfaces.api.requests.pagination import ListObject, list_object
from apps.interfaces.api.views import ApiView
from apps.serving.aliases import get_exact_version


class ModelFileObject(TypedDict):
    """One file. `export` is null for the model's own files; else it is sent as `?export=` to download the file."""

    object: Literal["model.file"]
    name: str
    export: str | None
    bytes: int
    sha256: str


class ExportQuery(msgspec.Struct):
    export: str = ""


class ModelFileList(ApiView):
    required_scope = {"GET": Permission.VIEW}

    def get(self, request: Request, model: str) -> ListObject[ModelFileObject]:
        """List the files of a fine-tuned model and of its exports, with the model card."""
        version = get_exact_version(organization=self.organization, model_name=model)
        files: list[ModelFileObject] = [
            {
                "object": "model.file",
                "name": file.name,
                "export": file.export or None,
                "bytes": file.bytes,
                "sha256": file.sha256,
            }
            for file in list_files(version=version)
        ]
        return list_object(files)


class ModelFileContent(ApiView):
    required_scope = {"GET": Permission.VIEW}

    def get(self, request: Request, model: str, name: str, query: ExportQuery) -> Download:
        """Download one file of a fine-tuned model, or of its export."""
        version = get_exact_version(organization=self.organization, model_name=model)
        file = find_file(version=version, name=name, export=query.export)
        if request.method == "GET":  # HEAD sends no content
            action = "adapter.downloaded"
            audit.record(organization=self.organization, by=self.actor, action=action, target=version.pk, file=name)
        if file.key:
            return object_response(request._request, file.key, filename=name, content_type=file.content_type)
        headers = {"Content-Disposition": attachment(name), "Cache-Control": "private, no-store"}
        return HttpResponse(file.text, content_type=file.content_type, headers=headers)
