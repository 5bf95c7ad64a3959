"""Adapters of a tenant, where they came from, and what became of them."""

from apps.accounts.models import default_project_id
from apps.adapters.models import Adapter, AdapterVersion
from apps.core.database.clock import db_now
from apps.core.ids import new_id, ulid_of
from apps.core.objects.store import store
from apps.finetuning.models import (
    Checkpoint,
    Conversion,
    FineTuningJob,
    HubPush,
    HubPushToken,
    Run,
    RunMember,
    RunUpload,
)
from apps.finetuning.results.model_cards import CARD_FILE
from apps.finetuning.runs.trackers import store_tracker_key
from apps.serving.models import Alias
from apps.serving.operations import deploy
from tests.guards.makers.tenants import Tenant


def adapter_version(tenant: Tenant) -> AdapterVersion:
    adapter = Adapter.objects.create(
        organization=tenant.organization,
        project_id=default_project_id(tenant.organization),
        name=tenant.canary,
        base_model=tenant.installation.base_model,
    )
    identifier = new_id("adpv")
    return AdapterVersion.objects.create(
        id=identifier,
        organization=tenant.organization,
        adapter=adapter,
        number=1,
        model_name=f"ft:{tenant.installation.base_model.name}:{tenant.organization.slug}:s:{ulid_of(identifier)}",
        lora_name=new_id("a", "-"),
        source=tenant.ids["job"],
        object_prefix=f"org/{tenant.organization.pk}/adapters/{identifier}",
        manifest={"files": []},
        manifest_sha256="0" * 64,
        bytes=0,
        rank=16,
        target_modules=["q_proj"],
        method="lora",
        chat_template_sha256="0" * 64,
        metrics={"step": 40},
    )


def model_file(tenant: Tenant) -> str:
    """The card of the version, which the job made."""
    FineTuningJob.objects.filter(pk=tenant.ids["job"]).update(adapter_version_id=tenant.ids["adapter_version"])
    return CARD_FILE


def checkpoint(tenant: Tenant) -> str:
    """A checkpoint whose adapter can be downloaded, but is damaged, of a run that had a second machine."""
    owned = {"organization": tenant.organization}
    job = FineTuningJob.objects.get(pk=tenant.ids["job"])
    run = Run.objects.create(
        job=job, attempt=7, pool=tenant.installation.pool, status="failed", finished_at=db_now(), **owned
    )
    RunMember.objects.create(
        run=run, rank=1, worker=tenant.installation.worker, address="10.0.0.1", heartbeat_at=db_now(), **owned
    )
    prefix, names = f"org/{tenant.organization.pk}/{run.pk}", ("adapter_config.json", "adapter_model.safetensors")
    for name in names:
        store().put_stream(f"{prefix}/{name}", [b"{}"])
    manifest = {"files": [{"name": name, "bytes": 2, "sha256": "0" * 64} for name in names]}
    places = {"kind": "checkpoint", "manifest": manifest, "manifest_sha256": "0" * 64, "object_prefix": prefix}
    upload = RunUpload.objects.create(run=run, **places, **owned)
    return Checkpoint.objects.create(job=job, run=run, upload=upload, step=3, bytes=1, **owned).pk


def deployment(tenant: Tenant) -> str:
    version = AdapterVersion.objects.get(pk=tenant.ids["adapter_version"])
    return str(deploy(version=version, by="system").pk)


def alias(tenant: Tenant) -> str:
    version = AdapterVersion.objects.get(pk=tenant.ids["adapter_version"])
    return Alias.objects.create(
        organization=tenant.organization,
        adapter=version.adapter,
        name="staging",
        model_name=f"{version.model_name.rsplit(':', 1)[0]}:{tenant.canary}",
        version=version,
        canary_version=version,
        canary_percent=5,
    ).pk


def conversion(tenant: Tenant) -> str:
    return Conversion.objects.create(
        organization=tenant.organization, version_id=tenant.ids["adapter_version"], kind="gguf", bytes=1, price_nano=0,
        created_by=tenant.canary, created_at=db_now(),
    ).pk  # fmt: skip


def hub_push(tenant: Tenant) -> str:
    push = HubPush.objects.create(
        organization=tenant.organization, version_id=tenant.ids["adapter_version"], created_by="system",
        repository=f"{tenant.canary}/model", created_at=db_now(),
    )  # fmt: skip
    HubPushToken.objects.create(push=push, token_sealed=b"sealed")
    return push.pk


def tracker_key(tenant: Tenant) -> str:
    return store_tracker_key(
        organization=tenant.organization, kind="wandb", secret=f"key-{tenant.canary}", url="", by="system", now=db_now()
    ).pk
