"""GPU pools: create, edit, and admit workers with a one-time token."""

import datetime
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from django.conf import settings
from django.contrib import messages
from django.db import transaction
from django.db.models import Aggregate, Count, Min, QuerySet, Sum
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.urls import reverse
from django.utils.http import urlencode
from django.utils.translation import gettext
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods, require_POST

from apps.catalog.models import PriceRequest, PriceRule
from apps.catalog.queries import list_active_prices
from apps.core.database.clock import db_now
from apps.core.database.keyset import read_page
from apps.core.http.forms import domain_errors_on
from apps.core.messages.outbox import list_failing
from apps.core.money import usd_to_nano
from apps.core.objects.page_tables import rows_at_once
from apps.core.secrets.shown_once import keep_secret, take_secret
from apps.estimates.physics.gpus import GIB
from apps.finetuning import queries
from apps.finetuning.lifecycle import RUN_HOLDING_LEASE, RunStatus
from apps.finetuning.models import GpuPool, Run, Worker, WorkerKind
from apps.finetuning.pools import operations
from apps.finetuning.pools.capacity.fleets import list_fleets
from apps.finetuning.pools.capacity.settings import list_recent_nodes
from apps.finetuning.pools.prices import price_sku
from apps.finetuning.quotes.pool_facts import live_worker_filter, newest_probes, seconds_ahead, training_sku
from apps.interfaces.staff.access import operator_id, operator_view, sensitive_operator_view
from apps.interfaces.staff.live import is_poll, render_live
from apps.interfaces.staff.machines.capacity_form import CapacityForm, FleetForm, capacity_form_of, fleet_form_of
from apps.interfaces.staff.machines.pool_forms import NewPoolForm, PoolEditForm, WorkerTokenForm
from apps.interfaces.staff.machines.worker_list import with_jobs

_SESSION_COMMAND = "admission_command"
_WORKERS_SHOWN = 25
_REPLICA_PORT = 8003  # as in deploy/compose.yaml


@require_http_methods(["GET", "HEAD", "POST"])
@sensitive_operator_view
def index(request: HttpRequest) -> HttpResponse:
    """List the pools, and the platform's debts and faults above them; a POST creates a pool, and sets its price."""
    form = NewPoolForm(request.POST or None)
    if request.method == "POST" and form.is_valid():
        with domain_errors_on(form), transaction.atomic():
            pool, price = _create_pool(form, by=operator_id(request))
            if price is None:
                next_step = gettext("Set its price, then admit a worker")
            elif isinstance(price, PriceRequest):
                next_step = gettext("Its price waits for another operator. Admit a worker")
            else:
                next_step = gettext("Admit a worker")
            messages.success(
                request,
                gettext("The pool %(name)s is open. %(next_step)s.") % {"name": pool.name, "next_step": next_step},
            )
            return redirect("staff:pool_detail", pool_id=pool.pk)
    status = 422 if request.method == "POST" else 200
    context = {"rows": list_loads(list(queries.list_pools())), "form": form, "stuck": list_failing()}
    return render(request, "staff/machines/pools.html", context, status=status)


def _create_pool(form: NewPoolForm, *, by: str) -> tuple[GpuPool, PriceRule | PriceRequest | None]:
    """Create the pool, and set or request the price of the form, if it has one. Raises InvalidValue."""
    data = form.cleaned_data
    pool = operations.create_pool(
        name=data["name"],
        gpu_type=data["gpu_type"],
        region=data["region"],
        memory_bytes=form.memory_bytes,
        interruptions_per_hour=form.spot_interruptions,
        price_policy=data["price_policy"],
        firm_factor=data["firm_factor"],
        borrows_from=data["borrows_from"],
        by=by,
    )
    if not data["price_usd"]:
        return pool, None
    price = price_sku(
        sku=training_sku(pool), price_nano=usd_to_nano(data["price_usd"]), organization=None, tiers=(),
        effective_from=None, by=by, now=db_now(),
    )  # fmt: skip
    return pool, price


