"""Operations on adapter versions: published by a finished run, named once, deleted without losing their history."""

import datetime
from typing import Any

import msgspec
from django.db import transaction
from django.db.models import Max
from django.utils.translation import gettext

from apps.accounts.models import Organization
from apps.accounts.notices.events import announce
from apps.adapters.checks import problems_of, problems_of_files
from apps.adapters.lifecycle import VERSION_TRANSITIONS, AdapterVersionStatus
from apps.adapters.models import Adapter, AdapterVersion
from apps.catalog.models import BaseModel
from apps.contracts.parity import ParityResult
from apps.core import audit
from apps.core.database.transitions import try_advance
from apps.core.errors import DomainError, InvalidState
from apps.core.ids import random_name
from apps.core.messages import outbox

JsonObject = dict[str, Any]
CHECKPOINT_MARK = ":ckpt-step-"  # precedes the step in the name of a checkpoint's model


_VERDICTS = {
    AdapterVersionStatus.READY: "The adapter is certified",
    AdapterVersionStatus.UNCERTIFIED: "The adapter is loaded without a certificate",
    AdapterVersionStatus.REFUSED: "The serving engine refused the adapter",
}


class AdapterRejected(DomainError):
    """The uploaded files are not an adapter that can be served on this base model."""

    code = "adapter_rejected"


class NewVersion(msgspec.Struct, frozen=True, kw_only=True):
    """A trained result to register.

    `adapter_name` is shared by the adapter's versions, all in one project; `suffix` is the part of the public name that
    its owner chose.
    The names of the version are derived from `ulid`, so a job's are known before it ends. A checkpoint brings a
    `model_name` and takes no version number. A result that no engine can load as an adapter is not servable.
    """

    organization: Organization
    project_id: str
    base_model: BaseModel
    adapter_name: str
    suffix: str
    source: str
    ulid: str
    object_prefix: str
    manifest: JsonObject
    manifest_sha256: str
    method: str
    rank: int
    target_modules: list[str]
    metrics: JsonObject
    report: JsonObject = {}
    exports: list[JsonObject] = []
    missing: list[dict[str, str]] = []
    is_servable: bool = True
    model_name: str | None = None


@transaction.atomic
def publish_version(new: NewVersion) -> AdapterVersion:
    """Check the files, register them under a new name. Raises AdapterRejected.

    The engine's name is random: the job does not reveal it.
    """
    _check_files(new)
    adapters = Adapter.objects.for_organization(new.organization).select_for_update()
    named = {"project_id": new.project_id, "name": new.adapter_name, "base_model": new.base_model}
    found = adapters.filter(**named, deleted_at=None).first()
    adapter = found or Adapter.objects.create(organization=new.organization, **named)
    model_name, number = new.model_name, None
    if model_name is None:
        model_name = model_name_of(
            base_model=new.base_model, organization=new.organization, suffix=new.suffix, ulid=new.ulid
        )
        number = (adapter.versions.aggregate(last=Max("number"))["last"] or 0) + 1
    version = AdapterVersion.objects.create(
        pk=f"adpv_{new.ulid}",
        organization=new.organization,
        adapter=adapter,
        number=number,
        model_name=model_name,
        lora_name=f"a-{random_name()}",
        source=new.source,
        object_prefix=new.object_prefix,
        manifest=new.manifest,
        manifest_sha256=new.manifest_sha256,
        bytes=sum(file["bytes"] for file in new.manifest["files"]),
        rank=new.rank,
        target_modules=new.target_modules,
        method=new.method,
        chat_template_sha256=new.base_model.chat_template_sha256,
        metrics=new.metrics,
        report=new.report,
        exports=new.exports,
        missing=new.missing,
        status=AdapterVersionStatus.CHECKING if new.is_servable else AdapterVersionStatus.FILES_ONLY,
    )
    audit.record(
        organization=new.organization, by=new.source, action="adapter.published", target=version.pk, model=model_name
    )
    return version


def _check_files(new: NewVersion) -> None:
    """Raise AdapterRejected unless the files can be served, or delivered if the result is not servable."""
    if new.is_servable:
        problems = problems_of(
            object_prefix=new.object_prefix,
            manifest=new.manifest,
            base_model=new.base_model,
            rank=new.rank,
            target_modules=new.target_modules,
        )
    else:
        problems = problems_of_files(object_prefix=new.object_prefix, manifest=new.manifest, base_model=new.base_model)
    if problems:
        raise AdapterRejected(
            gettext("The adapter cannot be served: %(problems)s") % {"problems": "; ".join(problems[:3])}
        )
    for export in new.exports:
        if problems := problems_of_files(
            object_prefix=export["object_prefix"], manifest=export["manifest"], base_model=new.base_model
        ):
            raise AdapterRejected(
                gettext("The export %(kind)s is not one: %(problems)s")
                % {"kind": export["kind"], "problems": "; ".join(problems[:3])}
            )


@transaction.atomic
def record_verdict(
    *, version: AdapterVersion, is_accepted: bool, reason: str, parity: ParityResult | None, now: datetime.datetime
) -> bool:
    """Record an engine's verdict on the version: ready with a certificate, uncertified without one, or refused.

    Returns whether the status changed. A single replica's report does not change a ready version.
    """
    accepted = AdapterVersionStatus.UNCERTIFIED if parity is None else AdapterVersionStatus.READY
    status = accepted if is_accepted else AdapterVersionStatus.REFUSED
    changes: dict[str, Any] = {"status_reason": "" if is_accepted else reason[:300]}
    if parity is not None:
        changes["parity"] = msgspec.to_builtins(parity)
    if status == AdapterVersionStatus.READY:
        changes["certified_at"] = now
    if not try_advance(version, to=status, transitions=VERSION_TRANSITIONS, **changes):
        return False
    outbox.publish(topic="adapter.checked", key=f"checked:{version.pk}:{status}", payload={"version_id": version.pk})
    audit.record(organization=version.organization_id, by="system", action=f"adapter.{status}", target=version.pk)
    announce(
        organization=version.organization_id,
        type=f"adapter.{'certified' if status == AdapterVersionStatus.READY else status}",
        subject=version.pk,
        title=lambda: f"{_VERDICTS[status]}: {version.model_name}",
        path=f"/adapters/{version.pk}",
        key=f"checked:{version.pk}:{status}",
        data={"model": version.model_name},
    )
    return True


def model_name_of(*, base_model: BaseModel, organization: Organization, suffix: str, ulid: str) -> str:
    """Return the public name of a version in OpenAI's form: ft:base:organization:suffix:id. It is never used again."""
    return f"ft:{base_model.name}:{organization.slug}:{suffix}:{ulid[-10:]}"


@transaction.atomic
def delete_version(*, version: AdapterVersion, by: str, now: datetime.datetime) -> AdapterVersion:
    """Stop offering the version and delete its files; its row, name and charges stay. Raises InvalidState."""
    changed = AdapterVersion.objects.filter(pk=version.pk, deleted_at=None).update(deleted_at=now)
    if not changed:
        raise InvalidState(gettext("This model was deleted already."), param="model")
    version.refresh_from_db()
    outbox.publish(topic="objects.delete", key=f"delete:{version.pk}", payload={"prefix": version.object_prefix})
    for export in version.exports:
        key = f"delete:{version.pk}:{export['kind']}"
        outbox.publish(topic="objects.delete", key=key, payload={"prefix": export["object_prefix"]})
    audit.record(
        organization=version.organization_id,
        by=by,
        action="adapter.deleted",
        target=version.pk,
        model=version.model_name,
    )
    return version
