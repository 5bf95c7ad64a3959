"""The quota of an organization, and the allowances that it sets for its members, labels and projects."""

from collections.abc import Callable, Sequence
from urllib.parse import urlencode

from django.contrib import messages
from django.http import HttpResponse
from django.shortcuts import redirect, render
from django.utils.translation import gettext
from django.views.decorators.http import require_http_methods

from apps.accounts.roles import Permission, has_permission
from apps.core.database.clock import db_now
from apps.core.errors import DomainError, InvalidState
from apps.core.http.confirmation import AffectedRow, ConfirmedAction, confirm
from apps.core.http.forms import domain_errors_on
from apps.core.messages.translation import later
from apps.core.templatetags.ui import bytes_, duration, number, tokens
from apps.finetuning.usage.allowances import end_allowance, list_allowances, set_allowance
from apps.finetuning.usage.quota_use import QuotaUse, list_quota_use, list_target_use
from apps.finetuning.usage.quotas import words_of
from apps.interfaces.web.billing.spending_forms import IN_UNITS, AllowanceForm
from apps.interfaces.web.shell.access import OrganizationRequest, organization_view, require

_NAMES: dict[str, tuple[str, Callable[[int], str]]] = {
    "concurrent_gpus": (later("GPUs at once"), number),
    "queued_jobs": (later("Unfinished jobs"), number),
    "gpu_seconds_per_month": (later("GPU time this month"), duration),
    "storage_bytes": (later("Storage"), bytes_),
    "requests_per_minute": (later("Requests per minute"), number),
    "tokens_per_minute": (later("Tokens per minute"), number),
    "concurrent_requests": (later("Requests at the same time"), number),
}


@require_http_methods(["GET", "HEAD", "POST"])
@organization_view(Permission.VIEW)
def index(request: OrganizationRequest) -> HttpResponse:
    """Show how much of each limit is used, held and left. A POST sets an allowance of a member, label or project."""
    now = db_now()
    uses = list_target_use(organization=request.organization, now=now)
    asked = request.POST if request.method == "POST" else request.GET
    target = asked.get("target", "") or asked.get(asked.get("scope", ""), "")
    chosen = next((use for use in uses if (use.scope.value, use.target) == (asked.get("scope"), target)), None)
    form = AllowanceForm(request.POST or None, organization=request.organization, chosen=chosen, asked=asked.dict())
    if request.method == "POST":
        require(request.membership, Permission.ORGANIZATION_MANAGE)
        if form.is_valid():
            with domain_errors_on(form):
                _set(request, form)
                messages.success(request, gettext("Saved. Usage so far this month counts."))
                return redirect("web:quota_list")
    context = {
        "limits": [_row(use) for use in list_quota_use(organization=request.organization, now=now)],
        "targets": [
            {
                "use": use,
                "limits": [_row(each) for each in use.limits],
                "recent_time": duration(use.recent.gpu_seconds),
                "recent_bytes": bytes_(use.recent.stored_bytes),
                "recent_requests": number(use.recent.requests.requests),
                "recent_tokens": tokens(use.recent.requests.tokens),
                "query": urlencode({"scope": use.scope.value, "target": use.target}),
            }
            for use in uses
        ],
        "form": form,
        "may_manage": has_permission(request.membership.role, Permission.ORGANIZATION_MANAGE),
    }
    return render(request, "billing/quotas.html", context, status=422 if request.method == "POST" else 200)


def _set(request: OrganizationRequest, form: AllowanceForm) -> None:
    scope = form.cleaned_data["scope"]
    try:
        set_allowance(
            organization=request.organization,
            scope=scope,
            target=form.target,
            limits=form.limits,
            by=request.membership.user_id,
            now=db_now(),
        )
    except DomainError as error:
        fields = {"target": scope} | {name: field for name, (field, *_) in IN_UNITS.items()}
        error.param = fields.get(error.param or "", error.param)
        raise


@require_http_methods(["GET", "HEAD", "POST"])
@organization_view(Permission.ORGANIZATION_MANAGE, is_sensitive=True)
def end(request: OrganizationRequest) -> HttpResponse:
    return confirm(request, _END)


def _find(request: OrganizationRequest, ids: Sequence[str]) -> list[AffectedRow]:
    found = list_allowances(organization=request.organization).filter(pk__in=ids)
    effect = gettext("Its jobs can use the rest of the organization's quota. Jobs that it held back can start.")
    return [AffectedRow(each.pk, words_of(each), effect) for each in found]


def _end(request: OrganizationRequest, allowance_id: str) -> None:
    if not end_allowance(organization=request.organization, allowance_id=allowance_id, by=request.membership.user_id):
        raise InvalidState(gettext("The allowance has ended already."))


_END = ConfirmedAction[OrganizationRequest](
    parameter="allowance",
    verb=later("End the allowance of"),
    nouns=(later("allowance"), later("allowances")),
    warning=later("You can set a new allowance at any time. Use so far this month counts towards it."),
    done=later("Ended the allowance of"),
    list_url_name="web:quota_list",
    list_title=later("Quotas"),
    find=_find,
    act=_end,
)


def _row(use: QuotaUse) -> dict[str, object]:
    """Return one limit in words; `share` is the percentage that is used or held, None without a limit or a count."""
    name, words = _NAMES[use.name]
    taken = None if use.used is None else use.used + (use.held or 0)
    return {
        "name": name,
        "limit": gettext("no limit") if use.limit is None else words(use.limit),
        "used": "–" if use.used is None else words(use.used),
        "held": words(use.held) if use.held else "–",
        "available": "–" if use.available is None else words(use.available),
        "is_limited": use.limit is not None,
        "share": None if use.limit is None or taken is None else min(100, taken * 100 // max(use.limit, 1)),
    }
