"""Start points of a job's weights: the base model, or an adapter version or checkpoint of an earlier job.

A job that continues an adapter keeps its shape: rank, scale and layers of the job that made it, or of the
configuration that was uploaded.
"""

from collections.abc import Mapping
from typing import Any

import msgspec
from django.utils.translation import gettext

from apps.accounts.members.visibility import visible
from apps.accounts.models import Organization
from apps.adapters.models import AdapterVersion
from apps.adapters.queries import get_version
from apps.catalog.models import BaseModel
from apps.catalog.queries import get_base_model
from apps.contracts.hyperparameters import Method
from apps.contracts.runs import CheckpointRef, Manifest, ManifestFile, SignedFile
from apps.core.errors import InvalidValue, NotFound
from apps.core.objects.store import store
from apps.finetuning.models import Checkpoint, FineTuningJob, Run
from apps.finetuning.recipes.checkpoint_names import find_named
from apps.finetuning.recipes.limits import as_json
from apps.finetuning.recipes.stored_requests import StartFrom, stored_request
from apps.serving.aliases import get_exact_version

READ_SECONDS = 6 * 3600  # within which a worker begins to read the last file of a folder: 200 GB at 10 MB/s
SHAPE = ("lora_rank", "lora_alpha", "target_modules", "use_dora", "use_rslora")
UPLOADED = "uploaded"  # the metric that holds the scale in the configuration of an uploaded version
_ADAPTER_PREFIX, _CHECKPOINT_PREFIX = "ft:", "ftckpt_"


class StartPoint(msgspec.Struct, frozen=True, kw_only=True):
    """A start point. `start_from` is stored with the job; `shape` is fixed by the adapter."""

    base_model: BaseModel
    start_from: StartFrom = StartFrom()
    shape: dict[str, Any] = {}

    def require_shape(self, asked: Mapping[str, object], *, method: Method) -> dict[str, object]:
        """Return `asked` with the adapter's shape. Raises InvalidValue if both set a value and differ."""
        if method is Method.FULL:
            return dict(asked)
        for name, value in self.shape.items():
            if asked.get(name) not in (None, "auto", value) and list(_many(asked[name])) != list(_many(value)):
                message = gettext(
                    "%(name)s is %(value)s in what this job continues: leave it out, or use the base model."
                ) % {"name": name, "value": as_json(value)}
                raise InvalidValue(message, param=f"hyperparameters.{name}")
        return dict(asked) | self.shape


def find_start_point(*, organization: Organization | str, model: str) -> StartPoint:
    """Return the start point that `model` names: a base model, an `ft:…` version, or a checkpoint by id or name.

    Versions and checkpoints must belong to the organization. Raises ModelNotFound or NotFound.
    """
    if named := find_named(organization, model):
        return _from_checkpoint(named, model)
    if model.startswith(_ADAPTER_PREFIX):
        version = get_exact_version(organization=organization, model_name=model)
        run, checkpoint = (
            rows.for_organization(organization).filter(pk=version.source).select_related("job").first()
            for rows in (Run.objects, Checkpoint.objects)
        )
        source = run or checkpoint
        shape = _shape(source.job) if source else _shape_of_upload(version)
        start_from = StartFrom(version=version.pk, model=model)
        return StartPoint(base_model=version.adapter.base_model, start_from=start_from, shape=shape)
    if model.startswith(_CHECKPOINT_PREFIX):
        return _from_checkpoint(find_checkpoint(organization, model), "")
    return StartPoint(base_model=get_base_model(name=model))


def _from_checkpoint(checkpoint: Checkpoint, name: str) -> StartPoint:
    job = checkpoint.job
    start_from = StartFrom(checkpoint=checkpoint.pk, model=name)
    return StartPoint(base_model=job.base_model, start_from=start_from, shape=_shape(job))


def project_ids_of_start(start: StartPoint) -> set[str]:
    """Return the project of the adapter or checkpoint that the start point continues; nothing for a base model."""
    versions = AdapterVersion.objects.filter(pk=start.start_from.version)
    checkpoints = Checkpoint.objects.filter(pk=start.start_from.checkpoint)
    if start.start_from.version:
        return set(versions.values_list("adapter__project_id", flat=True))
    return set(checkpoints.values_list("job__project_id", flat=True)) if start.start_from.checkpoint else set()


def start_ref(*, job: FineTuningJob) -> CheckpointRef | None:
    """Return the files a job starts from, under URLs that expire. Raises NotFound if they are deleted by now."""
    start = stored_request(job).start_from
    if start.version:
        version: AdapterVersion = get_version(organization=job.organization_id, id=start.version)
        return signed_ref(version.pk, 0, version.manifest, version.manifest_sha256, version.object_prefix)
    if start.checkpoint:
        checkpoint = find_checkpoint(job.organization_id, start.checkpoint)
        upload = checkpoint.upload
        return signed_ref(
            checkpoint.pk,
            checkpoint.step,
            upload.manifest,
            upload.manifest_sha256,
            upload.object_prefix,
        )
    return None


def signed_ref(id: str, step: int, manifest: Mapping[str, object], manifest_sha256: str, prefix: str) -> CheckpointRef:
    """Return the location of every file of a sealed folder, and of its manifest, which the worker verifies."""
    sealed = msgspec.convert(manifest, Manifest)
    itself = ManifestFile(name="manifest.json", sha256=manifest_sha256, bytes=len(msgspec.json.encode(sealed)))
    files = tuple(
        SignedFile(
            name=file.name,
            sha256=file.sha256,
            bytes=file.bytes,
            url=store().signed_url(f"{prefix}/{file.name}", "GET", expires_seconds=READ_SECONDS, base="internal"),
        )
        for file in (*sealed.files, itself)
    )
    return CheckpointRef(id=id, step=step, manifest_sha256=manifest_sha256, files=files)


def find_checkpoint(organization: Organization | str, checkpoint_id: str, *, is_locked: bool = False) -> Checkpoint:
    """Return one of the existing checkpoints that the request sees. Raises NotFound."""
    rows = visible(Checkpoint.objects.for_organization(organization), project="job__project")
    rows = rows.filter(deleted_at=None, quarantined_at=None)
    rows = rows.select_related("job__base_model", "job__organization", "upload").filter(pk=checkpoint_id)
    found = (rows.select_for_update(of=("self",)) if is_locked else rows).first()
    if found is None:
        raise NotFound(
            gettext("The checkpoint %(checkpoint_id)s no longer exists. Choose one that its job lists.")
            % {"checkpoint_id": repr(checkpoint_id[:64])},
            param="model",
            code="checkpoint_not_found",
        )
    return found


def _shape(job: FineTuningJob) -> dict[str, object]:
    if job.method == Method.FULL:
        return {}
    return {name: job.hyperparameters[name] for name in SHAPE if name in job.hyperparameters}


def _shape_of_upload(version: AdapterVersion) -> dict[str, object]:
    return {"lora_rank": version.rank, "target_modules": version.target_modules} | version.metrics.get(UPLOADED, {})


def scale_of_upload(config: Mapping[str, object]) -> dict[str, object]:
    """Return what a job that continues this checked configuration must keep, besides rank and layers."""
    alpha = config["lora_alpha"]
    assert isinstance(alpha, int | float)
    whole = int(alpha) if alpha == int(alpha) else alpha
    return {"lora_alpha": whole, "use_dora": False, "use_rslora": bool(config.get("use_rslora"))}


def _many(value: object) -> tuple[object, ...]:
    return tuple(value) if isinstance(value, list | tuple) else (value,)
