"""API keys: list, create (shown once), revoke."""

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods, require_POST

from apps.accounts import operations, queries
from apps.accounts.models import ApiKey, Membership, Organization
from apps.accounts.roles import Permission, has_permission
from apps.core.clock import db_now
from apps.core.errors import DomainError
from apps.core.forms import add_domain_error
from apps.web.access import organization_view, require
from apps.web.forms.accounts import KeyForm


@never_cache
@require_http_methods(["GET", "HEAD", "POST"])
@organization_view(Permission.VIEW)
def index(request: HttpRequest, organization: Organization, membership: Membership) -> HttpResponse:
    """List keys; a POST makes one and shows its secret on the page that answers, and never again."""
    if request.method != "POST":
        return _page(request, organization, membership, KeyForm(by=membership))
    require(membership, Permission.KEY_MANAGE)
    form = KeyForm(request.POST, by=membership)
    issued = _issue(form, organization, membership) if form.is_valid() else None
    if issued is None:
        return _page(request, organization, membership, form, status=422)
    return _page(request, organization, membership, KeyForm(by=membership), issued=issued)


def _issue(form: KeyForm, organization: Organization, membership: Membership) -> operations.IssuedKey | None:
    now = db_now()
    try:
        return operations.issue_key(
            organization=organization,
            name=form.cleaned_data["name"],
            scopes=frozenset(form.cleaned_data["scopes"]),
            by=membership.user,
            expires_at=form.expires_at(now),
            limits=form.limits(),
            now=now,
        )
    except DomainError as error:
        add_domain_error(form, error)
        return None


def _page(
    request: HttpRequest,
    organization: Organization,
    membership: Membership,
    form: KeyForm,
    *,
    issued: operations.IssuedKey | None = None,
    status: int = 200,
) -> HttpResponse:
    manages_all = has_permission(membership.role, Permission.MEMBER_MANAGE)
    now = db_now()
    keys = [
        {"key": key, "status": key.status(now=now), "may_revoke": _may_revoke(key, membership, manages_all)}
        for key in queries.list_keys(organization=organization)
    ]
    context = {
        "keys": keys,
        "form": form,
        "issued": issued,
        "may_create": has_permission(membership.role, Permission.KEY_MANAGE),
    }
    return render(request, "keys/index.html", context, status=status)


def _may_revoke(key: ApiKey, membership: Membership, manages_all: bool) -> bool:
    return key.revoked_at is None and (manages_all or key.created_by_id == membership.user_id)


@require_POST
@organization_view(Permission.KEY_MANAGE)
def revoke(request: HttpRequest, organization: Organization, membership: Membership, key_id: str) -> HttpResponse:
    key = operations.revoke_key(organization=organization, key_id=key_id, by=membership.user, now=db_now())
    messages.success(request, f"The key {key.name} no longer works.")
    return redirect("web:key_list")
