"""Leases of conversions: an idle trainer makes one at a time, stores the files, and has them charged once.

A lease lasts while the worker sends heartbeats. When a worker loses it, all its further calls are refused, and another
trainer starts again, with another place in the store.
"""

import datetime
import logging

import msgspec
from django.db import transaction
from django.db.models import F, OuterRef, Q, QuerySet, Subquery
from django.utils.translation import gettext_noop

from apps.accounts.models import Organization, allowed_in
from apps.accounts.notices.events import announce
from apps.adapters.checks import problems_of_files
from apps.adapters.models import AdapterVersion
from apps.billing.budgets import attribution_of_actor
from apps.billing.operations import settle_hold
from apps.catalog.references import base_model_ref
from apps.contracts.runs import Manifest
from apps.contracts.worker_api import (
    ConversionClaim,
    ConversionReport,
    ConversionRequest,
    UploadRequest,
    UploadResponse,
)
from apps.core import audit
from apps.core.database.clock import db_now
from apps.core.database.locks import lock
from apps.core.database.transitions import advance
from apps.core.errors import InvalidValue, PermissionDenied
from apps.core.messages import outbox
from apps.core.money import rated
from apps.core.objects.orphans import sweep
from apps.core.objects.store import object_key
from apps.finetuning.conversions.demand import TAKEABLE, may_not_be_taken_yet
from apps.finetuning.conversions.orders import LABELS
from apps.finetuning.lifecycle import CONVERSION_OPEN, CONVERSION_TRANSITIONS, CONVERSION_UNMADE, ConversionStatus
from apps.finetuning.models import Conversion, Worker, WorkerKind
from apps.finetuning.quotes.delivery import CONVERTER, GGUF, MERGED_16BIT
from apps.finetuning.recipes.start_points import signed_ref
from apps.finetuning.runs.leases import StaleLease
from apps.finetuning.runs.uploads import (
    record_verified,
    require_complete,
    require_contents,
    require_sealed,
    sign_places,
)

logger = logging.getLogger(__name__)

BEAT_SECONDS = 30
_SILENT = datetime.timedelta(minutes=5)  # then the lease is lost
_PATIENCE = datetime.timedelta(days=1)  # from the order
_MAX_FAILURES = 2
_KIND = "conversions"
_BYTES_BESIDE = 2**30  # tokenizer, metadata, and parts of a model that are not counted in its price
_ENDINGS = {MERGED_16BIT: ".safetensors", GGUF: ".gguf"}  # of a form's weights
_DELETED = gettext_noop("The model was deleted.")
_STOPPED = gettext_noop("The trainer stopped unexpectedly.")
_NOT_IDLE = gettext_noop("No trainer was idle for long enough within a day.")
_INTERRUPTED = gettext_noop("Trainers began it several times, and each had to stop for other work.")


