"""The forms of a new eval and of further runs. Both show their price before anything starts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
from django.contrib import messages
from django.db import transaction
from django.http import HttpResponse
from django.shortcuts import redirect, render
from django.utils.crypto import constant_time_compare, salted_hmac
from django.utils.translation import gettext, ngettext
from django.views.decorators.http import require_http_methods

from apps.accounts.roles import Permission
from apps.billing.queries import get_balance
from apps.core.errors import DomainError
from apps.core.http.forms import domain_errors_on
from apps.core.ids import new_ulid
from apps.interfaces.web.evals.criteria_forms import CriteriaForms, criteria_in
from apps.interfaces.web.evals.models_offered import list_models
from apps.interfaces.web.evals.run_forms import EvalForm, RunForm, can_run_again
from apps.interfaces.web.shell.access import OrganizationRequest, organization_view
from apps.interfaces.web.shell.current_project import project_of_new_work
from apps.serving.evals import operations, queries
from apps.serving.evals.criteria import PairwiseCriterion, SentCriterion
from apps.serving.evals.models import Eval
from apps.serving.evals.quotes import RunQuote, quote_run
from apps.serving.evals.sources import CompletionsSource

_CONFIG = {"type": "custom", "item_schema": {"type": "object"}, "include_sample_schema": True}


@dataclass(frozen=True, kw_only=True)
class QuotedRun:
    """A run that may start, with its request and its cost."""

    source: CompletionsSource
    quote: RunQuote

    @property
    def model_name(self) -> str:
        return self.source.model or ""


@dataclass(frozen=True, kw_only=True)
class EvalPrice:
    """The total price of a form's runs. `shown` has their values and prices; a page can start them only `once`."""

    runs: list[QuotedRun]
    available_nano: int
    shown: str
    once: str

    @property
    def highest_nano(self) -> int:
        return sum(each.quote.highest_cost_nano for each in self.runs)

    @property
    def is_affordable(self) -> bool:
        return self.highest_nano <= self.available_nano

    @property
    def confirmation(self) -> str:
        """The signed text that the page sends back to start the runs. A browser cannot choose `once`."""
        return f"{self.once}-{self._sign(self.once)}"

    def confirmed_once(self, sent: str) -> str | None:
        """Return the `once` of a confirmation that a page with this price sent; return None for any other text."""
        once, _, signature = sent.partition("-")
        return once if constant_time_compare(signature, self._sign(once)) else None

    def _sign(self, once: str) -> str:
        return salted_hmac("eval price", once + self.shown, algorithm="sha256").hexdigest()


@require_http_methods(["GET", "HEAD", "POST"])
@organization_view(Permission.INFERENCE)
def create(request: OrganizationRequest) -> HttpResponse:
    """Ask for criteria, rows and models; the address fills them in.

    A POST shows the price; a confirmed POST creates the eval and its runs.
    """
    models = list_models(organization=request.organization)
    sent = request.POST if request.method == "POST" else None
    criteria = CriteriaForms(sent, models=models, initial=criteria_in(request.GET, otherwise=[{}]))
    is_changed = sent is not None and criteria.is_changed_by(sent)
    initial = (request.GET if sent is None else sent).dict()
    form = EvalForm(None if is_changed else sent, organization=request.organization, models=models, initial=initial)
    if is_changed:
        return _answer(request, form, criteria, None, part="criteria")
    price = _price(request, form, criteria.criteria, criteria) if form.is_valid() & criteria.is_valid() else None
    if price and (started := _start_once(request, form, price, lambda: _create(request, form, criteria))):
        return started
    return _answer(request, form, criteria, price)


@require_http_methods(["GET", "HEAD", "POST"])
@organization_view(Permission.INFERENCE)
def run(request: OrganizationRequest, eval_id: str) -> HttpResponse:
    """Ask for a model, which `?run=` asks the same as that run; the address fills in the form.

    A confirmed POST starts the runs.
    """
    evaluated = queries.get_eval(organization=request.organization, id=eval_id)
    again = queries.get_run(evaluated=evaluated, id=request.GET["run"]) if request.GET.get("run") else None
    if again is not None and not can_run_again(again):
        again = None
    form = RunForm(
        request.POST if request.method == "POST" else None,
        organization=request.organization,
        models=list_models(organization=request.organization),
        again=again,
        initial=request.GET.dict(),
    )
    graded_by = msgspec.convert(evaluated.testing_criteria, list[SentCriterion])
    price = _price(request, form, graded_by, evaluated=evaluated) if form.is_valid() else None
    if price and (started := _start_once(request, form, price, lambda: evaluated)):
        return started
    return _answer(request, form, None, price, evaluated=evaluated, again=again)


