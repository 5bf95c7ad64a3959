"""Operations on serving: deployments, the desired state of each replica, and its observed state."""

import datetime
import secrets
from typing import Literal

import msgspec
from django.conf import settings
from django.db import transaction
from django.db.models import Case, Exists, F, OuterRef, Q, Value, When
from django.db.models.functions import Greatest
from django.utils.translation import gettext

from apps.accounts.members.projects import require_work_in
from apps.accounts.models import Organization, Region
from apps.accounts.notices.events import announce
from apps.adapters.lifecycle import AdapterVersionStatus
from apps.adapters.models import AdapterVersion
from apps.adapters.operations import NewVersion, delete_version, publish_version, record_verdict
from apps.catalog.models import BaseModel
from apps.contracts.addresses.replicas import AddressRefused
from apps.contracts.runs import SignedFile
from apps.contracts.serving import DesiredAdapter, DesiredState, LoadState, ObservedState
from apps.core import audit
from apps.core.database.clock import db_now
from apps.core.database.tenancy import system
from apps.core.errors import InvalidValue, RateLimited
from apps.core.messages import outbox
from apps.core.objects.store import store
from apps.core.secrets.sealing import place_of, seal, unseal
from apps.serving.aliases import get_exact_version, lock_aliases, require_unaliased
from apps.serving.keep_warm import let_cool
from apps.serving.models import Deployment, LoadedAdapter, Replica, ReplicaToken
from apps.serving.placements import lock_around, lock_placements, replan, replan_around
from apps.serving.ready_replicas import FAILURES
from apps.serving.reconciliation import record_count
from apps.serving.whole_models import desired_whole_model, give_place, record_whole_model, require_replica, withdraw

_URL_SECONDS = 3600
_FAILURES_REMEMBERED = datetime.timedelta(minutes=10)
MAX_DEPLOYMENTS_AN_HOUR = 10  # of a version


@transaction.atomic
def deploy(*, version: AdapterVersion, by: str) -> Deployment:
    """Request that the version is served. Deploying it again changes nothing.

    Raises InvalidState, RateLimited, and PermissionDenied for a viewer of its project.
    """
    require_work_in(project_id=version.adapter.project_id, actor=by)
    require_replica(version=version)
    deployment, is_new = _get_or_create_deployment(version, by=by)
    if is_new:
        _require_few_deployments(version)
        place_adapters(base_model_id=version.adapter.base_model_id)
    return deployment


def _require_few_deployments(version: AdapterVersion) -> None:
    """Raise RateLimited if the version was deployed too often. Each deployment may displace others' adapters."""
    recent = Deployment.objects.filter(adapter_version=version, created_at__gt=db_now() - datetime.timedelta(hours=1))
    if recent.count() > MAX_DEPLOYMENTS_AN_HOUR:
        text = gettext("You can serve a model %(most)s times an hour. Try again later.")
        raise RateLimited(text % {"most": MAX_DEPLOYMENTS_AN_HOUR}, retry_after_seconds=600)


@transaction.atomic
def publish(new: NewVersion) -> AdapterVersion:
    """Publish a trained result and deploy it unless no engine can load it. Raises AdapterRejected.

    Gateways know its name as soon as its job has ended. It is placed after the commit, because placement locks rows of
    every tenant.
    """
    version = publish_version(new)
    if new.is_servable:
        release(version)
    return version


@transaction.atomic
def release(version: AdapterVersion) -> None:
    """Deploy a version for the first time, unless a member already has.

    Like `publish`, it is placed after the commit.
    """
    if Deployment.objects.filter(adapter_version=version).exists():
        return
    _get_or_create_deployment(version, by="system")
    payload = {"base_model_id": version.adapter.base_model_id}
    outbox.publish(topic="deployment.created", key=f"deployed:{version.pk}", payload=payload)


