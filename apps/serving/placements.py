"""Placements that follow demand: read the facts, call apps.serving.placement, store the changes."""

import datetime
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping

from django.db import connection, transaction
from django.db.models import Case, DateTimeField, F, Q, Value, When, Window
from django.db.models.functions import Coalesce, Greatest, RowNumber

from apps.accounts.models import is_allowed
from apps.adapters.lifecycle import AdapterVersionStatus
from apps.adapters.models import AdapterVersion
from apps.billing.queries import get_balance
from apps.contracts.serving import LoadState
from apps.core.database.clock import db_now
from apps.core.database.locks import lock
from apps.core.database.tenancy import system
from apps.serving.models import Alias, Deployment, LoadedAdapter, Placement, Replica, ReplicaFleet
from apps.serving.placement import (
    IDLE_SECONDS,
    QUICK_SECONDS,
    SLOW_SECONDS,
    WAITING_SECONDS,
    AdapterDemand,
    Placed,
    demand_after,
    place,
)
from apps.serving.ready_replicas import FAILURES, able_fleets, ready_replicas, standing_replicas

# A replica silent for this long loses its adapters to others; a newly enrolled one has longer.
SILENT_SECONDS = 60
STARTING_SECONDS = 600
_SETTLED = (LoadState.LOADED, *FAILURES)
_OF_NO_NEW_REPLICA = (AdapterVersionStatus.FILES_ONLY, AdapterVersionStatus.REFUSED)

_NOTE = """
    UPDATE serving_deployment AS deployment
       SET last_requested_at = greatest(coalesce(last_requested_at, %(now)s), %(now)s::timestamptz),
           demand_at = %(now)s,
           quick_demand = quick_demand * exp(-age / %(quick)s) + requests / %(quick)s,
           slow_demand = slow_demand * exp(-age / %(slow)s) + requests / %(slow)s
      FROM (SELECT id, requests,
                   greatest(0, coalesce(extract(epoch FROM %(now)s::timestamptz - demand_at), 0))::float8 AS age
              FROM unnest(%(versions)s::text[], %(requests)s::float8[]) AS asked(version_id, requests)
              JOIN serving_deployment ON adapter_version_id = version_id AND removed_at IS NULL
             ORDER BY id) AS counted
     WHERE deployment.id = counted.id
"""


@transaction.atomic
def record_requests(*, counts: Mapping[str, int], fleets: Collection[str] = (), now: datetime.datetime) -> None:
    """Count requests by version id. If one of the versions has no place, place adapters again at once.

    Each of the `fleets` starts a replica, or keeps the ones that it has.
    """
    held = [fleet.pk for fleet in ReplicaFleet.objects.filter(pk__in=fleets).order_by("pk").select_for_update()]
    ReplicaFleet.objects.filter(pk__in=held).update(last_requested_at=now)
    asked = Deployment.objects.filter(adapter_version__in=list(counts), removed_at=None)
    with connection.cursor() as cursor:
        cursor.execute(
            _NOTE,
            {
                "now": now,
                "quick": QUICK_SECONDS,
                "slow": SLOW_SECONDS,
                "versions": list(counts),
                "requests": [float(count) for count in counts.values()],
            },
        )
    placed = Placement.objects.filter(adapter_version__in=list(counts)).values("adapter_version")
    lost = asked.exclude(adapter_version__in=placed).exclude(adapter_version__status="files_only")
    bases = lost.values_list("adapter_version__adapter__base_model", flat=True)
    for base_model_id in sorted(set(bases)):
        replan(base_model_id=base_model_id, now=now)


def request_version(*, version: AdapterVersion, now: datetime.datetime) -> None:
    """Ask for a deployed version as a request for it does. A replica starts for it only if there is credit."""
    with system():  # all tenants share the places
        base_model_id, owner = version.adapter.base_model_id, version.organization
        able = [
            fleet
            for fleet in able_fleets().filter(base_model=base_model_id).order_by("pk")
            if is_allowed(owner.regions, fleet.region_id)
        ]
        ready = ready_replicas().filter(base_model=base_model_id, whole_model=None).values_list("region", flat=True)
        regions = {each for each in ready if is_allowed(owner.regions, each)} or {each.region_id for each in able[:1]}
        may_start = version.status not in _OF_NO_NEW_REPLICA and get_balance(organization=owner).available_nano > 0
        fleets = [fleet.pk for fleet in able if may_start and fleet.region_id in regions]
        record_requests(counts={version.pk: 1}, fleets=fleets, now=now)


