"""Queries on serving: states and routes, with the gateway's routing table."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from django.db.models import F, QuerySet

from apps.accounts.models import is_allowed
from apps.accounts.queries import list_limited
from apps.adapters.lifecycle import AdapterVersionStatus
from apps.adapters.models import AdapterVersion
from apps.catalog.models import BaseModel
from apps.contracts.serving import LoadState
from apps.core.database.tenancy import system
from apps.serving.models import Alias, Deployment, Placement, Replica
from apps.serving.operations import token_of
from apps.serving.ready_replicas import able_fleets, credible, ready_replicas, spoken_lately


@dataclass(frozen=True)
class Upstream:
    """One replica that can answer: the address of its proxy, the token the proxy expects, and its region."""

    replica_id: str
    url: str
    token: str
    region: str = ""


@dataclass(frozen=True)
class FleetRoute:
    """A fleet that can start a replica now, or has one, and its region."""

    fleet_id: str
    region: str


@dataclass(frozen=True)
class Route:
    """The route of a public model name. `organization_id` is None for a base model, which every customer may use.

    A route without upstreams exists but cannot answer now: 503, where an unknown name is 404. `draining` answer only
    what no other can. `is_loading`: a replica should load it, none has yet, and none has failed. `is_cold`: no replica
    has a place for it until it is requested. `fleets` start replicas of its base model on request. The caller must see
    its `private_project`, if it has one.
    """

    model_name: str
    organization_id: str | None
    engine_name: str
    base_model_name: str
    adapter_version_id: str
    context_length: int
    upstreams: tuple[Upstream, ...]
    is_loading: bool = False
    is_cold: bool = False
    media: tuple[str, ...] = ()  # accepted input besides text
    draining: tuple[Upstream, ...] = ()
    fleets: tuple[FleetRoute, ...] = ()
    private_project: str = ""

    def limited_to(self, regions: Collection[str]) -> "Route":
        """Return the route for an organization whose requests may be answered only in these regions."""
        staying, draining = (
            tuple(one for one in found if one.region in regions) for found in (self.upstreams, self.draining)
        )
        fleets = tuple(fleet for fleet in self.fleets if fleet.region in regions)
        return replace(self, upstreams=staying or draining, draining=draining, fleets=fleets)


@dataclass(frozen=True)
class AliasRoute:
    """A name that stands for a version and, for `canary_percent` of its requests, for another."""

    model_name: str
    organization_id: str
    target: str
    canary_target: str = ""
    canary_percent: int = 0


def list_alias_routes() -> list[AliasRoute]:
    """Return every alias. One statement reads them, so each is seen before or after its move, never in between."""
    rows = Alias.objects.values_list(
        "model_name", "organization_id", "version__model_name", "canary_version__model_name", "canary_percent"
    )
    return [AliasRoute(name, owner, target, canary or "", percent) for name, owner, target, canary, percent in rows]


@dataclass(frozen=True)
class _Ready:
    replica: Replica
    upstream: Upstream


def _upstreams(found: list[_Ready]) -> tuple[Upstream, ...]:
    """Return the replicas to ask. Draining replicas get only requests that no other replica can answer."""
    staying = tuple(one.upstream for one in found if one.replica.draining_at is None)
    return staying or _draining(found)


def _draining(found: list[_Ready]) -> tuple[Upstream, ...]:
    return tuple(one.upstream for one in found if one.replica.draining_at is not None)


def list_routes() -> list[Route]:
    """Return every name that may be requested now, with the replicas that confirmed it."""
    replicas = list(ready_replicas().filter(token__isnull=False).select_related("token"))
    ready = {r.pk: _Ready(r, Upstream(r.pk, r.url, token_of(replica=r), r.region_id)) for r in replicas}
    fleets = _fleets()
    return [*_base_routes(ready, fleets), *_adapter_routes(ready, replicas, fleets)]


def _fleets() -> dict[str, tuple[FleetRoute, ...]]:
    """Return, by base model, the fleets that could start a replica when last checked."""
    found: dict[str, tuple[FleetRoute, ...]] = defaultdict(tuple)
    for fleet in able_fleets().order_by("pk"):
        found[fleet.base_model_id] += (FleetRoute(fleet.pk, fleet.region_id),)
    return found


def _base_routes(ready: dict[str, _Ready], fleets: Mapping[str, tuple[FleetRoute, ...]]) -> list[Route]:
    served = BaseModel.objects.filter(is_installed=True, retired_at=None)
    found: dict[str, list[_Ready]] = defaultdict(list)
    for one in ready.values():
        if one.replica.whole_model_id is None:
            found[one.replica.base_model_id].append(one)
    return [
        Route(
            model_name=base.name,
            organization_id=None,
            engine_name=base.served_name,
            base_model_name=base.name,
            adapter_version_id="",
            context_length=base.context_length,
            upstreams=_upstreams(found[base.pk]),
            media=base.media,
            draining=_draining(found[base.pk]),
            fleets=fleets[base.pk],
        )
        for base in served
    ]


def _adapter_routes(
    ready: dict[str, _Ready], replicas: list[Replica], fleets: Mapping[str, tuple[FleetRoute, ...]]
) -> list[Route]:
    loaded: dict[str, list[_Ready]] = defaultdict(list)
    refused: set[str] = set()
    said = credible().filter(replica_id__in=ready, adapter_version__adapter__base_model=F("replica__base_model"))
    for version_id, replica_id, state in said.values_list("adapter_version_id", "replica_id", "state"):
        if state == LoadState.LOADED:
            loaded[version_id].append(ready[replica_id])
        elif state != LoadState.LOADING:
            refused.add(version_id)
    deployments = list(
        _current_deployments().select_related(
            "adapter_version__adapter__base_model", "adapter_version__adapter__project"
        )
    )
    wanted, cold = _wanted_and_cold(replicas, deployments, list_limited())
    versions = [d.adapter_version for d in deployments]
    return [
        Route(
            model_name=version.model_name,
            organization_id=version.organization_id,
            engine_name=version.whole_model_name if _is_whole(version) else version.lora_name,
            base_model_name=version.adapter.base_model.name,
            adapter_version_id=version.pk,
            context_length=version.adapter.base_model.context_length,
            upstreams=_upstreams(loaded[version.pk]),
            draining=_draining(loaded[version.pk]),
            is_loading=not loaded[version.pk] and version.pk not in refused and version.pk in wanted,
            is_cold=not loaded[version.pk] and version.pk in cold,
            # Merged models were trained and tested on text alone.
            media=() if _is_whole(version) else version.adapter.base_model.media,
            fleets=fleets[version.adapter.base_model_id] if _would_load(version) else (),
            private_project=version.adapter.project_id if version.adapter.project.is_private else "",
        )
        for version in versions
    ]


def _is_whole(version: AdapterVersion) -> bool:
    """Return whether the version answers as a whole model, because no engine loads it as an adapter."""
    return version.status == AdapterVersionStatus.FILES_ONLY


def _would_load(version: AdapterVersion) -> bool:
    """Return whether a replica that starts for the version would load it."""
    return not _is_whole(version) and version.status != AdapterVersionStatus.REFUSED


def _current_deployments() -> QuerySet[Deployment]:
    return Deployment.objects.filter(removed_at=None, adapter_version__deleted_at=None)


def _wanted_and_cold(
    replicas: Iterable[Replica], deployments: Iterable[Deployment], limited: Mapping[str, Collection[str] | None]
) -> tuple[set[str], set[str]]:
    """Return the ids of the versions placed on a replica, and of those that only lack a place.

    `limited` are the regions of organizations that are limited to some.
    """
    ready = list(replicas)
    wanted = set(Placement.objects.filter(replica__in=ready).values_list("adapter_version_id", flat=True))
    most_ranks: dict[str, dict[str, int]] = defaultdict(dict)  # by base model and region
    for replica in ready:
        if replica.whole_model_id is None:
            ranks = most_ranks[replica.base_model_id]
            ranks[replica.region_id] = max(ranks.get(replica.region_id, 0), replica.room.max_rank)
    fitting = set()
    for deployment in deployments:
        version, regions = deployment.adapter_version, limited.get(deployment.organization_id)
        ranks = most_ranks.get(version.adapter.base_model_id, {})
        most_rank = max((rank for region, rank in ranks.items() if is_allowed(regions, region)), default=-1)
        if version.rank <= most_rank and not _is_whole(version):
            fitting.add(version.pk)
    return wanted, fitting - wanted


class ServingStatus(StrEnum):
    """The serving state of a version for its owner: the best report of a replica, or the reason why there is none."""

    OFF = "off"  # without a deployment
    WAITING = "waiting"  # before any replica reports
    COLD = "cold"  # no replica has a place for it
    FILES_ONLY = "files_only"  # no engine can load it
    LOADED = LoadState.LOADED.value
    LOADING = LoadState.LOADING.value
    FAILED = LoadState.FAILED.value
    REJECTED = LoadState.REJECTED.value


@dataclass(frozen=True)
class ServingState:
    state: ServingStatus
    reason: str = ""

    @property
    def is_deployed(self) -> bool:
        return self.state not in (ServingStatus.OFF, ServingStatus.FILES_ONLY)


def serving_states(*, versions: Iterable[AdapterVersion]) -> dict[str, ServingState]:
    """Return the state of each version by its id."""
    versions = list(versions)
    ids = [version.pk for version in versions]
    deployed = set(
        Deployment.objects.filter(adapter_version__in=ids, removed_at=None).values_list("adapter_version_id", flat=True)
    )
    served = set(Replica.objects.filter(whole_model__in=ids).values_list("whole_model_id", flat=True))
    spoken: dict[str, list[tuple[str, str]]] = defaultdict(list)
    rows = spoken_lately().filter(adapter_version__in=deployed)
    for version_id, state, reason, is_ready in rows.values_list(
        "adapter_version_id", "state", "reason", "replica__is_ready"
    ):
        is_closed = state == LoadState.LOADED and not is_ready  # loaded, but its replica takes no requests now
        spoken[version_id].append((LoadState.LOADING, "") if is_closed else (state, reason))
    states = {id: _best(spoken[id]) for id in deployed}
    states |= {version.pk: _unserved(version, served) for version in versions if version.pk not in deployed}
    silent = {id for id, state in states.items() if state.state == ServingStatus.WAITING}
    return states | ({id: ServingState(ServingStatus.COLD, _COLD) for id in _cold_ids(silent)} if silent else {})


_FILES_ONLY = "No engine can load it as an adapter, and it has no replica of its own. You can download its files."
_WAITING = "Waiting for a replica of its base model to load it."
_COLD = "It is not loaded because it had no recent requests. The next request loads it and waits."


def _cold_ids(versions: Collection[str]) -> set[str]:
    """Return the versions that only lack a place, or a replica that starts on request."""
    with system():  # places are every tenant's; only ids leave this block
        deployed = _current_deployments().filter(adapter_version__in=versions)
        deployments = list(deployed.select_related("adapter_version__adapter", "organization"))
        limited = {each.organization_id: each.organization.regions for each in deployments}
        ready, fleets = list(ready_replicas()), _fleets()
        wanted, cold = _wanted_and_cold(ready, deployments, limited)
    for deployment in deployments:
        version, regions = deployment.adapter_version, limited[deployment.organization_id]
        base_model_id = version.adapter.base_model_id
        has_replica = any(
            replica.base_model_id == base_model_id and is_allowed(regions, replica.region_id)
            for replica in ready
            if replica.whole_model_id is None
        )
        may_start = any(is_allowed(regions, fleet.region) for fleet in fleets[base_model_id])
        if may_start and _would_load(version) and not has_replica and version.pk not in wanted:
            cold.add(version.pk)
    return cold


def _unserved(version: AdapterVersion, served: Collection[str]) -> ServingState:
    is_servable = not _is_whole(version) or version.pk in served
    return ServingState(ServingStatus.OFF) if is_servable else ServingState(ServingStatus.FILES_ONLY, _FILES_ONLY)


def _best(rows: list[tuple[str, str]]) -> ServingState:
    """Return the best report of its replicas; "waiting" if there is none yet."""
    order = [LoadState.LOADED, LoadState.LOADING, LoadState.FAILED, LoadState.REJECTED]
    if not rows:
        return ServingState(ServingStatus.WAITING, _WAITING)
    state, reason = min(rows, key=lambda row: order.index(LoadState(row[0])))
    return ServingState(ServingStatus(state), reason)
