"""Creation, change, cancellation and deletion of evals and runs."""

import datetime
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec
from django.db import transaction

from apps.accounts.members.projects import project_of_new, require_active, require_work_in
from apps.accounts.models import Organization
from apps.accounts.shares import get_share_holder, share_of
from apps.batches.completions.operations import check_metadata
from apps.batches.operations import stop_batch
from apps.billing.queries import get_balance
from apps.core import audit
from apps.core.audit_log import count_of_hour
from apps.core.database.clock import db_now
from apps.core.database.locks import lock, lock_row
from apps.core.database.tenancy import id_of
from apps.core.database.transitions import try_advance
from apps.core.errors import InvalidState, InvalidValue, QuotaExceeded
from apps.core.ids import new_id
from apps.core.messages import outbox
from apps.datasets.intake.versions import storage_left
from apps.serving.evals.costs import require_model
from apps.serving.evals.criteria import Criterion, SentCriterion, check_criteria, models_of
from apps.serving.evals.lifecycle import ACTIVE, RUN_TRANSITIONS, EvalRunStatus
from apps.serving.evals.models import Eval, EvalRun
from apps.serving.evals.notices import announce_end
from apps.serving.evals.quotes import check_run
from apps.serving.evals.sources import DataSource

MAX_EVALS = 1_000  # of an organization
MAX_RUNS = 1_000  # of an organization; each keeps its items until it is deleted
MAX_KEPT_BYTES = 256 * 1024  # of the criteria of an eval, and of the data source of a run
_RETRY_WINDOW = datetime.timedelta(minutes=10)
MAX_ACTIVE, MAX_IN_AN_HOUR = 5, 30  # runs of an organization, together with those that share with it


def create_eval(
    *,
    organization: Organization | str,
    name: str,
    data_source_config: Mapping[str, Any],
    criteria: Sequence[SentCriterion],
    metadata: Mapping[str, str],
    by: str,
    project: str = "",
) -> Eval:
    """Create an eval in the project, by default that of `by`.

    Raises InvalidValue, QuotaExceeded, and the errors of `project_of_new`.
    """
    project_id = project_of_new(organization=organization, by=by, wanted=project)
    checked = check_criteria(criteria)
    for place, model_name in models_of(checked):
        require_model(organization=organization, name=model_name, param=place)
    check_metadata(metadata)
    sent = msgspec.to_builtins(checked)
    size = _size_of(sent, param="testing_criteria") + len(msgspec.json.encode([data_source_config, metadata]))
    with transaction.atomic():
        lock(f"evals:{id_of(organization)}")
        _require_storage(id_of(organization), size)
        if Eval.objects.for_organization(organization).count() >= MAX_EVALS:
            raise QuotaExceeded(f"Your organization keeps {MAX_EVALS:,} evals, the most allowed: delete some.")
        created = Eval.objects.create(
            organization_id=id_of(organization),
            project_id=project_id,
            name=name,
            data_source_config=dict(data_source_config),
            testing_criteria=sent,
            metadata=dict(metadata),
            bytes=size,
            created_by=by,
        )
        audit.record(organization=created.organization_id, by=by, action="eval.created", target=created.pk)
    created.refresh_from_db()
    return created


@transaction.atomic
def update_eval(
    *, evaluated: Eval, name: str | None, metadata: Mapping[str, str] | None, by: str, now: datetime.datetime
) -> Eval:
    """Rename an eval or replace its metadata. None leaves a value unchanged.

    Raises InvalidValue, NotFound, and PermissionDenied for a viewer of its project.
    """
    require_work_in(project_id=evaluated.project_id, actor=by)
    check_metadata(metadata or {})
    evaluated = lock_row(evaluated)
    if name is not None:
        evaluated.name = name
    if metadata is not None:
        grown = len(msgspec.json.encode(metadata)) - len(msgspec.json.encode(evaluated.metadata))
        evaluated.metadata, evaluated.bytes = dict(metadata), evaluated.bytes + grown
    evaluated.updated_at = now
    evaluated.save(update_fields=["name", "metadata", "bytes", "updated_at"])
    audit.record(organization=evaluated.organization_id, by=by, action="eval.updated", target=evaluated.pk)
    return evaluated


@transaction.atomic
def delete_eval(*, evaluated: Eval, by: str) -> None:
    """Delete an eval with its runs.

    Raises InvalidState while one is in progress, and PermissionDenied for a viewer of its project.
    """
    require_work_in(project_id=evaluated.project_id, actor=by)
    lock(f"evals:{evaluated.organization_id}")
    if evaluated.runs.filter(status__in=ACTIVE).exists():
        raise InvalidState("A run of this eval is in progress: cancel it or wait for its end.", param="eval_id")
    audit.record(organization=evaluated.organization_id, by=by, action="eval.deleted", target=evaluated.pk)
    evaluated.delete()