def replan_all(*, now: datetime.datetime) -> int:
    """Place the adapters of every base model that has a replica; return how many must be loaded."""
    bases = standing_replicas().filter(whole_model=None).values_list("base_model_id", flat=True).distinct()
    return sum(replan(base_model_id=base_model_id, now=now) for base_model_id in sorted(bases))


def replan_around(*, replica_id: str) -> None:
    """Place the adapters of the replica's base model again, after the replica was lost or came back."""
    found = Replica.objects.filter(pk=replica_id, whole_model=None).values_list("base_model_id", flat=True).first()
    if found is not None:
        replan(base_model_id=found, now=db_now())


def lock_placements(*, base_model_id: str) -> None:
    """Wait until no other transaction places adapters of the base model. Take this lock before rows of its replicas."""
    lock(f"placement:{base_model_id}")


def lock_around(*, replica_id: str) -> None:
    """Lock the placements of the replica's base model, before the replica itself."""
    for found in Replica.objects.filter(pk=replica_id, whole_model=None).values_list("base_model_id", flat=True):
        lock_placements(base_model_id=found)


@transaction.atomic
def replan(*, base_model_id: str, now: datetime.datetime) -> int:
    """Store which replica of the base model holds which adapters; return how many must be loaded.

    One placer runs at a time, and only replicas whose set changed are notified. While no replica reports, nothing
    changes, so a fleet that comes back keeps its placements.
    """
    lock_placements(base_model_id=base_model_id)
    replicas = list(standing_replicas().filter(base_model_id=base_model_id, whole_model=None).order_by("pk"))
    present = [replica for replica in replicas if _is_there(replica, now)]
    if not present:
        return 0
    holding: dict[str, set[str]] = {replica.pk: set() for replica in replicas}
    for replica_id, version_id in Placement.objects.filter(replica__in=replicas).values_list(
        "replica_id", "adapter_version_id"
    ):
        holding[replica_id].add(version_id)
    held = {version_id for versions in holding.values() for version_id in versions}
    wishes = _wishes(base_model_id, now, held=held, places=sum(replica.capacity for replica in replicas))
    said = _said(replicas)
    placed = place(
        wishes,
        [replica.room for replica in present],
        holding=holding,
        settled={id: set().union(*(said[id, state] for state in _SETTLED)) for id in holding},
        now=now.timestamp(),
        unable=_unable(wishes, present, said),
    )
    return _write(holding, placed, {wish.version_id: wish.organization_id for wish in wishes})


def _is_there(replica: Replica, now: datetime.datetime) -> bool:
    if not replica.is_trusted:
        return False
    if replica.observed_at is None:
        return (now - replica.created_at).total_seconds() < STARTING_SECONDS
    return (now - replica.observed_at).total_seconds() < SILENT_SECONDS


