"""Creation and cancellation of batches."""

import datetime
from collections.abc import Iterable, Mapping

from django.db import transaction
from django.utils.translation import gettext

from apps.accounts.members.projects import project_of_new, require_work_in
from apps.accounts.models import Organization
from apps.accounts.shares import get_share_holder, share_of
from apps.batches.files import MAX_FILE_BYTES, PURPOSE, BatchFileTooLarge, check_expiry, new_file
from apps.batches.lifecycle import ACTIVE, BATCH_TRANSITIONS, INTERNAL_PURPOSE, BatchStatus
from apps.batches.models import Batch, BatchFile
from apps.batches.queries import find_file
from apps.core import audit
from apps.core.database.locks import lock
from apps.core.database.tenancy import id_of
from apps.core.database.transitions import try_advance
from apps.core.errors import InvalidState, InvalidValue, NotFound, QuotaExceeded
from apps.core.objects.store import bounded, store
from apps.datasets.intake.versions import storage_left

ENDPOINTS = ("/v1/chat/completions", "/v1/completions")
WINDOW = datetime.timedelta(hours=24)
MAX_ACTIVE = 20  # of an organization: each may have 50,000 rows
MAX_IN_AN_HOUR = 20  # of an organization: a batch costs its rows even if it is cancelled
_MAX_METADATA = 16
_RETRY_WINDOW = datetime.timedelta(minutes=10)


def create_batch(
    *,
    organization: Organization | str,
    input_file_id: str,
    endpoint: str,
    by: str,
    now: datetime.datetime,
    metadata: Mapping[str, str] | None = None,
    output_expires_after_seconds: int | None = None,
    is_retry: bool = False,
) -> Batch:
    """Create a batch; a worker then validates its file.

    A client's automatic retry returns the batch that the same request created within minutes. Raises InvalidValue,
    NotFound, QuotaExceeded.
    """
    if endpoint not in ENDPOINTS:
        raise InvalidValue(
            gettext("'%(endpoint)s' takes no batches; use %(endpoints)s.")
            % {"endpoint": endpoint[:60], "endpoints": " or ".join(ENDPOINTS)},
            param="endpoint",
        )
    check_expiry(output_expires_after_seconds, param="output_expires_after.seconds")
    if metadata is not None and (
        len(metadata) > _MAX_METADATA or any(len(key) > 64 or len(value) > 512 for key, value in metadata.items())
    ):
        raise InvalidValue(
            gettext("metadata has at most 16 pairs, keys up to 64 and values up to 512 characters."), param="metadata"
        )
    left_bytes = storage_left(organization=organization)
    with transaction.atomic():
        file = _input_file(organization, input_file_id)
        BatchFile.objects.select_for_update().get(pk=file.pk)  # it is not deleted meanwhile
        lock(f"batches:{get_share_holder(organization=organization)}")
        wanted = (endpoint, dict(metadata) if metadata is not None else None, output_expires_after_seconds)
        if is_retry and (found := _created_before(file, wanted, by, now)):
            return found
        if left_bytes == 0:
            raise QuotaExceeded(
                gettext(
                    "Your organization's storage is full, so there is no room for the answers: delete files you no "
                    "longer need, or ask the operator for more."
                )
            )
        _require_few(organization, now)
        batch = Batch.objects.create(
            organization_id=id_of(organization),
            project_id=project_of_new(organization=organization, by=by),
            endpoint=endpoint,
            input_file=file,
            metadata=dict(metadata) if metadata is not None else None,
            output_expires_after_seconds=output_expires_after_seconds,
            created_by=by,
            created_at=now,
            expires_at=now + WINDOW,
        )
        audit.record(organization=batch.organization_id, by=by, action="batch.created", target=batch.pk)
    batch.refresh_from_db()
    return batch


def _created_before(file: BatchFile, wanted: tuple[object, ...], by: str, now: datetime.datetime) -> Batch | None:
    """Return the batch that an earlier copy of the request created."""
    recent = file.batches.filter(created_by=by, created_at__gt=now - _RETRY_WINDOW).order_by("-created_at")
    same = (each for each in recent if (each.endpoint, each.metadata, each.output_expires_after_seconds) == wanted)
    return next(same, None)


