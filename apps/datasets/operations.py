"""Token counts and deletion of datasets. Uploads are in `intake`, validation is in `validation`."""

import datetime
import math
import time
from collections.abc import Callable

import msgspec
from django.db import transaction
from django.utils.translation import gettext

from apps.accounts.members.projects import require_work_in
from apps.accounts.models import Organization
from apps.catalog.models import BaseModel
from apps.catalog.queries import chat_renderer
from apps.contracts.chat import RowError
from apps.core import audit
from apps.core.database.clock import db_now
from apps.core.database.transitions import advance, sources_of
from apps.core.errors import DomainError, InvalidState, NotFound, Unavailable
from apps.core.messages import outbox
from apps.core.messages.translation import translated
from apps.datasets.intake.lanes import ReadingTime, TakesLong, lane_of_rows
from apps.datasets.intake.versions import lock_storage
from apps.datasets.lifecycle import VERSION_TRANSITIONS, DatasetVersionStatus
from apps.datasets.models import Dataset, DatasetVersion, TokenCount
from apps.datasets.problems import LineError, Rejected, from_row_error
from apps.datasets.queries import find_refusal, find_token_count, list_versions, require_none_unwritten
from apps.datasets.rows import iterate_rows
from apps.datasets.token_counts import count_rows, measure_rows
from apps.datasets.validation.leases import release_expired_leases

# Up to this size the caller waits for the count: about 15,000 short rows, measured at 3,000 to 6,000 a second.
COUNT_NOW_BYTES = 4_000_000
RETRY_SECONDS = 2  # until a file that is being validated is asked for again
_DELETED_AT_ONCE = 500


class NotReady(InvalidState):
    """The file is not validated yet, has errors, or is deleted."""

    code = "file_not_ready"


class StillValidating(Unavailable):
    """The file is still being validated; the client can ask again later."""

    code = "file_still_validating"


class RowRefused(DomainError):
    """The base model's chat template cannot render a row of the file."""

    code = "invalid_training_file"


# --- counting ---------------------------------------------------------------------------------------------------------


def count_tokens(*, version: DatasetVersion, base_model: BaseModel, until: float = math.inf) -> TokenCount:
    """Return the version's tokens under a model's tokenizer and template, counting them the first time.

    Raises NotReady, ModelNotInstalled, and RowRefused for the first row that the template cannot render, or for a file
    that takes longer than its size allows. A refusal is stored too. Raises TakesLong once `time.process_time` is past
    `until`.
    """
    if found := find_token_count(version=version, base_model=base_model):
        return found
    if refusal := find_refusal(version=version, base_model=base_model):
        raise _refused(refusal)
    if version.status != DatasetVersionStatus.READY:
        raise NotReady(
            gettext("%(version)s is %(status)s; tokens are counted once it is ready.")
            % {"version": version.pk, "status": version.status},
            param="training_file",
        )
    watch = _watch(version, until)
    try:
        watch()
        renderer = chat_renderer(base_model=base_model)
        with iterate_rows(version=version, on_progress=watch) as rows:
            lengths = count_rows(measure_rows(renderer, rows), longest_limit=base_model.context_length)
    except (RowError, Rejected) as error:
        refusal = from_row_error(error) if isinstance(error, RowError) else error.error
        _keep(version, base_model, tokens=0, trained_tokens=0, longest_row_tokens=0, histogram=[], refusal=refusal)
        raise _refused(refusal) from error
    return _keep(
        version,
        base_model,
        tokens=lengths.tokens,
        trained_tokens=lengths.trained_tokens,
        longest_row_tokens=lengths.longest_row_tokens,
        histogram=lengths.histogram,
        starts=lengths.starts,
        cuts=lengths.cuts,
    )


def _watch(version: DatasetVersion, until: float) -> Callable[[], None]:
    time_left = ReadingTime(version.data_bytes)

    def watch() -> None:
        time_left.check()
        if time.process_time() > until:
            raise TakesLong

    return watch


def _keep(version: DatasetVersion, base_model: BaseModel, **found: object) -> TokenCount:
    count, _ = TokenCount.objects.get_or_create(
        version=version,
        base_model=base_model,
        chat_template_sha256=base_model.chat_template_sha256,
        defaults={"organization_id": version.organization_id} | msgspec.to_builtins(found),
    )
    return count


def _refused(refusal: LineError) -> RowRefused:
    text = gettext("Line %(line)s: %(message)s %(fix)s") % {
        "line": refusal.line,
        "message": translated(refusal.message),
        "fix": translated(refusal.fix),
    }
    return RowRefused(text, param="training_file", line=refusal.line, row_code=refusal.code)


