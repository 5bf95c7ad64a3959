"""The wizard's compute step: every option with its memory, finish and cost, and the details of the chosen one."""

from collections.abc import Sequence
from functools import partial

from django.utils.translation import gettext

from apps.contracts.hyperparameters import Method
from apps.core.errors import DomainError
from apps.core.money import usd_decimal
from apps.estimates.ranking import Ranking
from apps.finetuning.quotes.options import PoolQuote, rank_quotes
from apps.finetuning.usage.charges import SpendCapTooLow, require_cap
from apps.interfaces.web.shell.access import OrganizationRequest
from apps.interfaces.web.shell.code_samples import job_samples
from apps.interfaces.web.wizard.plan import Plan, StepContext
from apps.interfaces.web.wizard.steps.compute_table import (
    ORDERS,
    TableView,
    compute_rows,
    cost_scatter,
    memory_lines,
    picture_rows,
    scatter_label,
)

_OF_MACHINES = ("compute.node_count", "hyperparameters.batch_size")  # what several machines cannot share


def compute_context(request: OrganizationRequest, plan: Plan) -> StepContext:
    """Return the context of the page and its live parts, without rows if the recipe or a field of the step is wrong."""
    found, problem = _quotes_or_field_error(plan)
    quotes = [] if plan.compute_form.errors else found
    now, needed_by = plan.now, plan.compute_form.deadline
    asked = plan.draft.get("pool") if plan.draft.get("pool") != request.GET.get("auto") else ""
    order = request.GET.get("sort", "")
    deadline = (needed_by - now).total_seconds() if needed_by else None
    # Options with several GPUs are shown on request, or if the page opens with one of them chosen.
    is_several_asked = "several" in request.GET or (":" in asked and not request.headers.get("HX-Request"))
    with_several = is_several_asked or _is_several_needed(quotes, deadline)
    shown = quotes if with_several else _few(quotes)
    ranking = rank_quotes(shown, deadline_seconds=deadline)
    preferred = plan.project.default_pool if plan.project and not needed_by else ""
    chosen = _chosen(shown, asked, ranking, pool=preferred)
    _require_cap(plan, chosen)
    view = TableView(
        chosen=chosen, ranking=ranking, order=order, now=now, needed_by=needed_by,
        way_url=partial(_way_url, plan),
    )  # fmt: skip
    rows = compute_rows(shown, view=view)
    row = next((row for row in rows if row.is_chosen), None)
    quote = chosen or best_quote(quotes)
    of_quote = row or next((row for row in rows if row.quoted is quote), None)
    values: dict[str, object] = {
        "rows": rows,
        "has_groups": len({each.group for each in rows}) > 1,
        "row": of_quote,
        "auto": chosen.key if chosen and not asked else "",
        "is_of_project": bool(chosen and not asked and chosen.pool.name == preferred),
        "compute_form": plan.compute_form,
        "form": plan.form,
        "needed_by": needed_by,
        "is_fastest_marked": any(each.is_fastest for each in rows),
        "is_late_everywhere": bool(needed_by and ranking.fastest and not ranking.recommended),
        "hidden_count": len(quotes) - len(shown),
        "with_several": with_several,
        # Several machines are offered if some could train together, or if the address names a number.
        "with_machines": plan.draft.get("node_count") not in ("", "1")
        or any(quoted.joining_workers > 1 for quoted in found),
        "orders": ORDERS,
        "order": order if order in dict(ORDERS) else "",
        "lines": memory_lines(of_quote, rows) if of_quote else None,
        "scatter": cost_scatter(rows, chosen=row, view=view),
        "scatter_label": scatter_label(rows, view=view),
        "picture": picture_rows(rows, view=view),
        "samples": samples(plan, chosen),
        "needs": gettext("Fix the highlighted fields")
        if plan.compute_form.errors or (plan.form and plan.form.errors)
        else "",
    }
    return StepContext(values, quote, problem)


def _quotes_or_field_error(plan: Plan) -> tuple[list[PoolQuote], DomainError | None]:
    """Return the plan's quotes, or the error that prevents them, unless a field of this step shows it."""
    quotes, problem = quotes_of(plan)
    if problem and plan.compute_form.nodes > 1 and problem.param in _OF_MACHINES:
        plan.compute_form.add_error("node_count", problem.message)
        return quotes, None
    if problem and plan.shown_at_field(problem):
        return quotes, None
    return quotes, problem