def _wishes(base_model_id: str, now: datetime.datetime, *, held: set[str], places: int) -> list[AdapterDemand]:
    """Return the adapters that may have a place: placed, kept warm, with an alias, or used within a day.

    For each organization and rank, that is at most twice the number of places: as many as can have places, and as many
    that may replace them.
    """
    named = _named_versions(base_model_id)
    idle_since = now - datetime.timedelta(seconds=IDLE_SECONDS)
    used_at = Greatest("created_at", Coalesce("last_requested_at", "created_at"))
    seen_at = Value(now - datetime.timedelta(seconds=WAITING_SECONDS), DateTimeField())
    is_named, has_place = Q(adapter_version__in=named), Q(adapter_version__in=held) | Q(pinned_at__isnull=False)
    asked = (
        Deployment.objects.filter(
            removed_at=None,
            adapter_version__deleted_at=None,
            adapter_version__adapter__base_model=base_model_id,
        )
        .exclude(adapter_version__status="files_only")
        .annotate(used_at=Case(When(is_named, then=Greatest(used_at, seen_at)), default=used_at))
        .filter(has_place | Q(used_at__gte=idle_since))
    )
    turn = Window(
        RowNumber(),
        partition_by=[F("organization"), F("adapter_version__rank")],
        order_by=[Case(When(has_place, then=0), default=1), F("used_at").desc(), F("adapter_version")],
    )
    rows = (
        asked.annotate(turn=turn)
        .filter(turn__lte=2 * places)
        .values_list(
            "adapter_version_id",
            "organization_id",
            "adapter_version__rank",
            "used_at",
            "quick_demand",
            "slow_demand",
            "demand_at",
            "pinned_at",
            "adapter_version__status",
            "organization__regions",
        )
    )
    return [
        AdapterDemand(
            version_id=version_id,
            organization_id=organization_id,
            rank=rank,
            last_used_at=used_at.timestamp(),
            requests_per_second=demand_after(quick, slow, (now - demand_at).total_seconds()) if demand_at else 0.0,
            is_kept=pinned_at is not None,
            is_refused=status == AdapterVersionStatus.REFUSED,
            regions=None if regions is None else frozenset(regions),
        )
        for version_id, organization_id, rank, used_at, quick, slow, demand_at, pinned_at, status, regions in rows
    ]


def _named_versions(base_model_id: str) -> set[str]:
    """Return the versions that aliases point at or may roll back to. They count as in use without requests."""
    version, *others = (  # an imported alias may roll back to a version of another base model
        Alias.objects.filter(**{f"{name}__adapter__base_model": base_model_id}).values_list(f"{name}_id", flat=True)
        for name in ("version", "canary_version", "previous_version")
    )
    return set(version.union(*others))


def _said(replicas: Iterable[Replica]) -> dict[tuple[str, str], set[str]]:
    """Return version ids by replica and state."""
    said: dict[tuple[str, str], set[str]] = defaultdict(set)
    rows = LoadedAdapter.objects.filter(replica__in=list(replicas))
    for replica_id, state, version_id in rows.values_list("replica_id", "state", "adapter_version_id"):
        said[replica_id, state].add(version_id)
    return said


def _unable(
    wishes: Iterable[AdapterDemand], replicas: Iterable[Replica], said: dict[tuple[str, str], set[str]]
) -> set[tuple[str, str]]:
    """Return the pairs (replica, version) that failed, as long as another replica might load the version.

    A version that an engine refused and none has accepted stays where it is.
    """
    rooms = [replica.room for replica in replicas if replica.is_ready and replica.draining_at is None]
    failed = {(room.replica_id, id) for room in rooms for state in FAILURES for id in said[room.replica_id, state]}
    versions = {version_id for _, version_id in failed}
    unable: set[tuple[str, str]] = set()
    for wish in wishes:
        if wish.version_id in versions and not wish.is_refused:
            pairs = {(room.replica_id, wish.version_id) for room in rooms if room.fits(wish)}
            unable |= set() if pairs <= failed else pairs & failed
    return unable


def _write(before: Mapping[str, set[str]], after: Placed, owners: Mapping[str, str]) -> int:
    """Store the difference and notify the replicas that changed."""
    gone, new, changed = Q(), [], []
    for replica_id, held in before.items():
        wanted = after.get(replica_id, frozenset())
        if wanted == held:
            continue
        changed.append(replica_id)
        if leaving := held - wanted:
            gone |= Q(replica_id=replica_id, adapter_version_id__in=leaving)
        new += [
            Placement(replica_id=replica_id, adapter_version_id=version_id, organization_id=owners[version_id])
            for version_id in sorted(wanted - held)
        ]
    if gone:
        Placement.objects.filter(gone).delete()
    Placement.objects.bulk_create(new, ignore_conflicts=True)
    if changed:
        Replica.objects.filter(pk__in=changed).update(generation=F("generation") + 1)
    return len(new)