@transaction.atomic
def take(*, worker: Worker, claim: ConversionClaim) -> ConversionRequest | None:
    """Lease the worker the next conversion that it can make; return None if there is none.

    Share holders take turns, and each has one trainer at a time. A conversion that the worker gave back is left to
    others for a while.
    """
    now = db_now()
    if not worker.takes_work:
        return None
    rows = Conversion.objects.annotate(holder=Organization.share_holder_by("organization__"))
    waiting = rows.filter(TAKEABLE).filter(allowed_in(worker.pool.region_id))
    if CONVERTER not in worker.software:
        waiting = waiting.exclude(kind=GGUF)
    if claim.base_models is not None:
        waiting = waiting.filter(version__adapter__base_model__in=claim.base_models)
    waiting = waiting.exclude(may_not_be_taken_yet(gave_back=Q(worker=worker), now=now))
    running = rows.filter(status=ConversionStatus.RUNNING)
    left = running.filter(worker=worker)
    if not waiting.exists() and not left.exists():
        return None
    lock("conversions")  # or two workers would begin for one share holder
    for lost in left.select_for_update(of=("self",)):  # its process ended without a report
        _give_back(lost, _STOPPED)
    taken_before = rows.filter(holder=OuterRef("holder")).exclude(leased_at=None)
    last_turn = Subquery(taken_before.order_by("-leased_at").values("leased_at")[:1])
    waiting = waiting.exclude(holder__in=running.values("holder"))
    in_turn = waiting.order_by(last_turn.asc(nulls_first=True), "created_at")
    row = in_turn.select_for_update(skip_locked=True, of=("self",)).first()
    if row is None:
        return None
    advance(
        row, to=ConversionStatus.RUNNING, transitions=CONVERSION_TRANSITIONS, worker_id=worker.pk, leased_at=now,
        heartbeat_at=now, attempt=row.attempt + 1, object_prefix="", manifest={}, manifest_sha256="", verified_at=None,
    )  # fmt: skip
    version = AdapterVersion.objects.select_related("adapter__base_model").get(pk=row.version_id)
    return ConversionRequest(
        id=row.pk,
        kind=row.kind,
        base_model=base_model_ref(version.adapter.base_model, has_token=True),
        adapter=signed_ref(version.pk, 0, version.manifest, version.manifest_sha256, version.object_prefix),
        base_bytes=row.bytes,
        beat_seconds=BEAT_SECONDS,
    )


def beat(*, worker: Worker, conversion_id: str) -> None:
    """Keep the lease. Raises StaleLease, also if the model was deleted, or may not be here any more.

    In the latter case the conversion waits for a trainer where it may be, as after an interruption.
    """
    rows = _leased(worker, conversion_id)
    here = rows.filter(allowed_in(worker.pool.region_id))
    if not here.exists():
        _release_elsewhere(worker, conversion_id)
        raise _stale()
    if not here.filter(version__deleted_at=None).exists() or not rows.update(heartbeat_at=db_now()):
        raise _stale()


@transaction.atomic
def _release_elsewhere(worker: Worker, conversion_id: str) -> None:
    row = _leased(worker, conversion_id).select_for_update().first()
    if row is not None:
        _wait(row, row.problem)


@transaction.atomic
def create_upload(*, worker: Worker, conversion_id: str, request: UploadRequest) -> UploadResponse:
    """Return a PUT URL for each file of what was made; the same manifest gets the same places.

    Raises StaleLease, and InvalidValue for another manifest than the attempt's first, or files that are too large.
    """
    row = _locked(worker, conversion_id)
    require_sealed(request.manifest, request.manifest_sha256)
    if request.manifest.kind != "model":
        raise InvalidValue("kind must be model", param="manifest.kind")
    if row.manifest_sha256 not in ("", request.manifest_sha256):
        raise InvalidValue("An attempt stores its files under one manifest.", param="manifest_sha256")
    if sum(file.bytes for file in request.manifest.files) > 2 * row.bytes + _BYTES_BESIDE:
        raise InvalidValue("The files are larger than this model.", param="manifest.files")
    row.object_prefix = f"{_attempt_prefix(row)}/{request.manifest_sha256[:32]}"
    row.manifest = msgspec.to_builtins(request.manifest)
    row.manifest_sha256 = request.manifest_sha256
    row.save(update_fields=["object_prefix", "manifest", "manifest_sha256"])
    return sign_places(row, request.manifest)


def finish(*, worker: Worker, conversion_id: str, report: ConversionReport) -> None:
    """End the attempt: deliver the stored files and charge them, or give the conversion back.

    The files are read before the transaction of the end, because that is slow. Raises StaleLease, UploadIncomplete,
    and FilesUnread until then.
    """
    if worker.kind != WorkerKind.TRAINER:
        raise PermissionDenied("A trainer converts models; a replica does not.")
    if report.manifest_sha256:
        _leased(worker, conversion_id).update(heartbeat_at=db_now())  # it repeats this until they are read
        _verify(worker, conversion_id, report.manifest_sha256)
    _finish(worker, conversion_id, report)