def _get_or_create_deployment(version: AdapterVersion, *, by: str) -> tuple[Deployment, bool]:
    deployment, is_new = Deployment.objects.get_or_create(
        organization_id=version.organization_id, adapter_version=version, removed_at=None
    )
    if is_new:
        audit.record(
            organization=version.organization_id,
            by=by,
            action="adapter.deployed",
            target=version.pk,
            deployment=deployment.pk,
        )
        _announce(version, "deployed", key=f"deployed:{deployment.pk}")
    return deployment, is_new


def _announce(version: AdapterVersion, what: Literal["deployed", "undeployed"], *, key: str) -> None:
    texts = {"deployed": "The adapter is deployed", "undeployed": "The adapter is undeployed"}
    announce(
        organization=version.organization_id,
        type=f"adapter.{what}",
        subject=version.pk,
        title=lambda: f"{texts[what]}: {version.model_name}",
        path=f"/adapters/{version.pk}",
        key=key,
        data={"model": version.model_name},
    )


@transaction.atomic
def undeploy(*, version: AdapterVersion, by: str, now: datetime.datetime) -> None:
    """Unload the version everywhere; requests for it get 404.

    Raises InvalidState while an alias points at it, and PermissionDenied for a viewer of its project.
    """
    require_work_in(project_id=version.adapter.project_id, actor=by)
    lock_aliases(organization=version.organization_id)
    require_unaliased(version=version)
    let_cool(version=version, by=by, now=now)
    removed = Deployment.objects.filter(adapter_version=version, removed_at=None).update(removed_at=now)
    if removed:
        place_adapters(base_model_id=version.adapter.base_model_id)
        audit.record(organization=version.organization_id, by=by, action="adapter.undeployed", target=version.pk)
        _announce(version, "undeployed", key=f"undeployed:{version.pk}:{now.isoformat()}")


@transaction.atomic
def delete_model(
    *, organization: Organization | str, model_name: str, by: str, now: datetime.datetime
) -> AdapterVersion:
    """Stop serving the organization's `ft:…` model and delete its files. Raises ModelNotFound, InvalidState."""
    version = get_exact_version(organization=organization, model_name=model_name)
    undeploy(version=version, by=by, now=now)
    deleted = delete_version(version=version, by=by, now=now)
    withdraw(version=version)
    return deleted


def _abilities(observed: ObservedState) -> dict[str, dict[str, int] | str]:
    """Return what the replica reports about its engine. Its room counts only up to what an operator accepted.

    The address is not included, because enrolment fixed it.
    """
    room = {"capacity": observed.capacity, "slots": observed.max_loras, "max_rank": observed.max_lora_rank}
    said: dict[str, dict[str, int] | str] = {
        "reported_room": room if all(room.values()) else {},
        "revision": observed.base_model_sha256,
    }
    return {name: value for name, value in said.items() if value}


def place_adapters(*, base_model_id: str) -> None:
    """Place the deployed adapters of a base model on its replicas."""
    with system():  # placement spans all tenants
        replan(base_model_id=base_model_id, now=db_now())


@transaction.atomic
def register_replica(
    *, worker_id: str, base_model: BaseModel, url: str, whole_model: AdapterVersion | None = None
) -> tuple[Replica, str]:
    """Add an engine that serves the base model with adapters, or one whole model alone.

    Returns the replica with the token that its proxy expects from the gateway. The replica is in the region of its
    worker's pool, which the enrolment locked in the same transaction. Its address is fixed here. An operator must
    accept it unless the settings name it. Raises InvalidValue for an address that no replica may have.
    """
    is_accepted = _check_address(url)
    token = secrets.token_urlsafe(32)
    region = Region.objects.get(pools__workers=worker_id)
    replica = Replica(base_model=base_model, worker_id=worker_id, region=region, url=url, generation=1)
    replica.whole_model, replica.is_address_accepted = whole_model, is_accepted
    if whole_model is not None:
        replica.capacity = replica.slots = replica.max_rank = 0
    replica.save(force_insert=True)
    give_token(replica=replica, token=token)
    if whole_model is not None:
        give_place(replica=replica, version=whole_model)
    audit.record(organization=None, by=worker_id, action="replica.registered", target=replica.pk, url=url)
    return replica, token


