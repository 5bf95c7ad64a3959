"""API keys: list, create (shown once), revoke."""

from django.contrib import messages
from django.http import HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods, require_POST

from apps.accounts import operations, queries
from apps.accounts.roles import Permission, has_permission
from apps.core.database.clock import db_now
from apps.core.http.forms import domain_errors_on
from apps.core.http.shown_once import keep_secret, take_secret
from apps.interfaces.web.account.forms import KeyForm
from apps.interfaces.web.shell.access import OrganizationRequest, organization_view, require

_SESSION_ISSUED = "issued_key"


@never_cache
@require_http_methods(["GET", "HEAD", "POST"])
@organization_view(Permission.VIEW, is_sensitive=True)
def index(request: OrganizationRequest) -> HttpResponse:
    """List keys. A POST creates one and redirects to a page that shows its secret once."""
    if request.method != "POST":
        issued_key = take_secret(request, _SESSION_ISSUED)
        return _page(request, KeyForm(by=request.membership), issued=issued_key)
    require(request.membership, Permission.KEY_MANAGE)
    form = KeyForm(request.POST, by=request.membership)
    if form.is_valid():
        now = db_now()
        with domain_errors_on(form):
            issued = operations.issue_key(
                organization=request.organization,
                name=form.cleaned_data["name"],
                scopes=frozenset(form.cleaned_data["scopes"]),
                by=request.membership.user,
                expires_at=form.expires_at(now),
                limits=form.limits(),
                now=now,
            )
            keep_secret(request, _SESSION_ISSUED, owner=issued.key.pk, secret=issued.secret)
            return redirect("web:key_list")
    return _page(request, form, status=422)


def _page(
    request: OrganizationRequest, form: KeyForm, *, issued: tuple[str, str] | None = None, status: int = 200
) -> HttpResponse:
    manages_all = has_permission(request.membership.role, Permission.MEMBER_MANAGE)
    now = db_now()
    keys = [
        {
            "key": key,
            "status": key.status(now=now),
            "may_revoke": key.revoked_at is None and (manages_all or key.created_by_id == request.membership.user_id),
        }
        for key in queries.list_keys(organization=request.organization)
    ]
    context = {
        "keys": keys,
        "form": form,
        "issued": {"key_id": issued[0], "secret": issued[1]} if issued else None,
        "may_create": has_permission(request.membership.role, Permission.KEY_MANAGE),
    }
    return render(request, "organization/keys.html", context, status=status)


@require_POST
@organization_view(Permission.KEY_MANAGE)
def revoke(request: OrganizationRequest, key_id: str) -> HttpResponse:
    key = operations.revoke_key(
        organization=request.organization, key_id=key_id, by=request.membership.user, now=db_now()
    )
    messages.success(request, f"“{key.name}” was revoked.")
    return redirect("web:key_list")