def release_overdue(*, now: datetime.datetime) -> int:
    """Take conversions back from silent workers, and end those that were not made in time; return how many."""
    silent = Q(status=ConversionStatus.RUNNING, heartbeat_at__lt=now - _SILENT)
    late = Q(status__in=CONVERSION_OPEN) & (Q(created_at__lt=now - _PATIENCE) | Q(version__deleted_at__isnull=False))
    ids = Conversion.objects.filter(silent | late, status__in=CONVERSION_OPEN).values_list("pk", flat=True)
    return sum(_release(pk, now) for pk in list(ids[:100]))


def sweep_orphans(*, now: datetime.datetime) -> int:
    """Delete the files that a worker stored after its lease had ended, a day ago; return how many folders."""
    return sweep(kinds=(_KIND,), known=_known, now=now)


def _known(ids: list[str]) -> set[str]:
    rows = Conversion.objects.filter(pk__in=ids).exclude(status__in=CONVERSION_UNMADE)
    return set(rows.exclude(version__deleted_at__isnull=False).values_list("pk", flat=True))


@transaction.atomic
def _release(conversion_id: str, now: datetime.datetime) -> bool:
    rows = Conversion.objects.filter(pk=conversion_id, status__in=CONVERSION_OPEN)
    row = rows.select_for_update(skip_locked=True).first()
    if row is None:
        return False
    if AdapterVersion.objects.filter(pk=row.version_id, deleted_at__isnull=False).exists():
        _fail(row, _DELETED)
    elif row.created_at < now - _PATIENCE:
        _fail(row, row.problem or (_INTERRUPTED if row.attempt > 1 else _NOT_IDLE))
    elif row.status == ConversionStatus.RUNNING and row.heartbeat_at and row.heartbeat_at < now - _SILENT:
        _give_back(row, _STOPPED)
    else:
        return False
    return True


def _verify(worker: Worker, conversion_id: str, manifest_sha256: str) -> None:
    """Have the stored files read, once. Raises UploadIncomplete, and FilesUnread while large files are read."""
    rows = _leased(worker, conversion_id)
    row = rows.filter(verified_at=None).first()
    if row is not None:
        require_contents(upload=row, manifest_sha256=manifest_sha256, owner=worker.pk)
        record_verified(row, rows.filter(object_prefix=row.object_prefix))


@transaction.atomic
def _finish(worker: Worker, conversion_id: str, report: ConversionReport) -> None:
    delivered = Conversion.objects.filter(pk=conversion_id, worker=worker, status=ConversionStatus.SUCCEEDED)
    if report.manifest_sha256 and delivered.filter(manifest_sha256=report.manifest_sha256).exists():
        return  # the answer was lost, and the report is repeated
    row = _locked(worker, conversion_id)
    if not report.manifest_sha256:
        if report.is_interrupted:
            _wait(row, row.problem, given_back_by=worker.pk)
        else:
            _give_back(row, report.problem or "The trainer gave no reason.", is_lasting=report.is_lasting)
        return
    require_complete(upload=row, manifest_sha256=report.manifest_sha256)
    rows = AdapterVersion.objects.filter(pk=row.version_id).select_related("adapter__base_model")
    version = rows.select_for_update(of=("self",)).get()
    problems = problems_of_files(
        object_prefix=row.object_prefix, manifest=row.manifest, base_model=version.adapter.base_model
    )
    if not any(file["name"].endswith(_ENDINGS[row.kind]) for file in row.manifest["files"]):
        problems.append(f"there is no {_ENDINGS[row.kind]} file")
    if version.deleted_at is not None:
        _fail(row, _DELETED)
    elif problems:
        _give_back(row, f"The trainer delivered something else: {problems[0]}.")
    else:
        _deliver(row, version)