def is_counted_at_once(version: DatasetVersion) -> bool:
    """Return whether a caller may wait for the count, by the bytes to read: a compressed file can contain far more."""
    return version.data_bytes <= COUNT_NOW_BYTES


@transaction.atomic
def request_count(*, version: DatasetVersion, base_model: BaseModel) -> None:
    """Have a task count the tokens of a large file.

    Requests are limited to one per hour, so repeating is harmless; the next hour replaces a request lost with its
    worker.
    """
    hour = db_now().strftime("%Y%m%d%H")
    outbox.publish(
        topic="dataset.count",
        key=f"count:{version.pk}:{base_model.pk}:{base_model.chat_template_sha256[:16]}:{hour}",
        payload={"version_id": version.pk, "base_model_id": base_model.pk},
        organization=version.organization_id,
        lane=lane_of_rows(version.data_bytes),
    )


@transaction.atomic
def dismiss_errors(*, version: DatasetVersion, by: str, now: datetime.datetime) -> None:
    """Dismiss a file with errors from the list of files that need attention; nothing else changes.

    Raises PermissionDenied for a viewer of its project.
    """
    require_work_in(project_id=version.dataset.project_id, actor=by)
    changed = DatasetVersion.objects.filter(
        pk=version.pk, status=DatasetVersionStatus.INVALID, dismissed_at=None
    ).update(dismissed_at=now)
    if changed:
        audit.record(organization=version.organization_id, by=by, action="dataset.dismissed", target=version.pk)


# --- deleting ---------------------------------------------------------------------------------------------------------


@transaction.atomic
def delete_version(*, version: DatasetVersion, by: str, now: datetime.datetime) -> DatasetVersion:
    """Delete the file: hidden at once, its bytes deleted next.

    Raises InvalidState, and PermissionDenied for a viewer of its project.
    The row keeps name and hash, so jobs and adapters still show what they were trained on.
    """
    lock_storage(version.organization_id)  # so that the dataset gets no new version while it is deleted with its last
    version = DatasetVersion.objects.select_for_update(of=("self",)).select_related("dataset").get(pk=version.pk)
    require_work_in(project_id=version.dataset.project_id, actor=by)
    release_expired_leases(version, now)
    if version.status == DatasetVersionStatus.VALIDATING:
        raise InvalidState(gettext("The file is being validated; delete it in a moment."), param="file_id")
    require_none_unwritten(version)
    # Jobs are in a higher layer, so they are reached by relation.
    for jobs in (version.jobs, version.validating_jobs):
        job = jobs.filter(finished_at=None).first()
        if job:
            raise InvalidState(
                gettext("The job %(job)s still uses this file: cancel it or wait for its end.") % {"job": job.pk},
                param="file_id",
                code="file_in_use",
            )
    advance(
        version,
        to=DatasetVersionStatus.DELETED,
        transitions=VERSION_TRANSITIONS,
        deleted_at=now,
        errors=[],
        line_offsets=[],
    )
    if not version.dataset.versions.exclude(status=DatasetVersionStatus.DELETED).exists():
        Dataset.objects.filter(pk=version.dataset_id).update(deleted_at=now)
    prefix = version.object_key.rsplit("/", 1)[0]
    outbox.publish(
        topic="objects.delete",
        key=f"delete:{version.pk}",
        payload={"prefix": prefix},
        organization=version.organization_id,
    )
    audit.record(
        organization=version.organization_id, by=by, action="dataset.deleted", target=version.pk, sha256=version.sha256
    )
    return version


@transaction.atomic
def delete_dataset(*, organization: Organization, dataset_id: str, by: str, now: datetime.datetime) -> None:
    """Delete every version of a dataset, or none. Raises NotFound, and InvalidState as `delete_version` does."""
    versions = list_versions(organization=organization).filter(dataset=dataset_id)
    if not versions:
        raise NotFound(gettext("No such dataset."))
    for version in versions:
        delete_version(version=version, by=by, now=now)


def delete_expired(*, now: datetime.datetime) -> int:
    """Delete the expired files that no job uses; return how many."""
    deleted = 0
    deletable = sources_of(VERSION_TRANSITIONS, DatasetVersionStatus.DELETED)
    expired = DatasetVersion.objects.filter(expires_at__lt=now, status__in=deletable)
    for version in expired.order_by("?")[:_DELETED_AT_ONCE]:  # random order: files in use must not hide the others
        try:
            delete_version(version=version, by="system", now=now)
        except InvalidState:
            continue  # in use: the next run checks again
        deleted += 1
    return deleted
