"""The budgets of an organization, and the labels by which its keys are charged back."""

from collections.abc import Sequence

from django.contrib import messages
from django.http import HttpResponse
from django.shortcuts import redirect, render
from django.utils.translation import gettext
from django.views.decorators.http import require_http_methods, require_POST

from apps.accounts.members.projects import names_of_projects
from apps.accounts.queries import names_of_creators, names_of_keys
from apps.accounts.roles import Permission, has_permission
from apps.billing.budget_settings import end_budget, set_budget, set_key_labels
from apps.billing.budgets import get_states, list_budgets, list_key_labels
from apps.core.database.clock import db_now
from apps.core.errors import DomainError, InvalidState
from apps.core.http.confirmation import AffectedRow, ConfirmedAction, confirm
from apps.core.http.forms import domain_errors_on
from apps.core.messages.translation import later
from apps.core.money import usd_to_nano
from apps.core.templatetags.ui import usd
from apps.interfaces.web.billing.spending_forms import BudgetForm, KeyLabelsForm
from apps.interfaces.web.shell.access import OrganizationRequest, organization_view, require


@require_http_methods(["GET", "HEAD", "POST"])
@organization_view(Permission.VIEW)
def index(request: OrganizationRequest) -> HttpResponse:
    """List budgets with the amounts spent and held under each; a POST sets one."""
    form = BudgetForm(request.POST or None, organization=request.organization, asked=request.GET.dict())
    if request.method == "POST":
        require(request.membership, Permission.ORGANIZATION_MANAGE)
        if form.is_valid():
            data = form.cleaned_data
            with domain_errors_on(form):
                try:
                    set_budget(
                        organization=request.organization,
                        scope=data["scope"],
                        target=form.target,
                        limit_nano=usd_to_nano(data["limit_usd"]),
                        mode=data["mode"],
                        thresholds=data["thresholds"],
                        by=request.membership.user_id,
                        now=db_now(),
                    )
                except DomainError as error:
                    if error.param == "target":
                        error.param = data["scope"]  # the field that holds the target
                    raise
                messages.success(request, gettext("Budget saved. Spend so far this month counts."))
                return redirect("web:budget_list")
    return _page(request, form, KeyLabelsForm(organization=request.organization))


@require_http_methods(["GET", "HEAD", "POST"])
@organization_view(Permission.ORGANIZATION_MANAGE, is_sensitive=True)
def end(request: OrganizationRequest) -> HttpResponse:
    return confirm(request, _END)


def _find(request: OrganizationRequest, ids: Sequence[str]) -> list[AffectedRow]:
    budgets = list(list_budgets(organization=request.organization).filter(pk__in=ids))
    names = _names_of(request, [budget.target for budget in budgets])
    return [
        AffectedRow(
            budget.pk,
            names.get(budget.target, budget.target),
            gettext(
                "The limit of %(limit)s a month no longer applies. Send what it refused once more, and resume the jobs "
                "that it paused."
            )
            % {"limit": usd(budget.limit_nano)},
        )
        for budget in budgets
    ]


def _end(request: OrganizationRequest, budget_id: str) -> None:
    if not end_budget(
        organization=request.organization, budget_id=budget_id, by=request.membership.user_id, now=db_now()
    ):
        raise InvalidState(gettext("The budget has ended already."))


_END = ConfirmedAction[OrganizationRequest](
    parameter="budget",
    verb=later("End the budget of"),
    nouns=(later("budget"), later("budgets")),
    warning=later("You can set a new budget at any time. Spend so far this month counts towards it."),
    done=later("Ended the budget of"),
    list_url_name="web:budget_list",
    list_title=later("Budgets"),
    find=_find,
    act=_end,
)


@require_POST
@organization_view(Permission.ORGANIZATION_MANAGE)
def label_key(request: OrganizationRequest) -> HttpResponse:
    form = KeyLabelsForm(request.POST, organization=request.organization)
    if not form.is_valid():
        return _page(request, BudgetForm(organization=request.organization), form)
    with domain_errors_on(form):
        set_key_labels(
            organization=request.organization,
            key_id=form.cleaned_data["key"],
            labels=form.cleaned_data["labels"],
            by=request.membership.user_id,
        )
        messages.success(request, gettext("Labels saved. They apply to new requests with this key."))
        return redirect("web:budget_list")
    return _page(request, BudgetForm(organization=request.organization), form)


def _page(request: OrganizationRequest, form: BudgetForm, labels: KeyLabelsForm) -> HttpResponse:
    rows = []
    budgets = list(list_budgets(organization=request.organization))
    labelled = list_key_labels(organization=request.organization)
    names = _names_of(request, [*(budget.target for budget in budgets), *(key_id for key_id, _ in labelled)])
    states = get_states(organization=request.organization, budgets=budgets, now=db_now())
    for budget in budgets:
        spent, held = states[budget.pk]
        share = min(100, (spent + held) * 100 // budget.limit_nano)
        rows.append(
            {
                "budget": budget,
                "name": names.get(budget.target, budget.target),
                "spent_nano": spent,
                "held_nano": held,
                "share": share,
            }
        )
    context = {
        "rows": rows,
        "form": form,
        "labels_form": labels,
        "key_labels": [(names.get(key_id, key_id), pairs) for key_id, pairs in labelled],
        "may_manage": has_permission(request.membership.role, Permission.ORGANIZATION_MANAGE),
    }
    status = 422 if request.method == "POST" else 200
    return render(request, "billing/budgets.html", context, status=status)


def _names_of(request: OrganizationRequest, ids: Sequence[str]) -> dict[str, str]:
    """Return the names of keys, members and projects, and of the target of the organization's own budget."""
    names = {"": gettext("The whole organization")} | names_of_keys(organization=request.organization, ids=ids)
    names |= names_of_projects(organization=request.organization, ids=ids)
    return names | names_of_creators(organization=request.organization)