def _input_file(organization: Organization | str, file_id: str) -> BatchFile:
    """Return the file of requests. Raises NotFound, and InvalidValue for a file of another purpose."""
    file = find_file(organization=organization, id=file_id)
    if file is None:
        raise NotFound(
            gettext("No such file: %(input_file_id)s. Upload one with the purpose '%(purpose)s'.")
            % {"input_file_id": file_id[:80], "purpose": PURPOSE},
            param="input_file_id",
            code="file_not_found",
        )
    if file.purpose != PURPOSE:
        raise InvalidValue(
            gettext("The file's purpose is '%(purpose)s', not '%(wanted)s'.")
            % {"purpose": file.purpose, "wanted": PURPOSE},
            param="input_file_id",
        )
    return file


def _require_few(organization: Organization | str, now: datetime.datetime) -> None:
    """Raise QuotaExceeded if the organization has too many batches, or created too many within an hour.

    Organizations that share a share holder have these limits together.
    """
    with share_of(organization) as organizations:
        mine = Batch.objects.filter(organization__in=organizations, eval_run="")
        active = mine.filter(status__in=ACTIVE).count()
        of_an_hour = mine.filter(created_at__gt=now - datetime.timedelta(hours=1)).count()
    if active >= MAX_ACTIVE:
        raise QuotaExceeded(
            gettext("Your organization has %(max_active)s batches that have not ended: wait for one.")
            % {"max_active": MAX_ACTIVE}
        )
    if of_an_hour >= MAX_IN_AN_HOUR:
        raise QuotaExceeded(
            gettext(
                "Your organization created %(max_in_an_hour)s batches within an hour, the most allowed: "
                "put more requests into one file, or try again later."
            )
            % {"max_in_an_hour": MAX_IN_AN_HOUR}
        )


def create_eval_batch(
    *, organization: str, project_id: str, run_id: str, lines: Iterable[bytes], by: str, now: datetime.datetime
) -> Batch:
    """Create the batch of requests of an eval's run. The run has the limits, so the batch has none.

    Its end publishes `eval.answered`. Raises QuotaExceeded if the storage is too small for the requests, and
    BatchFileTooLarge.
    """
    file = new_file(
        organization, INTERNAL_PURPOSE, f"{run_id}.jsonl", by=by, now=now, expires_after_seconds=None,
        project_id=project_id,
    )  # fmt: skip
    full = QuotaExceeded(gettext("Your organization's storage is too small for the requests of the run: delete files."))
    too_large = BatchFileTooLarge(
        gettext("The requests of a run have up to %(max_file_bytes)s MiB: use fewer items.")
        % {"max_file_bytes": MAX_FILE_BYTES // 1024**2}
    )
    sent = bounded(bounded(lines, MAX_FILE_BYTES, too_large), storage_left(organization=organization), full)
    file.bytes = store().put_stream(file.object_key, sent).bytes
    file.save(force_insert=True)
    return Batch.objects.create(
        organization_id=organization,
        project_id=project_id,
        endpoint=ENDPOINTS[0],
        input_file=file,
        eval_run=run_id,
        created_by=by,
        created_at=now,
        expires_at=now + WINDOW,
    )


@transaction.atomic
def cancel_batch(*, batch: Batch, by: str, now: datetime.datetime) -> Batch:
    """Send no more requests of the batch; repeating it changes nothing.

    Raises InvalidState once it is ending, and PermissionDenied for a viewer of its project.
    """
    require_work_in(project_id=batch.project_id, actor=by)
    return stop_batch(batch=batch, by=by, now=now)


@transaction.atomic
def stop_batch(*, batch: Batch, by: str, now: datetime.datetime) -> Batch:
    """Cancel the batch because its eval run has ended. Raises InvalidState once it is ending."""
    if batch.status in (BatchStatus.CANCELLING, BatchStatus.CANCELLED):
        return batch
    to = BatchStatus.CANCELLING
    if not try_advance(batch, to=to, transitions=BATCH_TRANSITIONS, cancelling_at=now):
        batch.refresh_from_db()
        raise InvalidState(
            gettext("The batch is %(status)s, so it cannot be cancelled.") % {"status": batch.status}, param="batch_id"
        )
    audit.record(organization=batch.organization_id, by=by, action="batch.cancelled", target=batch.pk)
    return batch
