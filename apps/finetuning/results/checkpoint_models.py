"""The adapters in checkpoints: their files, and checkpoints that are served as models.

To be served, the adapter is copied out of the checkpoint and gets its own name in the API. The copy is made when a
request first uses the name. It outlives the checkpoint, which newer checkpoints replace.
"""

from typing import Any

from django.db import transaction
from django.utils.translation import gettext

from apps.accounts.members.projects import require_work_in
from apps.accounts.models import Organization
from apps.adapters.models import AdapterVersion
from apps.adapters.operations import CHECKPOINT_MARK, NewVersion
from apps.adapters.queries import list_versions
from apps.catalog.queries import ModelNotFound
from apps.core.errors import InvalidState
from apps.core.ids import ulid_of
from apps.core.messages import outbox
from apps.core.objects.store import object_key, store
from apps.finetuning.models import Checkpoint, FineTuningJob
from apps.finetuning.recipes.checkpoint_names import find_named, may_answer, name_of
from apps.finetuning.recipes.start_points import find_checkpoint
from apps.finetuning.usage.storage import require_any_storage
from apps.serving.aliases import get_exact_version
from apps.serving.operations import publish

_FILES = ("adapter_config.json", "adapter_model.safetensors")


def request_model(*, organization_id: str, model_name: str) -> bool:
    """Request the model of a named checkpoint; return whether the organization has such a checkpoint."""
    checkpoint = find_named(organization_id, model_name)
    if checkpoint is None:
        return False
    with transaction.atomic():
        outbox.publish(
            topic="checkpoint.named",
            key=f"checkpoint:{checkpoint.pk}",
            payload={"organization_id": organization_id, "checkpoint_id": checkpoint.pk},
            organization=organization_id,  # gigabytes may be copied, so organizations take turns
        )
    return True


def version_named(*, organization: Organization | str, model_name: str) -> AdapterVersion:
    """Return the version of this name. If the name stands for a checkpoint, serve it first.

    Raises ModelNotFound and the errors of `serve_checkpoint`.
    """
    if checkpoint := find_named(organization, model_name):
        return serve_checkpoint(organization=organization, checkpoint_id=checkpoint.pk)
    return get_exact_version(organization=organization, model_name=model_name)


def require_checkpoint(*, organization: Organization | str, model_name: str) -> None:
    """Raise ModelNotFound unless this is the name of a checkpoint, whether or not its model exists yet."""
    is_served = CHECKPOINT_MARK in model_name and list_versions(organization=organization).filter(model_name=model_name)
    if not is_served and find_named(organization, model_name) is None:
        raise ModelNotFound(
            gettext("No checkpoint has this name. The list of a job's checkpoints has their names."), param="model"
        )


@transaction.atomic
def serve_checkpoint(*, organization: Organization | str, checkpoint_id: str, by: str | None = None) -> AdapterVersion:
    """Serve the checkpoint's adapter as a version of the job's adapter; a second call returns the same version.

    `by` asked for it, if it is not a request to its model. Raises NotFound, InvalidState, AdapterRejected, and
    PermissionDenied for a viewer of its project.
    """
    checkpoint = find_checkpoint(organization, checkpoint_id, is_locked=True)
    job = checkpoint.job
    if by is not None:
        require_work_in(project_id=job.project_id, actor=by)
    version = AdapterVersion.objects.filter(model_name=name_of(checkpoint)).first()
    if version is not None and version.deleted_at is None:
        return version
    if version is not None:
        raise InvalidState(gettext("The model of this checkpoint was deleted, and names are never reused."))
    if not may_answer(job):
        raise InvalidState(
            gettext("The engine cannot load this job's result as an adapter, so its checkpoints cannot answer.")
        )
    require_any_storage(organization=job.organization_id, by=job.member_id)
    manifest, prefix = _copy(checkpoint)
    new = version_of_job(
        job,
        source=checkpoint.pk,
        ulid=ulid_of(checkpoint.pk),
        model_name=name_of(checkpoint),
        object_prefix=prefix,
        manifest=manifest,
        manifest_sha256=checkpoint.upload.manifest_sha256,
        metrics={name: value for name, value in checkpoint.metrics.items() if value is not None}
        | {"step": checkpoint.step},
    )
    return publish(new)


def version_of_job(job: FineTuningJob, **of_result: Any) -> NewVersion:
    """Return a version of the job's adapter. `of_result` are the fields that its result decides."""
    return NewVersion(
        organization=job.organization,
        project_id=job.project_id,
        base_model=job.base_model,
        adapter_name=job.adapter_name,
        suffix=job.suffix,
        method=job.method,
        rank=job.hyperparameters["lora_rank"],
        target_modules=list(job.hyperparameters["target_modules"]),
        **of_result,
    )


def adapter_files(*, organization: Organization | str, checkpoint_id: str) -> tuple[Checkpoint, list[tuple[str, str]]]:
    """Return the checkpoint and its adapter's files as (name, object key). Raises NotFound, InvalidState."""
    checkpoint = find_checkpoint(organization, checkpoint_id)
    prefix = checkpoint.upload.object_prefix
    return checkpoint, [(file["name"], f"{prefix}/{file['name']}") for file in _files_of(checkpoint)]


def _files_of(checkpoint: Checkpoint) -> list[dict[str, Any]]:
    files = [file for file in checkpoint.upload.manifest["files"] if file["name"] in _FILES]
    if len(files) < len(_FILES):
        raise InvalidState(gettext("This checkpoint holds no adapter."))
    return files


def _copy(checkpoint: Checkpoint) -> tuple[dict[str, object], str]:
    """Copy the adapter's files to a separate location; return their manifest and that location."""
    whole, source = checkpoint.upload.manifest, checkpoint.upload.object_prefix
    files = _files_of(checkpoint)
    prefix = object_key(checkpoint.organization_id, "runs", checkpoint.job_id, "served", checkpoint.pk)
    for file in files:
        copied = store().compose(f"{prefix}/{file['name']}", [f"{source}/{file['name']}"])
        if copied.sha256 != file["sha256"]:
            raise InvalidState(gettext("The checkpoint's files are damaged."))
    return whole | {"kind": "adapter", "files": files}, prefix
