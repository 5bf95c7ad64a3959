"""API keys: list, create (shown once), the same rows as CSV, and revoking one or several."""

import datetime
from collections.abc import Sequence

from django.db.models import Q, QuerySet
from django.db.models.functions import Coalesce, Lower, Now
from django.http import HttpResponse, HttpResponseBase
from django.shortcuts import redirect
from django.utils.timesince import timesince
from django.utils.translation import gettext
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods, require_safe

from apps.accounts import queries
from apps.accounts.login import key_operations
from apps.accounts.members import projects
from apps.accounts.models import ApiKey
from apps.accounts.roles import Permission, has_permission
from apps.billing.budget_settings import issue_key
from apps.core.database.clock import db_now
from apps.core.http.confirmation import AffectedRow, ConfirmedAction, confirm
from apps.core.http.forms import domain_errors_on
from apps.core.messages.translation import later
from apps.core.secrets.shown_once import keep_secret, take_secret
from apps.interfaces.web.account.forms import KeyForm
from apps.interfaces.web.shell.access import OrganizationRequest, organization_view, require
from apps.interfaces.web.shell.current_project import find_current_project, of_project
from apps.interfaces.web.shell.listing import NEWEST_FIRST, Filter, Listing, render_list

_SESSION_ISSUED = "issued_key"
_LIST = Listing[ApiKey](
    name=later("API keys"),
    hint=later("Name, prefix or creator"),
    url_name="web:key_list",
    export_url_name="web:key_export",
    searched=("name", "prefix", "id", "created_by__name", "created_by__email", "issued_by__name"),
    filters={
        "status": Filter(
            later("State"),
            {
                "": (later("All"), Q()),
                "active": (later("Active"), Q(revoked_at=None) & (Q(expires_at=None) | Q(expires_at__gt=Now()))),
                "expired": (later("Expired"), Q(revoked_at=None, expires_at__lte=Now())),
                "revoked": (later("Revoked"), Q(revoked_at__isnull=False)),
            },
        )
    },
    orders={
        **NEWEST_FIRST,
        "name": (later("By name"), ("sorted_name", "id")),
        "used": (later("Last used first"), ("-used_at", "-id")),
    },
)
_EXPORTED = ("id", "name", "prefix", "status", "scopes", "created_by", "created_at", "last_used_at", "expires_at")


@never_cache
@require_http_methods(["GET", "HEAD", "POST"])
@organization_view(Permission.VIEW, is_sensitive=True)
def index(request: OrganizationRequest) -> HttpResponse:
    """List keys. A POST creates one and redirects to a page that shows its secret once."""
    if request.method != "POST":
        issued_key = take_secret(request, _SESSION_ISSUED)
        return _page(request, _form(request), issued=issued_key)
    require(request.membership, Permission.KEY_MANAGE)
    form = _form(request)
    if form.is_valid():
        now = db_now()
        with domain_errors_on(form):
            issued = issue_key(
                organization=request.organization,
                name=form.cleaned_data["name"],
                scopes=frozenset(form.cleaned_data["scopes"]),
                by=request.membership.user,
                expires_at=form.expires_at(now),
                limits=form.limits(),
                now=now,
                service_account_id=form.cleaned_data["service_account"],
                project_id=form.cleaned_data["project"],
            )
            keep_secret(request, _SESSION_ISSUED, owner=issued.key.pk, secret=issued.secret)
            return redirect("web:key_list")
    return _page(request, form, status=422)


def _form(request: OrganizationRequest) -> KeyForm:
    data = request.POST if request.method == "POST" else None
    accounts = queries.list_service_accounts(organization=request.organization)
    offered = list(projects.list_projects(organization=request.organization))
    return KeyForm(
        data,
        by=request.membership,
        service_accounts=accounts,
        projects=offered,
        project=find_current_project(request),
    )


def _page(
    request: OrganizationRequest, form: KeyForm, *, issued: tuple[str, str] | None = None, status: int = 200
) -> HttpResponse:
    now = db_now()
    page = _LIST.page(request, _listed(request))
    leaked = queries.list_keys_known_to_others(organization=request.organization, keys=page.rows)
    user_id, manages_all = request.membership.user_id, has_permission(request.membership.role, Permission.MEMBER_MANAGE)
    context = {
        "keys": [
            {
                "key": key,
                "status": (status_of := key.status(now=now)),
                "may_revoke": key.revoked_at is None and (manages_all or key.created_by_id == user_id),
                "is_known_to_others": status_of == "active" and key.pk in leaked,
            }
            for key in page.rows
        ],
        "form": form,
        "issued": {"key_id": issued[0], "secret": issued[1]} if issued else None,
        "may_create": has_permission(request.membership.role, Permission.KEY_MANAGE),
    }
    return render_list(request, "account/organization/keys.html", page, context, status=status)


def _listed(request: OrganizationRequest) -> QuerySet[ApiKey]:
    keys = queries.list_keys(organization=request.organization).select_related("created_by", "issued_by", "project")
    keys = of_project(find_current_project(request), keys)
    return keys.annotate(sorted_name=Lower("name"), used_at=Coalesce("last_used_at", "created_at"))


@require_safe
@organization_view(Permission.VIEW)
def export(request: OrganizationRequest) -> HttpResponseBase:
    now = db_now()

    def cells(key: ApiKey) -> tuple[object, ...]:
        times = (key.created_at, key.last_used_at, key.expires_at)
        return (
            key.pk, key.name, key.prefix, key.status(now=now), " ".join(key.scopes), key.created_by,
            *(at.isoformat() if at else "" for at in times),
        )  # fmt: skip

    return _LIST.export(request, _listed(request), header=_EXPORTED, cells=cells)


@require_http_methods(["GET", "HEAD", "POST"])
@organization_view(Permission.KEY_MANAGE)
def revoke(request: OrganizationRequest) -> HttpResponse:
    """Revoke one or several keys, after the user typed the name or the number of keys."""
    return confirm(request, _REVOKE)


def _find(request: OrganizationRequest, ids: Sequence[str]) -> list[AffectedRow]:
    now = db_now()
    keys = queries.list_keys(organization=request.organization).filter(pk__in=ids)
    return [AffectedRow(key.pk, key.name, _effect_of(key, now)) for key in keys]


def _effect_of(key: ApiKey, now: datetime.datetime) -> str:
    if key.status(now=now) != "active":
        return gettext("It is %(status)s already.") % {"status": key.status(now=now)}
    used = (
        gettext("It was last used %(ago)s ago.") % {"ago": timesince(key.last_used_at, now, depth=1)}
        if key.last_used_at
        else gettext("It was never used.")
    )
    return gettext("Programs that use %(prefix)s… stop working at once. %(used)s") % {
        "prefix": key.prefix,
        "used": used,
    }


def _revoke(request: OrganizationRequest, key_id: str) -> None:
    key_operations.revoke_key(
        organization=request.organization, key_id=key_id, by=request.membership.user, now=db_now()
    )


_REVOKE = ConfirmedAction[OrganizationRequest](
    parameter="key",
    verb=later("Revoke"),
    nouns=(later("API key"), later("API keys")),
    warning=later(
        "A revoked key never works again, and neither do the keys that were made or rotated with it. "
        "Create a new key for the programs that need one."
    ),
    done=later("Revoked"),
    list_url_name="web:key_list",
    list_title=later("API keys"),
    find=_find,
    act=_revoke,
)
