"""The list of adapter versions with their serving states, the same rows as CSV, and the action that stops serving."""

from collections.abc import Sequence
from typing import Any

from django.db.models import Exists, OuterRef, Q, QuerySet
from django.db.models.functions import Lower
from django.http import HttpResponse, HttpResponseBase
from django.urls import reverse
from django.utils.translation import gettext
from django.views.decorators.http import require_http_methods, require_safe

from apps.accounts.models import Project
from apps.accounts.roles import Permission, has_permission
from apps.adapters.models import AdapterVersion
from apps.adapters.queries import get_version, list_versions
from apps.contracts.hyperparameters import Method
from apps.core.database.clock import db_now
from apps.core.http.confirmation import AffectedRow, ConfirmedAction, confirm
from apps.core.messages.translation import later
from apps.core.templatetags.ui import method_name
from apps.finetuning.queries import find_jobs_of_adapters
from apps.interfaces.web.adapters.views import CHANGING
from apps.interfaces.web.shell.access import OrganizationRequest, organization_view
from apps.interfaces.web.shell.current_project import find_current_project, of_project
from apps.interfaces.web.shell.listing import NEWEST_FIRST, Filter, Listing, render_list
from apps.serving.models import Deployment
from apps.serving.operations import undeploy
from apps.serving.queries import serving_states

_LIST = Listing[AdapterVersion](
    name=later("adapters"),
    hint=later("Name, model or base model"),
    url_name="web:adapter_list",
    export_url_name="web:adapter_export",
    searched=("adapter__name", "model_name", "adapter__base_model__display_name", "id"),
    filters={
        "serving": Filter(
            later("Serving"),
            {
                "": (later("All"), Q()),
                "on": (later("Serving"), Q(is_deployed=True)),
                "off": (later("Not serving"), Q(is_deployed=False)),
            },
        ),
        "method": Filter(
            later("Method"),
            {"": (later("Any method"), Q())}
            | {method.value: (method_name(method), Q(method=method)) for method in Method},
        ),
    },
    orders={
        **NEWEST_FIRST,
        "name": (later("By name"), ("name", "id")),
        "size": (later("Largest first"), ("-bytes", "-id")),
    },
)
_EXPORTED = (
    "id", "adapter", "version", "model", "base_model", "method", "rank", "bytes", "is_serving", "created_at",
)  # fmt: skip


@require_safe
@organization_view(Permission.VIEW)
def index(request: OrganizationRequest) -> HttpResponse:
    project = find_current_project(request)
    page = _LIST.page(request, _listed(request, project))
    states = serving_states(versions=page.rows)
    made_by = find_jobs_of_adapters(organization=request.organization, versions=page.rows)
    context = {
        "rows": [
            {"version": version, "serving": states[version.pk], "job": made_by.get(version.pk)} for version in page.rows
        ],
        "project": project,
        "is_changing": any(state.state in CHANGING for state in states.values()),
        "may_write": has_permission(request.membership.role, Permission.ADAPTER_WRITE),
        "may_train": has_permission(request.membership.role, Permission.JOB_WRITE),
    }
    return render_list(request, "adapters/index.html", page, context)


@require_safe
@organization_view(Permission.VIEW)
def export(request: OrganizationRequest) -> HttpResponseBase:
    return _LIST.export(request, _listed(request, find_current_project(request)), header=_EXPORTED, cells=_exported)


def _listed(request: OrganizationRequest, project: Project | None) -> QuerySet[AdapterVersion]:
    deployed = Deployment.objects.filter(adapter_version=OuterRef("pk"), removed_at=None)
    rows = of_project(project, list_versions(organization=request.organization), field="adapter__project")
    return rows.annotate(is_deployed=Exists(deployed), name=Lower("adapter__name"))


def _exported(version: Any) -> tuple[object, ...]:
    return (
        version.pk, version.adapter.name, version.number or version.label, version.model_name,
        version.adapter.base_model.name, version.method, version.rank, version.bytes, version.is_deployed,
        version.created_at.isoformat(),
    )  # fmt: skip


@require_http_methods(["GET", "HEAD", "POST"])
@organization_view(Permission.ADAPTER_WRITE)
def stop_serving(request: OrganizationRequest) -> HttpResponse:
    """Stop serving one or several versions, after the user typed the name or the number of versions."""
    return confirm(request, _STOP)


def _find(request: OrganizationRequest, ids: Sequence[str]) -> list[AffectedRow]:
    return [
        AffectedRow(
            version.pk,
            version.adapter.name,
            gettext("Requests to %(model_name)s fail immediately. Its files are kept, and you can serve it again.")
            % {"model_name": version.model_name},
            reverse("web:adapter_detail", args=[version.pk]),
        )
        for version in list_versions(organization=request.organization).filter(pk__in=ids)
    ]


def _stop(request: OrganizationRequest, version_id: str) -> None:
    version = get_version(organization=request.organization, id=version_id)
    undeploy(version=version, by=request.membership.user_id, now=db_now())


_STOP = ConfirmedAction[OrganizationRequest](
    parameter="version",
    verb=later("Stop serving"),
    nouns=(later("adapter"), later("adapters")),
    warning=later("Programs that use these names get an error until you serve them again."),
    done=later("Stopped serving"),
    list_url_name="web:adapter_list",
    list_title=later("Adapters"),
    find=_find,
    act=_stop,
)