@never_cache
@require_http_methods(["GET", "HEAD", "POST"])
@operator_view
def detail(request: HttpRequest, pool_id: str) -> HttpResponse:
    """Show one pool with a page of its workers; a POST edits it."""
    pool = get_object_or_404(queries.list_pools(), pk=pool_id)
    if request.method != "POST":
        return show_pool(request, pool)
    form = PoolEditForm(request.POST)
    if form.is_valid():
        with domain_errors_on(form):
            operations.edit_pool(
                pool=pool,
                region=form.cleaned_data["region"],
                memory_bytes=form.memory_bytes,
                is_open=form.cleaned_data["is_open"],
                serves_whole_models=form.cleaned_data["serves_whole_models"],
                interruptions_per_hour=form.spot_interruptions,
                price_policy=form.cleaned_data["price_policy"],
                firm_factor=form.cleaned_data["firm_factor"],
                by=operator_id(request),
            )
            messages.success(request, gettext("The pool %(name)s was saved.") % {"name": pool.name})
            return redirect("staff:pool_detail", pool_id=pool.pk)
        pool = queries.list_pools().get(pk=pool_id)  # as it was
    return show_pool(request, pool, form, status=422)


@never_cache
@require_POST
@sensitive_operator_view
def issue_token(request: HttpRequest, pool_id: str) -> HttpResponse:
    """Create a one-time token and redirect to the pool, which shows once the command that uses it."""
    pool = get_object_or_404(queries.list_pools(), pk=pool_id)
    form = WorkerTokenForm(request.POST)
    if form.is_valid():
        with domain_errors_on(form):
            token = operations.issue_worker_token(
                pool=pool,
                kind=form.cleaned_data["kind"],
                base_model=form.cleaned_data["base_model"],
                whole_model=form.cleaned_data["whole_model"],
                by=operator_id(request),
            )
            command = _admission_command(pool, form.cleaned_data["kind"], token)
            keep_secret(request, _SESSION_COMMAND, owner=pool.pk, secret=command)
            return redirect("staff:pool_detail", pool_id=pool.pk)
    return show_pool(request, pool, token_form=form, status=422)


def _admission_command(pool: GpuPool, kind: str, token: str) -> str:
    """Return the shell command for the new machine; a replica's also gives the address where the gateway reaches it."""
    where = (
        f"ANNEAL_REPLICA_LISTEN=0.0.0.0:{_REPLICA_PORT} ANNEAL_REPLICA_URL=http://$(hostname -f):{_REPLICA_PORT} "
        if kind == WorkerKind.REPLICA
        else ""
    )
    return (
        f"ANNEAL_INTERNAL_URL={settings.INTERNAL_URL} ANNEAL_POOL={pool.name} {where}"
        f"python -m gpu_workers.common.enrolment --kind {kind} --token {token}"
    )


@dataclass(frozen=True, kw_only=True)
class PoolLoad:
    """A pool with its price, its trainers and its runs. `oldest_at` is when the longest waiting run was queued.

    `gpus` are those of all its trainers, or of those that it borrows, and `leased` those that runs have: its own, and
    those to which it lends.
    """

    pool: GpuPool
    sku: str
    price: PriceRule | None
    live: int
    workers: int
    gpus: int
    leased: int
    running: int
    queued: int
    oldest_at: datetime.datetime | None


