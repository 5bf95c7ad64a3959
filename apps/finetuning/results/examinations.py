"""Examinations of uploaded adapters: an idle trainer computes what PEFT makes of fixed rows, for the certificate.

Until then the adapter is not served, because its files change with the probe. Where no trainer answers in time, it is
served without a certificate. The customer's own numbers would not do: false ones of the base model would let every
replica pass for a broken one.
"""

import datetime
import hashlib
import logging
import math

import msgspec
from django.db import transaction
from django.db.models import F, OuterRef, Q, Subquery

from apps.accounts.models import Organization, allowed_in, is_allowed
from apps.accounts.queries import regions_of
from apps.adapters.models import AdapterVersion
from apps.catalog.references import base_model_ref
from apps.contracts.parity import (
    MAX_CHAT_CHARACTERS,
    MAX_PARITY_BYTES,
    MAX_ROW_TOKENS,
    MAX_ROWS,
    PARITY_FILE,
    ParityProbe,
)
from apps.contracts.runs import Manifest, ManifestFile
from apps.contracts.worker_api import ExaminationReport, ExaminationRequest
from apps.core.database.clock import db_now
from apps.core.database.locks import lock
from apps.core.errors import InvalidValue, NotFound, PermissionDenied
from apps.core.objects.store import store
from apps.finetuning.models import Examination, Worker, WorkerKind
from apps.finetuning.quotes.pool_facts import LIVE_SECONDS
from apps.finetuning.recipes.start_points import signed_ref
from apps.finetuning.usage.occupancy import EXAMINED_WITHIN
from apps.serving.models import Deployment
from apps.serving.operations import release

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
_PATIENCE = datetime.timedelta(minutes=10)  # until a trainer begins
_MAX_TRIES = 2


def ask(*, version: AdapterVersion, now: datetime.datetime) -> bool:
    """Ask the trainers for the version's probe; return whether one may come. Run it in the version's transaction."""
    seen = now - datetime.timedelta(seconds=LIVE_SECONDS)
    trainers = Worker.objects.filter(kind=WorkerKind.TRAINER, revoked_at=None, last_seen_at__gte=seen)
    if (regions := regions_of(organization=version.organization_id)) is not None:
        trainers = trainers.filter(pool__region__in=regions)
    if not trainers.filter(cordoned_at=None, drain_requested_at=None).exists():
        return False
    Examination.objects.create(organization_id=version.organization_id, version=version, asked_at=now)
    return True


@transaction.atomic
def take(*, worker: Worker) -> ExaminationRequest | None:
    """Give the worker an open examination that no other one has; return None if there is none.

    Share holders take turns, and each has one trainer at a time. After `_PATIENCE` no trainer begins with one. Those of
    a suspended organization wait.
    """
    now = db_now()
    if not worker.takes_work:
        return None
    rows = Examination.objects.annotate(holder=Organization.share_holder_by("organization__"))
    is_taken = rows.filter(ended_at=None, taken_at__gte=now - EXAMINED_WITHIN).exclude(worker=None)
    if is_taken.filter(worker=worker).exists():
        return None  # one at a time: it comes with the hub token of a gated base model
    waiting = rows.filter(worker=None, ended_at=None, tries__lt=_MAX_TRIES, version__deleted_at=None)
    waiting = waiting.filter(asked_at__gte=now - _PATIENCE, organization__suspended_at=None)
    waiting = waiting.filter(allowed_in(worker.pool.region_id))
    if not waiting.exists():
        return None
    lock("examinations")  # or two workers would begin for one share holder
    taken_before = rows.filter(holder=OuterRef("holder")).exclude(taken_at=None)
    last_turn = Subquery(taken_before.order_by("-taken_at").values("taken_at")[:1])
    waiting = waiting.exclude(holder__in=is_taken.values("holder"))
    in_turn = waiting.order_by(last_turn.asc(nulls_first=True), "asked_at")
    row = in_turn.select_for_update(skip_locked=True, of=("self",)).first()
    if row is None:
        return None
    Examination.objects.filter(pk=row.pk).update(worker=worker, taken_at=now, tries=F("tries") + 1)
    version = AdapterVersion.objects.select_related("adapter__base_model").get(pk=row.version_id)
    return ExaminationRequest(
        id=row.pk,
        base_model=base_model_ref(version.adapter.base_model, has_token=True),
        adapter=signed_ref(version.pk, 0, version.manifest, version.manifest_sha256, version.object_prefix),
        lora_rank=version.rank,
        target_modules=tuple(version.target_modules),
    )


