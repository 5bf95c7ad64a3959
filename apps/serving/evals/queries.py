"""Queries on evals, their runs and the items of runs."""

from collections.abc import Sequence

from django.db.models import QuerySet
from django.utils.translation import gettext

from apps.accounts.members.visibility import visible
from apps.accounts.models import Organization
from apps.core.errors import NotFound
from apps.serving.evals.lifecycle import ItemStatus
from apps.serving.evals.models import Eval, EvalItem, EvalRun


def list_evals(*, organization: Organization | str) -> QuerySet[Eval]:
    """Return the evals that the request sees."""
    return visible(Eval.objects.for_organization(organization))


def get_eval(*, organization: Organization | str, id: str) -> Eval:
    """Return one eval. Raises NotFound, the same for unknown and foreign ids."""
    found = list_evals(organization=organization).filter(pk=id).first() if "\x00" not in id else None
    if found is None:
        text = gettext("No such eval: %(id)s.") % {"id": id[:80]}
        raise NotFound(text, param="eval_id", code="eval_not_found")
    return found


def list_runs(*, evaluated: Eval) -> QuerySet[EvalRun]:
    return EvalRun.objects.for_organization(evaluated.organization_id).filter(evaluated=evaluated)


def list_runs_of_all(*, organization: Organization | str) -> QuerySet[EvalRun]:
    """Return the runs of all evals that the request sees."""
    return visible(EvalRun.objects.for_organization(organization), project="evaluated__project")


def latest_runs(*, organization: Organization | str, evals: Sequence[Eval]) -> dict[str, EvalRun]:
    """Return the newest run of each eval by the eval's id; an eval without runs has no entry."""
    rows = EvalRun.objects.for_organization(organization).filter(evaluated__in=evals).defer("data_source")
    newest = rows.order_by("evaluated_id", "-created_at", "-pk").distinct("evaluated_id")
    return {row.evaluated_id: row for row in newest}


def get_run(*, evaluated: Eval, id: str) -> EvalRun:
    """Return one run of an eval. Raises NotFound."""
    found = list_runs(evaluated=evaluated).filter(pk=id).first() if "\x00" not in id else None
    if found is None:
        raise NotFound(f"No such run of this eval: {id[:80]}.", param="run_id", code="run_not_found")
    return found


def list_items(*, run: EvalRun) -> QuerySet[EvalItem]:
    """Return the items of a run that have a result."""
    items = EvalItem.objects.for_organization(run.organization_id).filter(run=run)
    return items.exclude(status=ItemStatus.PENDING)


def get_item(*, run: EvalRun, id: str) -> EvalItem:
    """Return one item of a run that has a result. Raises NotFound."""
    found = list_items(run=run).filter(pk=id).first() if "\x00" not in id else None
    if found is None:
        raise NotFound(f"No such output item of this run: {id[:80]}.", param="output_item_id", code="item_not_found")
    return found
