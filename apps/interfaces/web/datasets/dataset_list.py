"""The list of datasets, each with its versions, the same rows as CSV, and deletion of several datasets at once."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from django.conf import settings
from django.db.models import Q, QuerySet
from django.http import HttpResponse, HttpResponseBase
from django.utils.translation import gettext, ngettext
from django.views.decorators.http import require_http_methods, require_safe

from apps.accounts.models import Project
from apps.accounts.roles import Permission, has_permission
from apps.core.database.clock import db_now
from apps.core.errors import InvalidValue
from apps.core.http.confirmation import MAX_ROWS, AffectedRow, ConfirmedAction, confirm
from apps.core.messages.translation import later
from apps.core.templatetags.ui import bytes_
from apps.datasets import operations, queries
from apps.datasets.lifecycle import UNVALIDATED, DatasetVersionStatus
from apps.datasets.models import DatasetVersion
from apps.finetuning.usage.quotas import get_quota
from apps.finetuning.usage.storage import counted_bytes
from apps.interfaces.web.datasets.address import chosen_model, model_options
from apps.interfaces.web.datasets.views import IN_PARTS_FROM_BYTES, UploadForm, upload_command
from apps.interfaces.web.shell.access import OrganizationRequest, organization_view
from apps.interfaces.web.shell.current_project import find_current_project, of_project
from apps.interfaces.web.shell.first_job import FirstJob, find_first_job
from apps.interfaces.web.shell.listing import NEWEST_FIRST, Filter, Listing, ListPage, render_list

_OLDER_SHOWN = 5
_LIST = Listing[DatasetVersion](
    name=later("datasets"),
    hint=later("Name, file or id"),
    url_name="web:dataset_list",
    export_url_name="web:dataset_export",
    searched=("dataset__name", "filename", "id"),
    filters={
        "status": Filter(
            later("State"),
            {
                "": (later("All"), Q()),
                "ready": (later("Ready"), Q(status=DatasetVersionStatus.READY)),
                "invalid": (later("Has errors"), Q(status=DatasetVersionStatus.INVALID)),
                "checking": (later("Checking data"), Q(status__in=UNVALIDATED)),
            },
        )
    },
    orders={
        **NEWEST_FIRST,
        "name": (later("By name"), ("dataset_name", "id")),
        "size": (later("Largest first"), ("-bytes", "-id")),
    },
)
_EXPORTED = ("dataset", "version", "id", "filename", "status", "rows", "bytes", "jobs", "uploaded_at")


@require_safe
@organization_view(Permission.VIEW)
def index(request: OrganizationRequest) -> HttpResponse:
    """List the datasets with their newest version and its tokens under one base model."""
    model = chosen_model(request)
    models = {name: (label, Q()) for name, label in model_options()}
    listing = replace(_LIST, filters={**_LIST.filters, "model": Filter(gettext("Count tokens for"), models)})
    project = find_current_project(request)
    page = listing.page(request, _listed(request, project))
    counts = {count.version_id: count for count in queries.list_token_counts(versions=page.rows, base_model=model)}
    older = queries.list_older(newest=page.rows, most=_OLDER_SHOWN)
    storage = None
    if not request.htmx:  # the part that htmx asks for does not show it
        storage = {
            "used_bytes": counted_bytes(organization=request.organization),
            "limit_bytes": get_quota(organization=request.organization).storage_bytes,
        }
    context = {
        "files": [
            {"version": version, "count": counts.get(version.pk), "older": older[version.dataset_id]}
            for version in page.rows
        ],
        "model": model,
        "project": project,
        "form": UploadForm(request),
        "parts_from_bytes": IN_PARTS_FROM_BYTES,
        "max_upload_bytes": settings.MAX_UPLOAD_BYTES,
        "may_write": has_permission(request.membership.role, Permission.DATASET_WRITE),
        "is_live": any(version.status in UNVALIDATED for version in page.rows),
        "command": upload_command(),
        "first_job": _find_first_job(request, page),
        "storage": storage,
    }
    return render_list(request, "datasets/index.html", page, context)


def _find_first_job(request: OrganizationRequest, page: ListPage[DatasetVersion]) -> FirstJob | None:
    """Return the job that an empty list offers; None beside datasets, and for a person who may not train."""
    may_train = has_permission(request.membership.role, Permission.JOB_WRITE)
    return find_first_job(organization=request.organization) if may_train and not (page.rows or page.query) else None


def _listed(request: OrganizationRequest, project: Project | None) -> QuerySet[DatasetVersion]:
    return of_project(project, queries.list_newest(organization=request.organization), field="dataset__project")


@require_safe
@organization_view(Permission.VIEW)
def export(request: OrganizationRequest) -> HttpResponseBase:
    versions = _listed(request, find_current_project(request))
    return _LIST.export(request, versions, header=_EXPORTED, cells=_exported)


def _exported(version: Any) -> tuple[object, ...]:
    return (
        version.dataset.name, version.number, version.pk, version.filename, version.status,
        "" if version.rows is None else version.rows, version.bytes, version.job_count, version.created_at.isoformat(),
    )  # fmt: skip


@require_http_methods(["GET", "HEAD", "POST"])
@organization_view(Permission.DATASET_WRITE, is_sensitive=True)
def delete_many(request: OrganizationRequest) -> HttpResponse:
    return confirm(request, _DELETE)


def _find(request: OrganizationRequest, ids: Sequence[str]) -> list[AffectedRow]:
    datasets: QuerySet[Any] = queries.list_datasets(organization=request.organization).filter(pk__in=ids)
    found = list(datasets.values_list("pk", "name", "version_count", "bytes"))
    if (files := sum(count for _, _, count, _ in found)) > MAX_ROWS:
        raise InvalidValue(
            gettext("These datasets have %(files)s files. Choose fewer: at most %(most)s are deleted at once.")
            % {"files": files, "most": MAX_ROWS}
        )
    return [
        AffectedRow(
            pk,
            name,
            ngettext(
                "Its file is deleted, %(size)s in all.", "Its %(count)s versions are deleted, %(size)s in all.", count
            )
            % {"count": count, "size": bytes_(size)},
        )
        for pk, name, count, size in found
    ]


def _delete(request: OrganizationRequest, dataset_id: str) -> None:
    operations.delete_dataset(
        organization=request.organization, dataset_id=dataset_id, by=request.membership.user_id, now=db_now()
    )


_DELETE = ConfirmedAction[OrganizationRequest](
    parameter="dataset",
    verb=later("Delete"),
    nouns=(later("dataset"), later("datasets")),
    warning=later("This cannot be undone. Adapters trained on these files are kept."),
    done=later("Deleted"),
    list_url_name="web:dataset_list",
    list_title=later("Datasets"),
    find=_find,
    act=_delete,
)
