"""The list of all workers, and the same rows as CSV."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

from django.db.models import Q, QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseBase
from django.utils.translation import gettext
from django.views.decorators.http import require_safe

from apps.core.database.listing import NEWEST_FIRST, Filter, Listing, render_list
from apps.core.messages.translation import later
from apps.finetuning.models import FineTuningJob, Worker, WorkerKind
from apps.finetuning.queries import list_pools
from apps.finetuning.usage.occupancy import jobs_on
from apps.interfaces.staff.access import operator_view

_STANDING = Q(revoked_at=None)
_LIST = Listing[Worker](
    name=later("workers"),
    hint=later("Machine, pool or id"),
    url_name="staff:worker_list",
    export_url_name="staff:worker_export",
    searched=("hostname", "pool__name", "id"),
    filters={
        "state": Filter(
            later("State"),
            {
                "": (later("All"), _STANDING),
                "open": (later("Takes work"), _STANDING & Q(cordoned_at=None, drain_requested_at=None)),
                "cordoned": (later("Cordoned"), _STANDING & Q(cordoned_at__isnull=False, drain_requested_at=None)),
                "draining": (later("Draining"), _STANDING & Q(drain_requested_at__isnull=False)),
                "revoked": (later("Revoked"), Q(revoked_at__isnull=False)),
            },
        ),
        "kind": Filter(
            later("Kind"),
            {
                "": (later("Any kind"), Q()),
                WorkerKind.TRAINER.value: (later("Trainer"), Q(kind=WorkerKind.TRAINER)),
                WorkerKind.REPLICA.value: (later("Replica"), Q(kind=WorkerKind.REPLICA)),
            },
        ),
    },
    orders={**NEWEST_FIRST, "name": (later("By name"), ("hostname", "id"))},
)
_EXPORTED = (
    "id", "hostname", "pool", "kind", "gpus", "memory_bytes", "created_at", "last_seen_at", "cordoned_at",
    "drain_requested_at", "revoked_at",
)  # fmt: skip


@require_safe
@operator_view
def index(request: HttpRequest) -> HttpResponse:
    page = _list().page(request, _workers())
    return render_list(request, "staff/machines/workers/list.html", page, {"rows": with_jobs(page.rows)})


def with_jobs(workers: Sequence[Worker]) -> list[dict[str, object]]:
    """Return each worker with the jobs that it works on: their ids, and the names of their organizations."""
    jobs = jobs_on(workers=[worker.pk for worker in workers])
    found = FineTuningJob.objects.filter(pk__in=list(chain.from_iterable(jobs.values())))
    owners = dict(found.values_list("pk", "organization__name"))
    return [
        {"worker": worker, "jobs": [(id, owners.get(id, "")) for id in jobs.get(worker.pk, [])]} for worker in workers
    ]


@require_safe
@operator_view
def export(request: HttpRequest) -> HttpResponseBase:
    return _list().export(request, _workers(), header=_EXPORTED, cells=_exported)


def _list() -> Listing[Worker]:
    pools = {pool.pk: (pool.name, Q(pool=pool.pk)) for pool in list_pools()}
    return replace(
        _LIST, filters={**_LIST.filters, "pool": Filter(gettext("Pool"), {"": (gettext("Any pool"), Q()), **pools})}
    )


def _workers() -> QuerySet[Worker]:
    return Worker.objects.select_related("pool__gpu_type")


def _exported(worker: Worker) -> tuple[object, ...]:
    moments = (
        worker.created_at, worker.last_seen_at, worker.cordoned_at, worker.drain_requested_at, worker.revoked_at,
    )  # fmt: skip
    return (
        worker.pk, worker.hostname, worker.pool.name, worker.kind, worker.gpu_count, worker.memory_bytes or "",
        *(moment.isoformat() if moment else "" for moment in moments),
    )  # fmt: skip