def _deliver(row: Conversion, version: AdapterVersion) -> None:
    """Add the form to the version's files, and charge what was made."""
    made = sum(file.bytes for file in msgspec.convert(row.manifest, Manifest).files)
    version.exports = [
        *version.exports,
        {
            "kind": row.kind,
            "object_prefix": row.object_prefix,
            "manifest": row.manifest,
            "manifest_sha256": row.manifest_sha256,
            "bytes": made,
        },
    ]
    version.missing = [part for part in version.missing if part["kind"] != row.kind]
    version.save(update_fields=["exports", "missing"])
    rule = row.price_rule
    cost = min(rated(quantity=made, price_nano=rule.price_nano, per=rule.per), row.price_nano) if rule else 0
    advance(
        row, to=ConversionStatus.SUCCEEDED, transitions=CONVERSION_TRANSITIONS, ended_at=db_now(), bytes=made,
        cost_nano=cost, problem="",
    )  # fmt: skip
    if row.hold_id:
        settle_hold(hold_id=row.hold_id, capture_nano=cost, by="system", reason=f"{row.kind} of {version.model_name}")
    _record_end(row, version, type="adapter.converted", title=f"{LABELS[row.kind]} is ready: {version.model_name}")


def _give_back(row: Conversion, problem: str, *, is_lasting: bool = False) -> None:
    """Let another trainer try, unless enough have failed or a repeat would not help."""
    logger.warning("%s of %s failed: %s", row.pk, row.version_id, problem)
    if is_lasting or row.failures + 1 >= _MAX_FAILURES:
        _fail(row, problem)
        return
    Conversion.objects.filter(pk=row.pk).update(failures=F("failures") + 1)
    _wait(row, problem)


def _wait(row: Conversion, problem: str, *, given_back_by: str | None = None) -> None:
    _discard(row)
    advance(
        row, to=ConversionStatus.WAITING, transitions=CONVERSION_TRANSITIONS, worker_id=given_back_by, object_prefix="",
        problem=problem[:300],
    )  # fmt: skip


def _fail(row: Conversion, problem: str) -> None:
    """End the conversion without a charge."""
    _discard(row)
    advance(
        row, to=ConversionStatus.FAILED, transitions=CONVERSION_TRANSITIONS, ended_at=db_now(), problem=problem[:300]
    )  # fmt: skip
    if row.hold_id:
        settle_hold(hold_id=row.hold_id, capture_nano=0, by="system", reason=problem)
    version = AdapterVersion.objects.get(pk=row.version_id)
    title = f"{LABELS[row.kind]} could not be made: {version.model_name}"
    _record_end(row, version, type="adapter.not_converted", title=title)


def _record_end(row: Conversion, version: AdapterVersion, *, type: str, title: str) -> None:
    """Record the end in the audit log, and announce it to whom ordered the conversion."""
    audit.record(
        organization=row.organization_id, by="system", action=type, target=version.pk, kind=row.kind,
        cost_nano=row.cost_nano,
    )  # fmt: skip
    ordered_by = attribution_of_actor(organization=row.organization_id, by=row.created_by, labels={}).member_id
    announce(
        organization=row.organization_id,
        type=type,
        subject=version.pk,
        title=lambda: title,
        path=f"/adapters/{version.pk}",
        key=f"conversion:{row.pk}:{row.status}",
        users=[ordered_by] if ordered_by else [],
        data={"model": version.model_name, "kind": row.kind},
    )


def _discard(row: Conversion) -> None:
    """Delete what the attempt stored."""
    if row.object_prefix:
        key = f"delete:{row.pk}:{row.attempt}"
        outbox.publish(topic="objects.delete", key=key, payload={"prefix": _attempt_prefix(row)})


def _attempt_prefix(row: Conversion) -> str:
    return object_key(row.organization_id, _KIND, row.pk, f"a{row.attempt}")


def _leased(worker: Worker, conversion_id: str) -> QuerySet[Conversion]:
    return Conversion.objects.filter(pk=conversion_id, worker=worker, status=ConversionStatus.RUNNING)


def _locked(worker: Worker, conversion_id: str) -> Conversion:
    row = _leased(worker, conversion_id).select_for_update().first()
    if row is None:
        raise _stale()
    return row


def _stale() -> StaleLease:
    return StaleLease("This worker does not have the conversion any more.")
