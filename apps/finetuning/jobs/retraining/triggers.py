"""What begins retrainings: a schedule, the growth of a dataset, or a request."""

import datetime
import logging

from celery.exceptions import SoftTimeLimitExceeded
from django.db import transaction
from django.db.models import Count, Exists, F, OuterRef, Q, QuerySet, Subquery, Window
from django.db.models.functions import RowNumber

from apps.accounts.models import Organization
from apps.core.database.clock import db_now
from apps.datasets.lifecycle import DatasetVersionStatus
from apps.datasets.models import DatasetVersion
from apps.finetuning.jobs.retraining.launches import MAX_FAILED_JOBS
from apps.finetuning.jobs.retraining.schedules import schedule_of
from apps.finetuning.jobs.retraining.versions import newest_ready
from apps.finetuning.lifecycle import RETRAINING_OPEN, RetrainingTrigger
from apps.finetuning.models import Retraining, RetrainingPlan

MAX_A_DAY = 24  # of a plan
MAX_BEGUN = 20  # by one tick, over all organizations
MAX_KEPT = 200  # ended retrainings of a plan; older ones are deleted
_A_DAY = datetime.timedelta(days=1)
logger = logging.getLogger(__name__)


def begin_due() -> None:
    """Begin a retraining of each plan that is due, up to MAX_BEGUN; share holders take turns."""
    holder = Organization.share_holder_by("organization__")
    turn = Window(RowNumber(), partition_by=holder, order_by=[F("next_due_at").asc(nulls_last=True), "pk"])
    due = _due(db_now()).annotate(turn=turn).order_by("turn", "pk").values_list("pk", flat=True)
    for plan_id in due[:MAX_BEGUN]:
        try:
            _begin_if_due(plan_id)
        except SoftTimeLimitExceeded:
            raise
        except Exception:  # a process edge: one plan must not stop the others
            logger.exception("the retraining plan %s was not begun", plan_id)


@transaction.atomic
def _begin_if_due(plan_id: str) -> None:
    """Begin a retraining if the plan is still due. Its lock makes another process pass it over."""
    now = db_now()
    plan = _due(now).filter(pk=plan_id).select_for_update(of=("self",), skip_locked=True).first()
    if plan is None:
        return
    if plan.next_due_at is not None and plan.next_due_at <= now:
        trigger, key = RetrainingTrigger.SCHEDULE, f"schedule:{plan.next_due_at.isoformat()}"
    else:
        newest = newest_ready(plan.dataset_id)
        trigger, key = RetrainingTrigger.GROWTH, f"growth:{newest.pk if newest else ''}"
    if plan.retrainings.filter(trigger_key=key).exists():  # of a plan that was changed since
        _go_on_from_newest(plan, trigger, now)
    else:
        begin(plan=plan, trigger=trigger, key=key, by=plan.acts_as, now=now)


def begin(*, plan: RetrainingPlan, trigger: RetrainingTrigger, key: str, by: str, now: datetime.datetime) -> Retraining:
    """Begin a retraining of a locked plan; its job is created next."""
    _go_on_from_newest(plan, trigger, now)
    ended = plan.retrainings.exclude(status__in=RETRAINING_OPEN).order_by("-created_at", "-pk")
    used = ended.filter(training_file__isnull=False).values("pk")[:MAX_FAILED_JOBS]  # show what was tried
    plan.retrainings.filter(pk__in=list(ended.values_list("pk", flat=True)[MAX_KEPT:])).exclude(pk__in=used).delete()
    retraining = Retraining(
        organization_id=plan.organization_id, plan=plan, trigger=trigger, trigger_key=key, max_nano=plan.max_nano,
        created_by=by, created_at=now, next_at=now,
    )  # fmt: skip
    retraining.save(force_insert=True)
    return retraining


def _go_on_from_newest(plan: RetrainingPlan, trigger: RetrainingTrigger, now: datetime.datetime) -> None:
    """Count growth from the newest version, and set the next time after one of the schedule."""
    newest = newest_ready(plan.dataset_id)
    if newest is not None:
        plan.seen_number, plan.seen_rows = newest.number, newest.rows or 0
    schedule = schedule_of(plan)
    if trigger == RetrainingTrigger.SCHEDULE and schedule is not None:
        plan.next_due_at = schedule.next_due(now)
    plan.save(update_fields=["seen_number", "seen_rows", "next_due_at"])


def is_full_day(plan: RetrainingPlan, now: datetime.datetime) -> bool:
    """Return whether the plan has begun as many retrainings within a day as it may."""
    return plan.retrainings.filter(created_at__gt=now - _A_DAY).count() >= MAX_A_DAY


def _due(now: datetime.datetime) -> QuerySet[RetrainingPlan]:
    """Return the plans that may begin a retraining now."""
    newest = DatasetVersion.objects.filter(dataset=OuterRef("dataset"), status=DatasetVersionStatus.READY)
    newest = newest.order_by("-number")
    own = Retraining.objects.filter(plan=OuterRef("pk"))
    of_a_day = own.filter(created_at__gt=now - _A_DAY).order_by().values("plan").annotate(count=Count("pk"))
    plans = RetrainingPlan.objects.filter(is_enabled=True, organization__suspended_at=None).annotate(
        newest_number=Subquery(newest.values("number")[:1]),
        newest_rows=Subquery(newest.values("rows")[:1]),
        begun_of_a_day=Subquery(of_a_day.values("count")),
    )
    has_grown = Q(newest_number__gt=F("seen_number"), newest_rows__gte=F("seen_rows") + F("min_new_rows"))
    return plans.filter(
        Q(next_due_at__lte=now) | has_grown,
        Q(begun_of_a_day=None) | Q(begun_of_a_day__lt=MAX_A_DAY),
        ~Exists(own.filter(status__in=RETRAINING_OPEN)),
    )
