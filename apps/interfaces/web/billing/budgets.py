"""The budgets of an organization, and the labels by which its keys are charged back."""

from django.contrib import messages
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.http import require_http_methods, require_POST

from apps.accounts.models import Membership, Organization
from apps.accounts.queries import list_keys, list_members
from apps.accounts.roles import Permission, has_permission
from apps.billing.budgets import end_budget, get_state, list_budgets, list_key_labels, set_budget, set_key_labels
from apps.billing.models import Budget, BudgetScope
from apps.core.database.clock import db_now
from apps.core.errors import DomainError
from apps.core.http.forms import add_domain_error
from apps.core.money import usd_to_nano
from apps.interfaces.web.billing.spending_forms import BudgetForm, KeyLabelsForm
from apps.interfaces.web.shell.access import organization_view, require


@require_http_methods(["GET", "HEAD", "POST"])
@organization_view(Permission.VIEW)
def index(request: HttpRequest, organization: Organization, membership: Membership) -> HttpResponse:
    """List budgets with the amounts spent and held under each; a POST sets one."""
    form = BudgetForm(request.POST or None, organization=organization)
    if request.method == "POST":
        require(membership, Permission.ORGANIZATION_MANAGE)
        if form.is_valid() and _set(form, organization, membership):
            messages.success(request, "The budget is in force; what the month has cost so far counts.")
            return redirect("web:budget_list")
    return _page(request, organization, membership, form, KeyLabelsForm(organization=organization))


def _set(form: BudgetForm, organization: Organization, membership: Membership) -> bool:
    data = form.cleaned_data
    try:
        set_budget(
            organization=organization,
            scope=data["scope"],
            target=form.target,
            limit_nano=usd_to_nano(data["limit_usd"]),
            mode=data["mode"],
            thresholds=data["thresholds"],
            by=membership.user_id,
            now=db_now(),
        )
    except DomainError as error:
        if error.param == "target" and data["scope"] in form.fields:
            form.add_error(data["scope"], error.message)
        else:
            add_domain_error(form, error)
        return False
    return True


@require_POST
@organization_view(Permission.ORGANIZATION_MANAGE)
def end(request: HttpRequest, organization: Organization, membership: Membership, budget_id: str) -> HttpResponse:
    if not end_budget(organization=organization, budget_id=budget_id, by=membership.user_id, now=db_now()):
        raise Http404
    messages.success(request, "The budget ended; nothing is limited by it any more.")
    return redirect("web:budget_list")


@require_POST
@organization_view(Permission.ORGANIZATION_MANAGE)
def label_key(request: HttpRequest, organization: Organization, membership: Membership) -> HttpResponse:
    form = KeyLabelsForm(request.POST, organization=organization)
    if not form.is_valid():
        return _page(request, organization, membership, BudgetForm(organization=organization), form)
    set_key_labels(
        organization=organization,
        key_id=form.cleaned_data["key"],
        labels=form.cleaned_data["labels"],
        by=membership.user_id,
    )
    messages.success(request, "Requests with this key are charged back by these labels from now on.")
    return redirect("web:budget_list")


def _page(
    request: HttpRequest, organization: Organization, membership: Membership, form: BudgetForm, labels: KeyLabelsForm
) -> HttpResponse:
    now = db_now()
    names = {key.pk: key.name for key in list_keys(organization=organization)}
    names |= {each.user_id: str(each.user) for each in list_members(organization=organization)}
    rows = []
    for budget in list_budgets(organization=organization):
        spent, held = get_state(budget=budget, now=now)
        share = min(100, (spent + held) * 100 // budget.limit_nano)
        rows.append(
            {"budget": budget, "name": _name(budget, names), "spent_nano": spent, "held_nano": held, "share": share}
        )
    key_labels = [(names.get(key_id, key_id), pairs) for key_id, pairs in list_key_labels(organization=organization)]
    context = {
        "rows": rows,
        "form": form,
        "labels_form": labels,
        "key_labels": key_labels,
        "may_manage": has_permission(membership.role, Permission.ORGANIZATION_MANAGE),
    }
    status = 422 if request.method == "POST" else 200
    return render(request, "budgets/index.html", context, status=status)


def _name(budget: Budget, names: dict[str, str]) -> str:
    if budget.scope == BudgetScope.ORGANIZATION:
        return "The whole organization"
    return names.get(budget.target, budget.target)
