"""The replicas that may get requests, which are ready and reported recently, and the adapters they have loaded."""

import datetime

from django.db.models import Exists, OuterRef, Q, QuerySet
from django.db.models.functions import Now

from apps.contracts.serving import LoadState
from apps.serving.models import LoadedAdapter, Placement, Replica, ReplicaFleet

FAILURES = (LoadState.FAILED, LoadState.REJECTED)
_STALE = datetime.timedelta(seconds=30)  # a replica silent for this long gets no requests
_ABLE = datetime.timedelta(seconds=90)  # pools are looked at every ten seconds, and half a minute after a fault


def standing_replicas() -> QuerySet[Replica]:
    """Return all replicas except those whose machine was released."""
    return Replica.objects.filter(retired_at=None)


def ready_replicas() -> QuerySet[Replica]:
    trusted = Replica.objects.filter(isolated_at=None, is_address_accepted=True)
    return trusted.filter(is_ready=True, observed_at__gte=Now() - _STALE)


def able_fleets() -> QuerySet[ReplicaFleet]:
    """Return the fleets that have a replica, or could start one when their pool was last checked."""
    return ReplicaFleet.objects.filter(maximum__gt=0, able_at__gte=Now() - _ABLE)


def answering() -> QuerySet[LoadedAdapter]:
    """Return the adapters loaded on replicas that may get requests. The last reports of a lost replica are left out."""
    return spoken_lately().filter(state=LoadState.LOADED, replica__is_ready=True)


def spoken_lately() -> QuerySet[LoadedAdapter]:
    """Return the reports of replicas that are still present."""
    return credible().filter(replica__observed_at__gte=Now() - _STALE)


def credible() -> QuerySet[LoadedAdapter]:
    """Return the reports of replicas about adapters that were placed on them.

    Other reports are left out, and so are failures from before the adapter was placed there again.
    """
    placed = Placement.objects.filter(replica=OuterRef("replica"), adapter_version=OuterRef("adapter_version"))
    is_new = ~Q(state__in=FAILURES) | Exists(placed.filter(placed_at__lte=OuterRef("observed_at")))
    trusted = LoadedAdapter.objects.filter(replica__isolated_at=None, replica__is_address_accepted=True)
    return trusted.filter(is_new, Exists(placed))
