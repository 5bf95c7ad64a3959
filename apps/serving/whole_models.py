"""Merged and fully trained models: no engine loads them as adapters, so each answers from a separate replica.

An operator admits such a replica for one version. It has one fixed placement, so routes, states, aliases and metrics
treat it as an adapter that only one replica may hold.
"""

import datetime

import msgspec
from django.db.models import F
from django.utils.translation import gettext

from apps.accounts.models import is_allowed
from apps.adapters.lifecycle import AdapterVersionStatus
from apps.adapters.models import AdapterVersion
from apps.adapters.queries import find_whole_model
from apps.contracts.runs import ManifestFile, SignedFile
from apps.contracts.serving import DesiredState, LoadState, ObservedState
from apps.core.database.tenancy import system
from apps.core.errors import InvalidState
from apps.core.objects.store import store
from apps.serving.models import Deployment, LoadedAdapter, Placement, Replica

_URL_SECONDS = 3600
_WEIGHTS = "model.safetensors"


def require_replica(*, version: AdapterVersion) -> None:
    """Raise InvalidState for a version that needs a separate replica and has none."""
    is_whole = version.status == AdapterVersionStatus.FILES_ONLY
    if is_whole and not Replica.objects.filter(whole_model=version).exists():
        raise InvalidState(
            gettext(
                "The engine cannot load this result as an adapter, and no replica serves it as a whole model: "
                "download it, or ask the operator of this installation for one."
            )
        )


def give_place(*, replica: Replica, version: AdapterVersion) -> None:
    """Place the version on the replica that serves only this version.

    It answers at once unless its owner stopped it.
    """
    place = {"organization_id": version.organization_id, "adapter_version": version}
    Placement.objects.create(replica=replica, **place)
    if not Deployment.objects.filter(adapter_version=version).exists():
        Deployment.objects.create(**place)


def desired_whole_model(*, replica: Replica, version: AdapterVersion) -> DesiredState:
    """Return the files that the replica serves, with URLs that expire, or a state that withdraws the model.

    A model is withdrawn if it was deleted, or if its organization may no longer use the region. An untrusted replica
    gets no files.
    """
    files: tuple[SignedFile, ...] = ()
    is_withdrawn = version.deleted_at is not None or not is_allowed(version.organization.regions, replica.region_id)
    if not is_withdrawn and replica.is_trusted:
        prefix, manifest = find_whole_model(version=version)
        files = tuple(_signed(prefix, file) for file in msgspec.convert(manifest["files"], list[ManifestFile]))
    return DesiredState(
        replica_id=replica.pk,
        base_lora_served_name=version.whole_model_name,
        base_model_sha256=next((file.sha256 for file in files if file.name == _WEIGHTS), ""),
        generation=replica.generation,
        adapters=(),
        model_files=files,
        is_withdrawn=is_withdrawn,
    )


def _signed(prefix: str, file: ManifestFile) -> SignedFile:
    url = store().signed_url(f"{prefix}/{file.name}", "GET", expires_seconds=_URL_SECONDS, base="internal")
    return SignedFile(name=file.name, sha256=file.sha256, bytes=file.bytes, url=url)


def record_whole_model(*, replica: Replica, observed: ObservedState, now: datetime.datetime) -> None:
    """Store whether the replica's one model answers."""
    assert replica.whole_model is not None
    LoadedAdapter.objects.update_or_create(
        replica=replica,
        adapter_version=replica.whole_model,
        defaults={
            "organization_id": replica.whole_model.organization_id,
            "state": LoadState.LOADED if observed.is_ready else LoadState.LOADING,
            "reason": "" if observed.is_ready else observed.reason[:300],
            "observed_at": now,
        },
    )


def withdraw(*, version: AdapterVersion) -> None:
    """Notify the replicas of a deleted model: they stop its engine and delete its files."""
    with system():  # replicas are shared by all tenants
        Replica.objects.filter(whole_model=version).update(generation=F("generation") + 1)
