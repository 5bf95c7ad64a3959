"""A tenant's checkpoint."""

from apps.core.database.clock import db_now
from apps.core.objects.store import store
from apps.finetuning.models import Checkpoint, FineTuningJob, Run, RunMember, RunUpload
from tests.guards.makers.tenants import Tenant


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