def _start_once(
    request: OrganizationRequest, form: RunForm, price: EvalPrice, evaluate: Callable[[], Eval]
) -> HttpResponse | None:
    """Start the runs of a confirmed price and redirect to their eval. Return None if the page must be shown again.

    A page that is sent twice redirects to the eval of the runs that it started the first time.
    """
    once = price.confirmed_once(request.POST.get("confirmed", ""))
    if once is None or request.htmx:
        return None
    with domain_errors_on(form):
        with transaction.atomic():
            first_id = f"evalrun_{once}"
            if started := operations.find_started(organization=request.organization, run_id=first_id):
                return redirect("web:eval_detail", eval_id=started.evaluated_id)
            if not price.is_affordable:
                return None
            evaluated = evaluate()
            _start(request, evaluated, price, first_id)
        count = len(price.runs)
        messages.success(request, ngettext("The run starts.", "%(count)s runs start.", count) % {"count": count})
        return redirect("web:eval_detail", eval_id=evaluated.pk)
    return None


def _price(
    request: OrganizationRequest,
    form: RunForm,
    graded_by: Sequence[SentCriterion],
    criteria: CriteriaForms | None = None,
    evaluated: Eval | None = None,
) -> EvalPrice | None:
    """Return the price of the runs; return None if one cannot be created. The forms then have the error."""
    runs: list[QuotedRun] = []
    for field, source in form.sources():
        if _is_compared_with_itself(form, criteria, graded_by, field, source):
            return None
        try:
            quote = quote_run(
                organization=request.organization,
                project_id=evaluated.project_id if evaluated else "",  # a new eval reads files only
                criteria=graded_by,
                source=source,
            )
        except DomainError as error:
            if criteria is None or not criteria.place_error(error):
                form.place_error(error, model_field=field)
            return None
        runs.append(QuotedRun(source=source, quote=quote))
    return EvalPrice(
        runs=runs,
        available_nano=get_balance(organization=request.organization).available_nano,
        shown=repr((request.organization.pk, form.cleaned_data, graded_by, [each.quote for each in runs])),
        once=new_ulid(),
    )


def _is_compared_with_itself(
    form: RunForm,
    criteria: CriteriaForms | None,
    graded_by: Sequence[SentCriterion],
    field: str,
    source: CompletionsSource,
) -> bool:
    """Return whether a model is its own baseline; add the error to the field that names it."""
    text = gettext("This model is compared with itself. Choose another.")
    for number, one in enumerate(graded_by):
        if isinstance(one, PairwiseCriterion) and one.baseline_model == source.model:
            own = criteria.forms[number] if criteria else None
            if own is not None and "baseline_model" in own.fields:
                own.add_error("baseline_model", text)
            else:
                form.add_error(field, text)
            return True
    return False


def _create(request: OrganizationRequest, form: RunForm, criteria: CriteriaForms) -> Eval:
    return operations.create_eval(
        organization=request.organization,
        name=form.cleaned_data["name"],
        data_source_config=_CONFIG,
        criteria=criteria.criteria,
        metadata={},
        by=request.membership.user_id,
        project=project_of_new_work(request).pk,
    )


def _start(request: OrganizationRequest, evaluated: Eval, price: EvalPrice, first_id: str) -> None:
    """Create the runs, each with its price as the limit."""
    for number, each in enumerate(price.runs):
        operations.create_run(
            evaluated=evaluated,
            name=evaluated.name,
            data_source=msgspec.to_builtins(each.source),
            source=each.source,
            metadata={},
            cost_limit_nano=each.quote.highest_cost_nano,
            by=request.membership.user_id,
            id=None if number else first_id,
        )


def _answer(
    request: OrganizationRequest,
    form: RunForm,
    criteria: CriteriaForms | None,
    price: EvalPrice | None,
    *,
    part: str = "price",
    **context: object,
) -> HttpResponse:
    """Return the page; for htmx, only its part."""
    is_wrong = bool(form.errors or (criteria and criteria.errors))
    shown = {"form": form, "criteria": criteria, "price": None if is_wrong else price, **context}
    page = "evals/form.html" + (f"#{part}" if request.htmx else "")
    return render(request, page, shown, status=422 if is_wrong and not request.htmx else 200)