@transaction.atomic
def record(*, worker: Worker, report: ExaminationReport) -> None:
    """Add the probe to the files of the version and serve it; without one, give the examination back.

    It goes back as well if its organization may not use the region any more: another trainer may begin with it.
    Raises PermissionDenied for another kind of worker, NotFound for an examination that the worker does not have, and
    InvalidValue for numbers that cannot be true.
    """
    if worker.kind != WorkerKind.TRAINER:
        raise PermissionDenied("A trainer examines adapters; a replica does not.")
    taken = Examination.objects.filter(pk=report.id, worker=worker, ended_at=None).select_for_update()
    row = taken.first()
    if row is None:
        raise NotFound("This worker has no open examination of this id.", param="id")
    is_here = is_allowed(regions_of(organization=row.organization_id), worker.pool.region_id)
    problem = report.error[:300] if is_here else f"The organization may not use {worker.pool.region_id} any more."
    if report.probe is None or not is_here:
        logger.warning("%s could not examine %s: %s", worker.pk, row.version_id, problem)
        Examination.objects.filter(pk=row.pk).update(worker=None, problem=problem)
        if row.tries >= _MAX_TRIES:
            _end(row, problem=problem)
        return
    version = AdapterVersion.objects.select_related("adapter__base_model").get(pk=row.version_id)
    _check(report.probe, vocabulary=int(version.adapter.base_model.config.get("vocab_size") or 2**31))
    is_served = Deployment.objects.filter(adapter_version=version).exists()  # by a member who did not wait
    if version.deleted_at is None and not is_served:
        _add_probe(version, report.probe)
    _end(row)


def release_overdue(*, now: datetime.datetime) -> int:
    """Serve the versions for which no trainer was free or answered, without a certificate; return how many."""
    waits = Q(worker=None, asked_at__lt=now - _PATIENCE) | Q(taken_at__lt=now - EXAMINED_WITHIN)
    overdue = Examination.objects.filter(waits, ended_at=None, organization__suspended_at=None)
    return sum(_release(pk, now) for pk in list(overdue.values_list("pk", flat=True)[:100]))


@transaction.atomic
def _release(examination_id: str, now: datetime.datetime) -> bool:
    row = Examination.objects.filter(pk=examination_id, ended_at=None).select_for_update(skip_locked=True).first()
    if row is None or (row.worker_id and row.taken_at and row.taken_at >= now - EXAMINED_WITHIN):
        return False
    _end(row, problem=row.problem or "No trainer was free to compute the numbers of a certificate.")
    return True


def _end(row: Examination, *, problem: str = "") -> None:
    Examination.objects.filter(pk=row.pk).update(ended_at=db_now(), problem=problem)
    version = AdapterVersion.objects.select_related("adapter").get(pk=row.version_id)
    if version.deleted_at is None:
        release(version)


def _check(probe: ParityProbe, *, vocabulary: int) -> None:
    """Raise InvalidValue for a probe that an engine could not score, or that would take it long."""
    rows = probe.rows
    is_sized = rows and all(len(row.token_ids) > 1 for row in rows) and probe.bounded() == probe
    if not is_sized or len(msgspec.json.encode(probe)) > MAX_PARITY_BYTES:
        text = f"A probe has 1 to {MAX_ROWS} rows of 2 to {MAX_ROW_TOKENS:,} tokens, and a chat of at most"
        raise InvalidValue(f"{text} {MAX_CHAT_CHARACTERS:,} characters.", param="probe.rows")
    for row in rows:
        scores = (*row.tuned, *row.base)
        is_whole = len(row.tuned) == len(row.base) == len(row.token_ids) - 1
        if not is_whole or not all(math.isfinite(score) and score <= 1e-3 for score in scores):
            raise InvalidValue("A row has a log-probability for each token but the first.", param="probe.rows")
        if not all(0 <= token < vocabulary for token in row.token_ids):
            raise InvalidValue("A row has a token that the base model does not know.", param="probe.rows")


def _add_probe(version: AdapterVersion, probe: ParityProbe) -> None:
    """Store the probe beside the weights, and the manifest that names it."""
    kept = store().put_stream(f"{version.object_prefix}/{PARITY_FILE}", [msgspec.json.encode(probe)])
    manifest = msgspec.convert(version.manifest, Manifest)
    itself = ManifestFile(name=PARITY_FILE, sha256=kept.sha256, bytes=kept.bytes)
    manifest = msgspec.structs.replace(manifest, files=(*manifest.files, itself))
    content = msgspec.json.encode(manifest)
    store().put_stream(f"{version.object_prefix}/{MANIFEST}", [content])
    version.manifest = msgspec.to_builtins(manifest)
    version.manifest_sha256 = hashlib.sha256(content).hexdigest()
    version.bytes = sum(file.bytes for file in manifest.files)
    version.save(update_fields=["manifest", "manifest_sha256", "bytes"])