def list_loads(pools: Sequence[GpuPool]) -> list[PoolLoad]:
    """Return the load of each pool, in a fixed number of queries."""
    prices = {rule.sku: rule for rule in list_active_prices(prefix="training:")}
    machines = {pool.machines_id for pool in pools}
    trainers = Worker.objects.filter(pool__in=machines, kind=WorkerKind.TRAINER)
    joined = _counts(trainers.filter(revoked_at=None), gpus=Sum(Worker.GPU_COUNT))
    live = _counts(trainers.filter(live_worker_filter(db_now())))
    runs = Run.objects.filter(pool__in=pools)
    running = _counts(runs.filter(status__in=RUN_HOLDING_LEASE), gpus=Sum("job__gpu_count"))
    waiting = runs.filter(status=RunStatus.QUEUED)
    queued = _counts(waiting)
    lent = Run.objects.filter(pool__borrows_from__in=pools, status__in=RUN_HOLDING_LEASE).order_by()
    lent_gpus = dict(lent.values_list("pool__borrows_from").annotate(Sum("job__gpu_count")))
    oldest = dict(waiting.order_by().values_list("pool").annotate(Min("created_at")))
    return [
        PoolLoad(
            pool=pool,
            sku=training_sku(pool),
            price=prices.get(training_sku(pool)),
            live=live[pool.machines_id][0],
            workers=joined[pool.machines_id][0],
            gpus=joined[pool.machines_id][1],
            leased=running[pool.pk][1] + lent_gpus.get(pool.pk, 0),
            running=running[pool.pk][0],
            queued=queued[pool.pk][0],
            oldest_at=oldest.get(pool.pk),
        )
        for pool in pools
    ]


def _counts(rows: QuerySet[Worker] | QuerySet[Run], *, gpus: Aggregate | None = None) -> Mapping[str, tuple[int, int]]:
    """Return the number of rows and the sum of `gpus` by pool."""
    counts = rows.order_by().values_list("pool").annotate(Count("pk"), gpus=gpus or Count("pk"))
    return defaultdict(lambda: (0, 0), {pool: (number, sum_of_gpus) for pool, number, sum_of_gpus in counts})


def _edit_form(pool: GpuPool) -> PoolEditForm:
    return PoolEditForm(
        initial={
            "region": pool.region_id,
            "memory_gib": round(pool.memory_bytes / GIB, 2),
            "is_open": pool.is_open,
            "serves_whole_models": pool.serves_whole_models,
            "is_spot": pool.is_spot,
            "interruptions_per_hour": pool.interruptions_per_hour or None,
            "price_policy": pool.price_policy,
            "firm_factor": pool.firm_factor,
        }
    )


def show_pool(
    request: HttpRequest,
    pool: GpuPool,
    form: PoolEditForm | None = None,
    *,
    token_form: WorkerTokenForm | None = None,
    capacity_form: CapacityForm | None = None,
    fleet_form: FleetForm | None = None,
    status: int = 200,
) -> HttpResponse:
    """Answer with the pool's page, and those of its forms that were refused. Its machines and load stay current."""
    now, context = db_now(), _present(request, pool)
    if not is_poll(request):
        shown = take_secret(request, _SESSION_COMMAND, owner=pool.pk)
        context |= {
            "form": form or _edit_form(pool),
            "capacity_form": capacity_form or capacity_form_of(pool),
            "fleet_form": fleet_form or fleet_form_of(pool, fleet_id=request.GET.get("fleet", "")),
            "token_form": token_form or WorkerTokenForm(),
            "command": shown[1] if shown else "",
        }
    url = reverse("staff:pool_detail", args=[pool.pk])
    return render_live(request, "staff/machines/pool.html", context, now=now, url=url, status=status)


def _present(request: HttpRequest, pool: GpuPool) -> dict[str, object]:
    """Return the part that open pages ask for again: the load of the pool, and a page of its workers."""
    size = rows_at_once(request, "workers", _WORKERS_SHOWN)
    page = read_page(queries.list_workers(pool=pool), request.GET, order=("created_at", "id"), size=size)
    return vars(list_loads([pool])[0]) | {
        "seconds_ahead": seconds_ahead(pool=pool),
        "capacity": getattr(pool, "capacity", None),
        "nodes": list_recent_nodes(pool=pool),
        "fleets": list_fleets(pool=pool),
        "members": with_jobs(page.rows),
        "previous": f"?{urlencode(page.previous)}" if page.previous else "",
        "next": f"?{urlencode(page.next)}" if page.next else "",
        "probes": newest_probes(pool=pool.machines),
    }
