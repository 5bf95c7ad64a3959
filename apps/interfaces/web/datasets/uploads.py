"""Resumable uploads from a browser: the plan, signed addresses for the parts, and the parts received.

The page's script calls these views with JSON. Parts go straight to the store, so a reload of the page or a restart of
this process loses no data.
"""

import msgspec
from django.http import HttpResponse, JsonResponse
from django.urls import reverse
from django.views.decorators.http import require_http_methods, require_POST

from apps.accounts.roles import Permission
from apps.core.database.clock import db_now
from apps.core.errors import DomainError
from apps.core.http.asgi import error_response
from apps.core.http.json_bodies import decode_body, json_of
from apps.datasets.intake import parts, uploads
from apps.datasets.lifecycle import UploadStatus
from apps.datasets.models import Upload
from apps.interfaces.web.shell.access import OrganizationRequest, organization_view


class Announcement(msgspec.Struct, forbid_unknown_fields=True):
    filename: str
    bytes: int
    name: str = ""
    project: str = ""


class Wanted(msgspec.Struct, forbid_unknown_fields=True):
    numbers: list[int]


_announcement, _wanted = msgspec.json.Decoder(Announcement), msgspec.json.Decoder(Wanted)


@require_POST
@organization_view(Permission.DATASET_WRITE)
def create(request: OrganizationRequest) -> HttpResponse:
    """Announce a file and return its plan."""
    try:
        body = decode_body(json_of(request), _announcement)
        upload = uploads.create_upload(
            organization=request.organization,
            filename=body.filename,
            purpose="fine-tune",
            bytes=body.bytes,
            mime_type="application/octet-stream",
            dataset_name=body.name,
            is_planned=True,
            project=body.project,
            by=request.membership.user_id,
            now=db_now(),
        )
    except DomainError as error:
        return error_response(error)
    return JsonResponse(_plan(upload, is_new=True))


@require_http_methods(["GET", "HEAD"])
@organization_view(Permission.DATASET_WRITE, is_of_any_project=True)
def state(request: OrganizationRequest, upload_id: str) -> HttpResponse:
    """Return the plan and the numbers of the parts received."""
    return JsonResponse(_plan(uploads.get_upload(organization=request.organization, id=upload_id)))


@require_POST
@organization_view(Permission.DATASET_WRITE, is_of_any_project=True)
def sign(request: OrganizationRequest, upload_id: str) -> HttpResponse:
    """Return a signed address for each requested part, valid for minutes."""
    upload = uploads.get_upload(organization=request.organization, id=upload_id)
    try:
        wanted = decode_body(json_of(request), _wanted).numbers
        urls = parts.sign_parts(upload=upload, numbers=wanted, by=request.membership.user_id, now=db_now())
    except DomainError as error:
        return error_response(error)
    return JsonResponse({"urls": urls})


@require_POST
@organization_view(Permission.DATASET_WRITE, is_of_any_project=True)
def complete(request: OrganizationRequest, upload_id: str) -> HttpResponse:
    """Join the parts into a file and return the address of its page."""
    upload = uploads.get_upload(organization=request.organization, id=upload_id)
    try:
        completed = uploads.complete_upload(
            upload=upload,
            by=request.membership.user_id,
            now=db_now(),
        )
    except DomainError as error:
        return error_response(error)
    return JsonResponse(_plan(completed))


@require_POST
@organization_view(Permission.DATASET_WRITE, is_of_any_project=True)
def cancel(request: OrganizationRequest, upload_id: str) -> HttpResponse:
    upload = uploads.get_upload(organization=request.organization, id=upload_id)
    try:
        return JsonResponse(_plan(uploads.cancel_upload(upload=upload, by=request.membership.user_id)))
    except DomainError as error:
        return error_response(error)


def _plan(upload: Upload, *, is_new: bool = False) -> dict[str, object]:
    # Do not ask the store about a new upload: if the store were down, the client would announce its file repeatedly.
    is_planned = upload.part_bytes is not None
    is_listed = is_planned and not is_new and upload.status == UploadStatus.PENDING
    return {
        "id": upload.pk,
        "status": upload.status,
        "project": upload.project_id,
        "name": upload.dataset_name,
        "bytes": upload.bytes,
        "part_bytes": upload.part_bytes,
        "parts": parts.count_parts(upload) if is_planned else 0,
        "present": parts.list_present(upload=upload) if is_listed else [],
        "url": reverse("web:dataset_detail", args=[upload.version_id]) if upload.version_id else None,
    }