def create_run(
    *,
    evaluated: Eval,
    name: str,
    data_source: Mapping[str, Any],
    source: DataSource,
    metadata: Mapping[str, str],
    cost_limit_nano: int | None,
    by: str,
    id: str | None = None,
    is_retry: bool = False,
) -> EvalRun:
    """Create a run; a task then reads its items. `data_source` is `source` as it was sent.

    `find_started` finds the run by `id`. A client's automatic retry returns the run that the same request created
    within minutes. Raises InvalidValue, UnknownFile, QuotaExceeded, InvalidState if the eval's
    project is archived, and PermissionDenied for a viewer of it.
    """
    require_work_in(project_id=evaluated.project_id, actor=by)
    require_active(project_id=evaluated.project_id)
    organization_id = evaluated.organization_id
    check_metadata(metadata)
    size = _size_of(data_source, param="data_source") + len(msgspec.json.encode([evaluated.testing_criteria, metadata]))
    with transaction.atomic():
        lock(f"evals:{organization_id}")
        lock_row(evaluated)
        lock(f"eval-runs:{get_share_holder(organization=organization_id)}")
        if is_retry:
            wanted = {"name": name, "data_source": dict(data_source), "metadata": dict(metadata), "created_by": by}
            recent = evaluated.runs.filter(**wanted, created_at__gt=db_now() - _RETRY_WINDOW)
            if found := recent.filter(cost_limit_nano=cost_limit_nano).order_by("-created_at").first():
                return found
        criteria = msgspec.convert(evaluated.testing_criteria, list[Criterion])
        model_name = check_run(organization=organization_id, criteria=criteria, source=source)
        if (model_name or models_of(criteria)) and get_balance(organization=organization_id).available_nano <= 0:
            raise QuotaExceeded("Your organization has no credit for what the run asks: add credit.")
        _require_storage(organization_id, size)
        _require_room(organization_id)
        run = EvalRun.objects.create(
            id=id or new_id("evalrun"),
            organization_id=organization_id,
            evaluated=evaluated,
            name=name,
            metadata=dict(metadata),
            data_source=dict(data_source),
            testing_criteria=evaluated.testing_criteria,
            model_name=model_name,
            cost_limit_nano=cost_limit_nano,
            bytes=size,
            created_by=by,
        )
        outbox.publish(
            topic="eval.prepare", key=f"eval:{run.pk}", payload={"run_id": run.pk}, organization=organization_id
        )
        audit.record(organization=organization_id, by=by, action="eval_run.created", target=run.pk)
    run.refresh_from_db()
    return run


def find_started(*, organization: Organization | str, run_id: str) -> EvalRun | None:
    """Return the run with this id; None if it is not started yet.

    Other callers wait until this transaction has ended.
    """
    lock(f"evals:{id_of(organization)}")
    return EvalRun.objects.for_organization(organization).filter(pk=run_id).first()


def _size_of(sent: object, *, param: str) -> int:
    """Return the size in bytes of the values stored as JSON. Raises InvalidValue above MAX_KEPT_BYTES."""
    size = len(msgspec.json.encode(sent))
    if size > MAX_KEPT_BYTES:
        raise InvalidValue(f"{param} has more than {MAX_KEPT_BYTES // 1024} KiB: shorten it.", param=param)
    return size


def _require_storage(organization_id: str, size: int) -> None:
    left = storage_left(organization=organization_id)
    if left is not None and left <= size:
        raise QuotaExceeded("Your organization's storage is full, so this and its results have no room: delete files.")


def _require_room(organization_id: str) -> None:
    if EvalRun.objects.for_organization(organization_id).count() >= MAX_RUNS:
        raise QuotaExceeded(f"Your organization keeps {MAX_RUNS:,} runs of evals, the most allowed: delete some.")
    with share_of(organization_id) as organizations:
        runs = EvalRun.objects.filter(organization__in=organizations)
        active = runs.filter(status__in=ACTIVE).count()
        # Not the rows, which their owner may delete: each run was read and asked.
        of_an_hour = sum(count_of_hour(organization=each, action="eval_run.created") for each in organizations)
    if active >= MAX_ACTIVE:
        raise QuotaExceeded(f"Your organization has {MAX_ACTIVE} runs of evals in progress: wait for one.")
    if of_an_hour >= MAX_IN_AN_HOUR:
        raise QuotaExceeded(
            f"Your organization began {MAX_IN_AN_HOUR} runs of evals within an hour, the most allowed: try again later."
        )


@transaction.atomic
def cancel_run(*, run: EvalRun, by: str, now: datetime.datetime) -> EvalRun:
    """End a run: no more requests are sent. Repeating it changes nothing.

    Raises InvalidState once it has ended, and PermissionDenied for a viewer of its project.
    """
    require_work_in(project_id=run.evaluated.project_id, actor=by)
    return stop_run(run=run, by=by, now=now)


@transaction.atomic
def stop_run(*, run: EvalRun, by: str, now: datetime.datetime) -> EvalRun:
    """End a run because its owner, such as a retraining, has ended. Raises InvalidState once it has ended."""
    if run.status == EvalRunStatus.CANCELED:
        return run
    if not try_advance(run, to=EvalRunStatus.CANCELED, transitions=RUN_TRANSITIONS, finished_at=now):
        run.refresh_from_db()
        raise InvalidState(f"The run is {run.status}, so it cannot be canceled.", param="run_id")
    if run.batch is not None:
        with suppress(InvalidState):  # it is ending: all its requests are answered
            stop_batch(batch=run.batch, by=by, now=now)
    audit.record(organization=run.organization_id, by=by, action="eval_run.canceled", target=run.pk)
    announce_end(run)
    return run


@transaction.atomic
def delete_run(*, run: EvalRun, by: str) -> None:
    """Delete a run with its results.

    Raises InvalidState while it is in progress, and PermissionDenied for a viewer of its project.
    """
    require_work_in(project_id=run.evaluated.project_id, actor=by)
    run = lock_row(run)
    if run.status in ACTIVE:
        raise InvalidState("The run is in progress: cancel it first.", param="run_id")
    audit.record(organization=run.organization_id, by=by, action="eval_run.deleted", target=run.pk)
    run.delete()