def _require_cap(plan: Plan, chosen: PoolQuote | None) -> None:
    """Add an error to a cap that does not cover one start on the chosen pool."""
    form = plan.compute_form
    if form.cap_nano is None or chosen is None:
        return
    try:
        require_cap(cap_nano=form.cap_nano, least_nano=chosen.least_cap_nano or 0)
    except SpendCapTooLow as low:
        form.add_error("cap", low.message)


def _way_url(plan: Plan, **changes: str) -> str:
    is_dora = plan.form is not None and plan.form.kind.use_dora
    if is_dora and changes.get("method") == Method.QLORA:
        changes["method"] = "qdora"
    return plan.draft.url(step="compute", **({"pool": ""} | changes))


def _is_several_needed(quotes: Sequence[PoolQuote], deadline_seconds: float | None) -> bool:
    """Return whether only options with several GPUs are sure to meet the deadline."""
    if deadline_seconds is None or rank_quotes(_few(quotes), deadline_seconds=deadline_seconds).recommended:
        return False
    return rank_quotes(quotes, deadline_seconds=deadline_seconds).recommended is not None


def _few(quotes: Sequence[PoolQuote]) -> list[PoolQuote]:
    """Return for each pool the option with one GPU of a machine and, if that does not fit, the one with the fewest.

    An option with one GPU that does not fit stays in the list: it shows why.
    """
    fitting = {quoted.pool.name for quoted in quotes if quoted.gpus_per_node == 1 and quoted.estimate.fits}
    fewest: dict[str, int] = {}
    for quoted in sorted(quotes, key=lambda quoted: quoted.gpu_count):
        if quoted.gpus_per_node > 1 and quoted.pool.name not in fitting:
            fewest.setdefault(quoted.pool.name, quoted.gpus_per_node)
    return [quoted for quoted in quotes if quoted.gpus_per_node in (1, fewest.get(quoted.pool.name))]


def quotes_of(plan: Plan) -> tuple[list[PoolQuote], DomainError | None]:
    """Return the plan's quotes, or the error that prevents them."""
    try:
        return plan.quotes(), None
    except DomainError as error:
        return [], error


def best_quote(quotes: Sequence[PoolQuote]) -> PoolQuote | None:
    """Return the quote to show as the price: the first launchable one, else the first with a price, else the first."""
    launchable = next((quoted for quoted in quotes if quoted.is_launchable), None)
    priced = next((quoted for quoted in quotes if quoted.estimate.cost_nano_p50 is not None), None)
    return launchable or priced or next(iter(quotes), None)


def _chosen(quotes: Sequence[PoolQuote], asked: str, ranking: Ranking, *, pool: str) -> PoolQuote | None:
    """Return the requested option if it is launchable, or else the first launchable one of the project's `pool`.

    Without either, return the recommended, the fastest, or the first launchable option.
    """
    launchable = {quoted.key: quoted for quoted in quotes if quoted.is_launchable}
    preferred = next((key for key, quoted in launchable.items() if quoted.pool.name == pool), None)
    for key in (asked, preferred, ranking.recommended, ranking.fastest):
        if key in launchable:
            return launchable[key]
    return next(iter(launchable.values()), None)


def samples(plan: Plan, quoted: PoolQuote | None) -> list[dict[str, str]]:
    """Return the plan as API calls to copy."""
    form = plan.form
    if form is None or not form.is_valid():
        return []
    cap_nano = plan.compute_form.cap_nano
    return job_samples(
        model=plan.draft.get("model"),
        training_file=plan.draft.get("dataset"),
        validation_file=plan.draft.get("validation"),
        suffix=form.cleaned_data["suffix"],
        method=form.kind.method,
        objective=form.chosen_objective,
        recipe=form.changed | ({"use_dora": True} if form.kind.use_dora else {}),
        grader=plan.after.changed,
        exports=plan.after.exports,
        metadata=plan.labels,
        integrations=plan.tracking.integrations,
        pool=quoted.pool.name if quoted else "",
        gpu_count=quoted.gpu_count if quoted else 1,
        node_count=plan.compute_form.nodes,
        cap_usd=usd_decimal(cap_nano) if cap_nano else "",
    )


def spread(quoted: PoolQuote | None) -> str:
    """Return half the cost range as a share of its middle, such as ±9%."""
    estimate = quoted.estimate if quoted else None
    if estimate is None or not estimate.cost_nano_p50 or estimate.cost_nano_p90 is None:
        return ""
    share = (estimate.cost_nano_p90 - (estimate.cost_nano_p10 or 0)) / 2 / estimate.cost_nano_p50
    return f"±{share:.0%}" if share >= 0.01 else ""
