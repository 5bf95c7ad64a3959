"""Conversions that wait: those that a trainer may take, and the elastic pool that starts a node for one."""

import datetime

from django.db.models import Case, DurationField, ExpressionWrapper, F, Q, QuerySet, Value, When

from apps.accounts.models import Organization, allowed_in
from apps.finetuning.lifecycle import ConversionStatus
from apps.finetuning.models import CapacityKind, Conversion, PoolCapacity
from apps.finetuning.quotes.delivery import CONVERTER, GGUF, MERGED_16BIT

# A conversion that waits and that a trainer may make, in some region.
TAKEABLE = Q(status=ConversionStatus.WAITING, version__deleted_at=None, organization__suspended_at=None)
_PATIENCE = datetime.timedelta(minutes=1)  # an idle trainer takes a conversion within seconds
# From a take to the next one: times the attempt squared for the worker that gave it back unmade, and times the attempts
# before it for any other. An interruption is no failure, so this bounds what busy trainers begin within a day.
_APART = datetime.timedelta(minutes=5)


def may_not_be_taken_yet(*, gave_back: Q, now: datetime.datetime) -> Q:
    """Return which conversions were taken too lately; `gave_back` selects those that the taker itself gave back."""
    times = Case(When(gave_back, then=F("attempt") * F("attempt")), default=F("attempt") - 1)
    apart = ExpressionWrapper(Value(_APART) * times, output_field=DurationField())
    return Q(leased_at__gt=Value(now) - apart)


def needs_node(*, capacity: PoolCapacity, now: datetime.datetime) -> bool:
    """Return whether a node of this pool should make a conversion that no trainer has taken for a minute.

    Only one pool starts a node for it: the one with the cheapest nodes of those that may make it.
    """
    rows = Conversion.objects.annotate(holder=Organization.share_holder_by("organization__"))
    waiting = rows.filter(TAKEABLE, created_at__lt=now - _PATIENCE)
    in_pool = Q(worker__pool=capacity.pool_id, worker__revoked_at=None)
    waiting = waiting.exclude(may_not_be_taken_yet(gave_back=in_pool, now=now))
    waiting = waiting.exclude(holder__in=rows.filter(status=ConversionStatus.RUNNING).values("holder"))
    return waiting.exists() and any(_is_first_for(waiting.filter(kind=kind), kind, capacity) for kind in _ABLE)


def _is_first_for(waiting: QuerySet[Conversion], kind: str, capacity: PoolCapacity) -> bool:
    pools = PoolCapacity.objects.exclude(kind=CapacityKind.STATIC).filter(_ABLE[kind], maximum__gt=0, failures=0)
    in_order = pools.order_by("node_nano_per_hour", "pk").distinct().values_list("pk", "pool__region")
    for pk, region in in_order:
        if pk == capacity.pk:
            return waiting.filter(allowed_in(region)).exists()
        waiting = waiting.exclude(allowed_in(region))
    return False


_ABLE = {MERGED_16BIT: Q(), GGUF: Q(pool__workers__software__has_key=CONVERTER)}  # what a pool's workers have or had