def _check_address(url: str) -> bool:
    """Return whether the settings accept the address without an operator. Raises InvalidValue."""
    try:
        return settings.REPLICA_ADDRESSES.check(url)
    except AddressRefused as refusal:
        raise InvalidValue(str(refusal), param="listen_url") from refusal


@transaction.atomic
def accept_address(*, replica: Replica, by: str) -> None:
    """Accept the address that the replica reported at enrolment, so that requests may be sent there."""
    lock_around(replica_id=replica.pk)
    waiting = Replica.objects.filter(pk=replica.pk, is_address_accepted=False)
    if waiting.update(is_address_accepted=True, generation=F("generation") + 1):
        audit.record(organization=None, by=by, action="replica.accepted", target=replica.pk, url=replica.url)
        replan_around(replica_id=replica.pk)


@transaction.atomic
def accept_room(*, replica: Replica, capacity: int, slots: int, max_rank: int, by: str) -> None:
    """Accept the replica's room: adapters in all, adapters in a batch, and the highest rank."""
    lock_around(replica_id=replica.pk)
    Replica.objects.filter(pk=replica.pk, whole_model=None).update(capacity=capacity, slots=slots, max_rank=max_rank)
    room = {"capacity": capacity, "slots": slots, "max_rank": max_rank}
    audit.record(organization=None, by=by, action="replica.room_accepted", target=replica.pk, **room)
    replan_around(replica_id=replica.pk)


def describe_model(*, replica: Replica) -> dict[str, str]:
    """Return the model that the replica serves, for its agent's enrolment."""
    base, version = replica.base_model, replica.whole_model
    if version is not None:
        return {"id": version.pk, "name": version.model_name, "served_name": version.whole_model_name}
    return {
        "id": base.pk,
        "name": base.name,
        "path": base.path,
        "repo": base.repo,
        "revision": base.revision,
        "served_name": base.served_name,
    }


@transaction.atomic
def drain_replica(*, replica: Replica, is_draining: bool, by: str) -> None:
    """Start or end draining.

    Other replicas take over the adapters of a draining replica; it answers until they have.
    """
    now = db_now()
    lock_placements(base_model_id=replica.base_model_id)  # before the replica's row, as each placer does
    Replica.objects.filter(pk=replica.pk).update(draining_at=now if is_draining else None)
    action = "replica.draining" if is_draining else "replica.taken_back"
    audit.record(organization=None, by=by, action=action, target=replica.pk)
    replan(base_model_id=replica.base_model_id, now=now)


@transaction.atomic
def retire_replica(*, replica: Replica) -> None:
    """Remove the placements of a replica whose machine was released."""
    lock_placements(base_model_id=replica.base_model_id)
    replica.placements.all().delete()
    replica.loaded.all().delete()
    Replica.objects.filter(pk=replica.pk).update(is_ready=False, retired_at=db_now())


def send_desired_states() -> None:
    """Have every agent read its desired state: give it a generation that no agent has seen."""
    milliseconds = int(db_now().timestamp() * 1000)  # generations grow by less than one in a millisecond
    Replica.objects.update(generation=Greatest(F("generation") + 1, milliseconds))


def give_token(*, replica: Replica, token: str) -> None:
    """Store the token that a new replica's proxy expects from the gateway."""
    ReplicaToken.objects.create(replica=replica, token_sealed=seal(token, place=_token_place(replica)))


def token_of(*, replica: Replica) -> str:
    """Return the token that the replica's proxy expects from the gateway."""
    return unseal(bytes(replica.token.token_sealed), place=_token_place(replica))


def _token_place(replica: Replica) -> bytes:
    return place_of(table="serving_replicatoken", column="token_sealed", row_id=replica.pk)


