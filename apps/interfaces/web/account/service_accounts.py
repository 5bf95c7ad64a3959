"""Service accounts: list, create, change role, remove. Their keys are on the page of API keys."""

from collections.abc import Sequence

from django import forms
from django.contrib import messages
from django.http import HttpResponse, QueryDict
from django.shortcuts import redirect, render
from django.utils.translation import gettext
from django.views.decorators.http import require_http_methods, require_POST

from apps.accounts.members import memberships, service_accounts
from apps.accounts.models import Membership
from apps.accounts.queries import MemberKind, list_service_accounts
from apps.accounts.roles import Permission, has_permission
from apps.core.database.clock import db_now
from apps.core.errors import InvalidState, InvalidValue
from apps.core.http.confirmation import AffectedRow, ConfirmedAction, confirm
from apps.core.http.forms import domain_errors_on
from apps.core.messages.translation import later
from apps.interfaces.web.account.forms import grantable_roles
from apps.interfaces.web.shell.access import OrganizationRequest, organization_view, require


class ServiceAccountForm(forms.Form):
    name = forms.CharField(max_length=80, label=later("Name"), help_text=later("Such as “nightly retraining”."))
    role = forms.ChoiceField(label=later("Role"), initial="member")

    def __init__(self, data: QueryDict | None = None, *, by: Membership) -> None:
        super().__init__(data)
        self.fields["role"].choices = _role_options(by)  # type: ignore[attr-defined]


@require_http_methods(["GET", "HEAD", "POST"])
@organization_view(Permission.VIEW, is_sensitive=True)
def index(request: OrganizationRequest) -> HttpResponse:
    """List service accounts. A POST creates one."""
    if request.method != "POST":
        return _page(request, ServiceAccountForm(by=request.membership))
    require(request.membership, Permission.MEMBER_MANAGE)
    form = ServiceAccountForm(request.POST, by=request.membership)
    if form.is_valid():
        with domain_errors_on(form):
            account = service_accounts.create_service_account(
                organization=request.organization, by=request.membership.user, now=db_now(), **form.cleaned_data
            )
            messages.success(request, gettext("%(name)s is created.") % {"name": account.user})
            return redirect("web:service_account_list")
    return _page(request, form, status=422)


def _page(request: OrganizationRequest, form: ServiceAccountForm, status: int = 200) -> HttpResponse:
    keys = service_accounts.count_active_keys(organization=request.organization, now=db_now())
    accounts = list_service_accounts(organization=request.organization)
    may_manage = has_permission(request.membership.role, Permission.MEMBER_MANAGE)
    context = {
        "accounts": [{"account": account, "keys": keys[account.user_id]} for account in accounts],
        "form": form,
        "may_manage": may_manage,
        "grantable": grantable_roles(request.membership) if may_manage else [],
        "role_options": _role_options(request.membership),
    }
    return render(request, "account/organization/service_accounts.html", context, status=status)


def _role_options(by: Membership) -> list[tuple[str, str]]:
    return [(role, gettext(role).capitalize()) for role in grantable_roles(by)]


@require_POST
@organization_view(Permission.MEMBER_MANAGE, is_sensitive=True)
def change_role(request: OrganizationRequest, service_account_id: str) -> HttpResponse:
    try:
        changed = memberships.change_role(
            organization=request.organization,
            membership_id=service_account_id,
            role=request.POST.get("role", ""),
            by=request.membership.user,
            now=db_now(),
            kind=MemberKind.SERVICE_ACCOUNT,
        )
    except (InvalidState, InvalidValue) as error:
        messages.error(request, error.message)
    else:
        messages.success(request, gettext("The role is now %(role)s.") % {"role": gettext(changed.role)})
    return redirect("web:service_account_list")


@require_http_methods(["GET", "HEAD", "POST"])
@organization_view(Permission.MEMBER_MANAGE, is_sensitive=True)
def remove(request: OrganizationRequest) -> HttpResponse:
    """Remove one or several service accounts, after the user typed the name or the number of accounts."""
    return confirm(request, _REMOVE)


def _find(request: OrganizationRequest, ids: Sequence[str]) -> list[AffectedRow]:
    keys = service_accounts.count_active_keys(organization=request.organization, now=db_now())
    accounts = list_service_accounts(organization=request.organization).filter(pk__in=ids)
    effect = gettext("Its API keys stop working at once. Active keys: %(count)s.")
    return [AffectedRow(each.pk, each.user.name, effect % {"count": keys[each.user_id]}) for each in accounts]


def _remove(request: OrganizationRequest, membership_id: str) -> None:
    memberships.remove_member(
        organization=request.organization,
        membership_id=membership_id,
        by=request.membership.user,
        now=db_now(),
        kind=MemberKind.SERVICE_ACCOUNT,
    )


_REMOVE = ConfirmedAction[OrganizationRequest](
    parameter="account",
    verb=later("Remove"),
    nouns=(later("service account"), later("service accounts")),
    warning=later("Revoked keys never work again. Jobs and models that the service account created stay."),
    done=later("Removed"),
    list_url_name="web:service_account_list",
    list_title=later("Service accounts"),
    find=_find,
    act=_remove,
)
