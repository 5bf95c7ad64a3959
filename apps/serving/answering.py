"""Where requests are sent: replicas that say they are ready and were heard of lately, and what those have loaded."""

import datetime

from django.db.models import QuerySet
from django.db.models.functions import Now

from apps.contracts.serving import LoadState
from apps.serving.models import LoadedAdapter, Replica

_STALE = datetime.timedelta(seconds=30)  # a replica not heard of for so long gets no requests


def ready_replicas() -> QuerySet[Replica]:
    return Replica.objects.filter(is_ready=True, observed_at__gte=Now() - _STALE)


def answering() -> QuerySet[LoadedAdapter]:
    """Return what is loaded where requests may be sent; what a lost replica said last is not in it."""
    return spoken_lately().filter(state=LoadState.LOADED, replica__is_ready=True)


def spoken_lately() -> QuerySet[LoadedAdapter]:
    """Return what replicas say that are still there."""
    return LoadedAdapter.objects.filter(replica__observed_at__gte=Now() - _STALE)