def desired_state(*, replica: Replica) -> DesiredState:
    """Return the adapters that the replica should hold now, highest demand first, with URLs that expire."""
    if replica.whole_model is not None:
        return desired_whole_model(replica=replica, version=replica.whole_model)
    placed = replica.placements.filter(adapter_version__deleted_at=None).select_related("adapter_version")
    if not replica.is_trusted:
        placed = placed.none()  # an untrusted replica gets no customer's weights
    demand = dict(
        Deployment.objects.filter(removed_at=None, adapter_version__placements__replica=replica).values_list(
            "adapter_version_id", "quick_demand"
        )
    )
    ordered = sorted(placed, key=lambda one: (-demand.get(one.adapter_version_id, 0.0), one.adapter_version_id))
    return DesiredState(
        replica_id=replica.pk,
        base_lora_served_name=replica.base_model.served_name,
        base_model_sha256=replica.base_model.files_sha256.get("model.safetensors", ""),
        generation=replica.generation,
        adapters=tuple(_desired(one.adapter_version) for one in ordered),
    )


def _desired(version: AdapterVersion) -> DesiredAdapter:
    return DesiredAdapter(
        lora_name=version.lora_name,
        version_id=version.pk,
        manifest_sha256=version.manifest_sha256,
        rank=version.rank,
        is_tried=version.status in (AdapterVersionStatus.READY, AdapterVersionStatus.UNCERTIFIED),
        files=tuple(
            SignedFile(
                name=file["name"],
                sha256=file["sha256"],
                bytes=file["bytes"],
                url=store().signed_url(
                    f"{version.object_prefix}/{file['name']}", "GET", expires_seconds=_URL_SECONDS, base="internal"
                ),
            )
            for file in version.manifest["files"]
        ),
    )


@transaction.atomic
def record_observed(*, replica: Replica, observed: ObservedState) -> None:
    """Store the replica's observed state; routes depend on it. Routes ignore an untrusted replica's state."""
    now = db_now()
    Replica.objects.filter(pk=replica.pk).update(
        is_ready=observed.is_ready,
        readiness_changed_at=Case(When(is_ready=observed.is_ready, then=F("readiness_changed_at")), default=Value(now)),
        engine_generation=observed.engine_generation,
        reason=observed.reason[:300],
        observed_at=now,
        load=msgspec.to_builtins(observed.load),
        **_abilities(observed),
    )
    if observed.counted is not None and observed.engine_generation:
        record_count(replica=replica, engine_generation=observed.engine_generation, counted=observed.counted, now=now)
    if not replica.is_trusted:
        return
    if replica.whole_model is not None:
        record_whole_model(replica=replica, observed=observed, now=now)
    else:
        _record_adapters(replica, observed, now)


def _record_adapters(replica: Replica, observed: ObservedState, now: datetime.datetime) -> None:
    """Store reports about adapters placed on the replica, and ignore reports about others.

    Failures are remembered for a while, all as long as a version's newest, so that an adapter does not return to where
    it failed.
    """
    states = {adapter.lora_name: adapter for adapter in observed.adapters}
    versions = AdapterVersion.objects.filter(
        lora_name__in=states, placements__replica=replica, adapter__base_model=replica.base_model_id
    )
    known = {version.lora_name: version for version in versions}
    failures = LoadedAdapter.objects.filter(adapter_version=OuterRef("adapter_version"), state__in=FAILURES)
    failed_lately = Q(state__in=FAILURES) & Exists(failures.filter(observed_at__gt=now - _FAILURES_REMEMBERED))
    replica.loaded.exclude(failed_lately | Q(adapter_version__in=known.values())).delete()
    for lora_name, version in known.items():
        seen = states[lora_name]
        LoadedAdapter.objects.update_or_create(
            replica=replica,
            adapter_version=version,
            defaults={
                "organization_id": version.organization_id,
                "state": LoadState(seen.state),
                "reason": seen.reason[:300],
                "observed_at": now,
            },
        )
        # States other than loaded and rejected carry no verdict.
        is_settled = seen.state in (LoadState.LOADED, LoadState.REJECTED)
        if is_settled and version.status not in (AdapterVersionStatus.READY, AdapterVersionStatus.FILES_ONLY):
            is_accepted = seen.state is LoadState.LOADED
            record_verdict(version=version, is_accepted=is_accepted, reason=seen.reason, parity=seen.parity, now=now)
