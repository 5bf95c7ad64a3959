"""The page that explains a charge, down to the run's seconds or the tokens of each hour."""

from django.http import Http404, HttpResponse
from django.shortcuts import render
from django.utils.translation import gettext
from django.views.decorators.http import require_safe

from apps.accounts.models import Organization
from apps.accounts.queries import names_of_keys
from apps.accounts.roles import Permission
from apps.billing.invoices.files import quantity_in_words
from apps.billing.usage.charge_details import Charge, find_charge, list_hours, list_postings
from apps.core.money import rated
from apps.finetuning.models import Run
from apps.finetuning.pools.prices import name_skus
from apps.finetuning.queries import list_jobs
from apps.finetuning.usage.charges import MINIMUM_SECONDS, estimate_loss_nano
from apps.interfaces.web.shell.access import OrganizationRequest, organization_view

_HOURS_SHOWN = 800  # a little more than a month


@require_safe
@organization_view(Permission.VIEW)
def show(request: OrganizationRequest, reference: str) -> HttpResponse:
    charge = find_charge(organization=request.organization, reference=reference)
    if charge is None:
        raise Http404
    names = names_of_keys(organization=request.organization, ids=[charge.key_id])
    context: dict[str, object] = {
        "charge": charge,
        "key_name": names.get(charge.key_id, charge.key_id),
        "quantity": quantity_in_words(charge.unit, charge.quantity),
    }
    if rule := charge.price_rule:
        context["sku"] = name_skus([rule.sku])[rule.sku]
    if charge.hold is not None:
        context |= _job(request.organization, charge)
    elif charge.kind in ("inference", "storage"):
        hours = list_hours(organization=request.organization, charge=charge)
        context |= {"hours": hours[:_HOURS_SHOWN], "hours_quantity": sum(hour.quantity for hour in hours)}
    return render(request, "billing/charge.html", context)


def _job(organization: Organization, charge: Charge) -> dict[str, object]:
    assert charge.hold is not None
    job = list_jobs(organization=organization).filter(pk=charge.hold.source).first()
    runs = (
        Run.objects.for_organization(organization).filter(job=job).order_by("attempt").select_related("pool")
        if job
        else []
    )
    price = charge.price_rule or (job.price_rule if job else None)
    has_moved = bool(job and job.moved_gpu_ms and price)  # each pool's attempts are in a charge of their own
    attempts = [
        {
            "run": run,
            "billed_seconds": run.billed_gpu_ms / 1000,
            "cost_nano": rated(quantity=run.billed_gpu_ms, price_nano=price.price_nano, per=price.per) if price else 0,
        }
        for run in runs
        if not has_moved or (price and price.sku == f"training:{run.pool.name}")
    ]
    return {
        "job": job,
        "price": price,
        "attempts": attempts,
        "billed_seconds": job.billed_gpu_ms / 1000 if job else 0,
        "is_minimum": job is not None and job.billed_gpu_ms > sum(run.billed_gpu_ms for run in runs),
        "minimum_seconds": MINIMUM_SECONDS,
        "estimate_loss_nano": job and estimate_loss_nano(job=job, gpu_ms=job.billed_gpu_ms, cost_nano=job.cost_nano),
        "postings": [
            (gettext(posted.get_kind_display()), posted)
            for posted in list_postings(organization=organization, hold=charge.hold)
        ],
    }
