"""Replicas: their state and adapters, and taking one out for an upgrade without an interruption."""

from django.conf import settings
from django.contrib import messages
from django.db.models import Count, Q, QuerySet
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.utils.translation import gettext
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods, require_POST, require_safe

from apps.contracts.serving import LoadState
from apps.core import audit
from apps.core.http.confirmation import say_undoable
from apps.interfaces.staff.access import operator_id, operator_view, sensitive_operator_view
from apps.interfaces.staff.forms import ReplicaRoomForm
from apps.serving import operations
from apps.serving.isolation import clear_replica
from apps.serving.metrics import metrics_token
from apps.serving.models import Replica
from apps.serving.ready_replicas import answering, standing_replicas
from apps.serving.reconciliation import list_checks


@require_safe
@operator_view
def index(request: HttpRequest) -> HttpResponse:
    """List every replica."""
    replicas = _replicas().order_by("base_model__name", "pk")
    return render(request, "staff/machines/replicas.html", {"replicas": replicas, "checks": list_checks()})


@never_cache
@require_http_methods(["GET", "HEAD", "POST"])
@sensitive_operator_view
def detail(request: HttpRequest, replica_id: str) -> HttpResponse:
    """Show one replica with its adapters and how to scrape its metrics; a POST also shows the token for that."""
    replica = get_object_or_404(_replicas(), pk=replica_id)
    spoken = replica.loaded.select_related("adapter_version__adapter", "organization").order_by("state", "pk")
    scrape = (
        f'curl -H "Authorization: Bearer $ANNEAL_METRICS_TOKEN" \\\n  {settings.INTERNAL_URL}/internal/v1/metrics\n'
    )
    if request.method == "POST":
        audit.record(organization=None, by=operator_id(request), action="metrics_token.shown", target=replica.pk)
    mine = replica.loaded.filter(state=LoadState.LOADED)
    others = answering().filter(replica__draining_at=None).exclude(replica=replica)
    context = {
        "replica": replica,
        # The adapters that no other replica has loaded: at zero, it may be stopped.
        "left": mine.exclude(adapter_version__in=others.values("adapter_version")).count(),
        "spoken": spoken[:200],
        "scrape": scrape,
        "token": metrics_token() if request.method == "POST" else "",
        "checks": list_checks(replica=replica),
    }
    return render(request, "staff/machines/replica.html", context)


@require_POST
@operator_view
def drain(request: HttpRequest, replica_id: str) -> HttpResponse:
    """Drain the replica; with ?off, put it back into service."""
    replica = get_object_or_404(Replica, pk=replica_id)
    is_out = "off" not in request.POST
    operations.drain_replica(replica=replica, is_draining=is_out, by=operator_id(request))
    words = gettext("gives its adapters to the others") if is_out else gettext("takes adapters again")
    text = gettext("The replica %(words)s.") % {"words": words}
    say_undoable(request, text, url=request.path, **({"off": "1"} if is_out else {}))
    return redirect("staff:replica_detail", replica_id=replica.pk)


@require_POST
@sensitive_operator_view
def accept(request: HttpRequest, replica_id: str) -> HttpResponse:
    """Accept the address that the replica gave at enrolment."""
    replica = get_object_or_404(Replica, pk=replica_id)
    operations.accept_address(replica=replica, by=operator_id(request))
    messages.success(request, gettext("Requests may be sent to %(url)s.") % {"url": replica.url})
    return redirect("staff:replica_detail", replica_id=replica.pk)


@require_POST
@sensitive_operator_view
def accept_room(request: HttpRequest, replica_id: str) -> HttpResponse:
    """Accept the room that the page showed, which the replica reports of its engine."""
    replica = get_object_or_404(Replica, pk=replica_id)
    form = ReplicaRoomForm(request.POST)
    if form.is_valid():
        operations.accept_room(replica=replica, by=operator_id(request), **form.cleaned_data)
        messages.success(request, gettext("Its reported capacity was accepted."))
    else:
        messages.error(request, gettext("Capacity is three whole numbers up to 10,000."))
    return redirect("staff:replica_detail", replica_id=replica.pk)


@require_POST
@operator_view
def clear(request: HttpRequest, replica_id: str) -> HttpResponse:
    """Clear an isolated replica, so that it gets requests again."""
    replica = get_object_or_404(Replica, pk=replica_id)
    clear_replica(replica=replica, by=operator_id(request))
    messages.success(request, gettext("The replica gets requests again."))
    return redirect("staff:replica_detail", replica_id=replica.pk)


def _replicas() -> QuerySet[Replica]:
    """Return the replicas, each with the number of adapters that it has loaded."""
    rows = standing_replicas().select_related(
        "base_model", "worker", "whole_model__adapter", "whole_model__organization"
    )
    return rows.annotate(loaded_count=Count("loaded", filter=Q(loaded__state=LoadState.LOADED)))
