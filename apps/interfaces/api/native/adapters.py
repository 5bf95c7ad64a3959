"""Adapter versions: list with filters, upload, one of them, and deletion.

`/api/v1/models/{model}/serving` serves and stops.
"""

from typing import Annotated, Literal, TypedDict

import msgspec
from django.core.files.uploadedfile import UploadedFile
from msgspec import Meta
from rest_framework.request import Request

from apps.accounts.models import Organization
from apps.accounts.roles import Permission
from apps.adapters.models import AdapterVersion
from apps.adapters.queries import get_version, list_versions, list_with_deleted
from apps.contracts.hyperparameters import Method
from apps.core.database.clock import db_now
from apps.core.objects.store import CHUNK_BYTES
from apps.finetuning.queries import find_jobs_of_adapters
from apps.finetuning.recipes.start_points import UPLOADED
from apps.finetuning.results.uploaded_adapters import upload_adapter
from apps.interfaces.api.requests.pagination import ListObject, SearchQuery, list_object, take, with_words_of
from apps.interfaces.api.requests.parsers import PlainMultiPartParser
from apps.interfaces.api.views import ApiView
from apps.serving.operations import delete_model
from apps.serving.queries import serving_states


class AdaptersQuery(SearchQuery):
    method: Method | None = None
    base_model: Annotated[str, Meta(description="The name of a base model.")] | None = None


class AdapterObject(TypedDict):
    """`model` is the name in requests; `job` made it, unless `is_uploaded`.

    `state` is `loaded`, `waiting`, `loading`, `cold`, `off`, `failed`, `rejected` or `files_only`.
    `certificate` is `checking`, `ready`, `uncertified`, `refused`, or `no_certificate` for a whole model.
    """

    object: Literal["adapter"]
    id: str
    name: str
    project_id: str
    version: int | None
    model: str
    base_model: str
    method: str
    rank: int | None
    bytes: int
    state: str
    state_reason: str | None
    certificate: str
    job: str | None
    is_uploaded: bool
    created_at: int


class DeletedAdapter(TypedDict):
    id: str
    object: Literal["adapter"]
    deleted: Literal[True]


class AdapterForm(msgspec.Struct):
    """The two files that PEFT's `save_pretrained` writes, as multipart form data. `base_model` is its name here."""

    name: str
    adapter_config: UploadedFile
    weights: UploadedFile
    base_model: str = ""


class AdapterList(ApiView):
    required_scope = {"GET": Permission.VIEW, "POST": Permission.ADAPTER_WRITE}
    parser_classes = [PlainMultiPartParser]

    def get(self, request: Request, query: AdaptersQuery) -> ListObject[AdapterObject]:
        """List the versions of adapters, newest first. `q` searches names."""
        rows = list_versions(organization=self.organization)
        rows = rows.filter(method=query.method) if query.method else rows
        rows = rows.filter(adapter__base_model__name=query.base_model) if query.base_model else rows
        rows = with_words_of(query, rows, fields=("adapter__name", "model_name"))
        found, has_more = take(query, rows, places=list_with_deleted(organization=self.organization))
        return list_object(_adapter_objects(self.organization, found), has_more=has_more)

    def post(self, request: Request, form: AdapterForm) -> AdapterObject:
        """Upload a LoRA adapter that was trained elsewhere, and serve it. Poll `state` and `certificate`.

        The files are `adapter_config.json` and `adapter_model.safetensors`, of at most 512 MiB. The base model must be
        installed here; without `base_model`, the configuration names its repository.
        """
        version = upload_adapter(
            organization=self.organization,
            name=form.name,
            config=form.adapter_config.chunks(CHUNK_BYTES),
            weights=form.weights.chunks(CHUNK_BYTES),
            base_model=form.base_model,
            by=self.actor,
            now=db_now(),
        )
        return _adapter_objects(self.organization, [get_version(organization=self.organization, id=version.pk)])[0]


class AdapterDetail(ApiView):
    required_scope = {"GET": Permission.VIEW, "DELETE": Permission.ADAPTER_DELETE}

    def get(self, request: Request, version_id: str) -> AdapterObject:
        """Return a version of an adapter."""
        return _adapter_objects(self.organization, [get_version(organization=self.organization, id=version_id)])[0]

    def delete(self, request: Request, version_id: str) -> DeletedAdapter:
        """Stop serving a version and delete its files. Its name is never used again."""
        version = get_version(organization=self.organization, id=version_id)
        delete_model(organization=self.organization, model_name=version.model_name, by=self.actor, now=db_now())
        return {"id": version_id, "object": "adapter", "deleted": True}


def _adapter_objects(organization: Organization, versions: list[AdapterVersion]) -> list[AdapterObject]:
    states = serving_states(versions=versions)
    jobs = find_jobs_of_adapters(organization=organization, versions=versions)
    return [
        {
            "object": "adapter",
            "id": version.pk,
            "name": version.adapter.name,
            "project_id": version.adapter.project_id,
            "version": version.number,
            "model": version.model_name,
            "base_model": version.adapter.base_model.name,
            "method": version.method,
            "rank": version.rank,
            "bytes": version.bytes,
            "state": states[version.pk].state,
            "state_reason": states[version.pk].reason or None,
            "certificate": version.certificate_state,
            "is_uploaded": UPLOADED in version.metrics,
            "job": job.pk if (job := jobs.get(version.pk)) else None,
            "created_at": int(version.created_at.timestamp()),
        }
        for version in versions
    ]
