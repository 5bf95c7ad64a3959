"""The status page: pools that take jobs, models that answer, and outcomes of the organization's last requests."""

import datetime
from dataclasses import dataclass

from django.db.models import Count
from django.http import HttpResponse
from django.shortcuts import render
from django.utils.translation import gettext
from django.views.decorators.http import require_safe

from apps.accounts.models import is_allowed
from apps.accounts.queries import regions_of
from apps.accounts.roles import Permission
from apps.billing.usage.traffic import list_traffic, total_of
from apps.catalog.models import BaseModel
from apps.catalog.queries import list_base_models
from apps.core.database.clock import db_now
from apps.finetuning.models import GpuPool, Worker
from apps.finetuning.queries import list_pools
from apps.finetuning.quotes.pool_facts import live_worker_filter
from apps.interfaces.web.shell.access import OrganizationRequest, organization_view
from apps.serving.ready_replicas import able_fleets, ready_replicas

_HOUR = datetime.timedelta(hours=1)


@dataclass(frozen=True)
class Part:
    """A pool or a model, and whether it works. `note` names the consequence."""

    name: str
    detail: str
    works: bool
    note: str


@require_safe
@organization_view(Permission.VIEW)
def show(request: OrganizationRequest) -> HttpResponse:
    """Show which of the organization's pools and models work now."""
    now = db_now()
    regions = regions_of(organization=request.organization)
    pools, models = _pools(regions, now), _models(regions)
    hour = now.replace(minute=0, second=0, microsecond=0)
    hours = list_traffic(organization=request.organization, since=hour - _HOUR, until=now, step="hour")
    context = {
        "groups": [
            (gettext("Training"), gettext("No GPU pool is open"), pools),
            (gettext("Requests"), gettext("No model is installed"), models),
        ],
        "is_well": bool(pools and models) and all(part.works for part in (*pools, *models)),
        "traffic": total_of(hours),
    }
    return render(request, "help/status.html", context)


def _pools(regions: list[str] | None, now: datetime.datetime) -> list[Part]:
    pools = [pool for pool in list_pools().filter(is_open=True) if is_allowed(regions, pool.region_id)]
    machines = {pool.machines_id for pool in pools}
    workers = Worker.objects.filter(live_worker_filter(now), pool__in=machines).order_by()
    live = dict(workers.values_list("pool").annotate(Count("pk")))
    return [_pool(pool, live.get(pool.machines_id, 0)) for pool in pools]


def _pool(pool: GpuPool, live: int) -> Part:
    capacity = getattr(pool, "capacity", None)
    starts = capacity is not None and capacity.is_elastic
    if live:
        note = gettext("Jobs start here.")
    elif starts:
        note = gettext("A machine starts when a job needs one.")
    else:
        note = gettext("Jobs wait until a worker is online.")
    return Part(pool.name, pool.gpu_type.name, bool(live or starts), note)


def _models(regions: list[str] | None) -> list[Part]:
    replicas, fleets = ready_replicas().filter(whole_model=None), able_fleets()
    if regions is not None:
        replicas, fleets = replicas.filter(region__in=regions), fleets.filter(region__in=regions)
    answering = set(replicas.values_list("base_model", flat=True))
    starting = set(fleets.values_list("base_model", flat=True))

    def note(model: BaseModel) -> str:
        if model.pk in answering:
            return gettext("It and its adapters answer.")
        if model.pk in starting:
            return gettext(
                "The next request starts a replica and waits up to a minute for it. Then it gets a 503 error."
            )
        return gettext("No replica is ready. Requests get a 503 error.")

    works = answering | starting
    return [
        Part(model.display_name, model.name, model.pk in works, note(model))
        for model in list_base_models(only_installed=True)
    ]
