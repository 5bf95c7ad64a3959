"""What a retraining of a plan would cost now: its job is rehearsed by the code that starts it, and nothing is kept."""

import datetime
from dataclasses import dataclass

from django.utils.translation import gettext

from apps.core.errors import DomainError
from apps.finetuning.jobs.dry_runs import rehearse_job
from apps.finetuning.jobs.retraining.launches import job_request
from apps.finetuning.jobs.retraining.schedules import schedule_of
from apps.finetuning.jobs.retraining.versions import newest_ready
from apps.finetuning.models import RetrainingPlan
from apps.finetuning.quotes.options import PoolQuote, split_key


@dataclass(frozen=True, kw_only=True)
class PlanPrice:
    """The price of one retraining on the newest rows, in nano-USD.

    Its training probably costs `likely_nano` and holds `held_nano`; both are None while it has no price. The whole
    retraining costs at most `limit_nano`, and those of the schedule `month_nano` in a month, None without one.
    `refusal` is why its job would not start now; "" if it would.
    """

    likely_nano: int | None
    held_nano: int | None
    limit_nano: int
    month_nano: int | None
    refusal: str

    @property
    def is_above_limit(self) -> bool:
        """Whether the training alone may cost more than the limit, so that every retraining would be refused."""
        return self.held_nano is not None and self.held_nano > self.limit_nano


def price_of(*, plan: RetrainingPlan, by: str, now: datetime.datetime) -> PlanPrice:
    """Return the price of a plan, which need not be stored, for the member or key `by`."""
    quoted, refusal = _rehearse(plan, by, now)
    schedule = schedule_of(plan)
    return PlanPrice(
        likely_nano=quoted.estimate.cost_nano_p50 if quoted else None,
        held_nano=quoted.cap_nano if quoted else None,
        limit_nano=plan.max_nano,
        month_nano=plan.max_nano * schedule.most_in_a_month() if schedule else None,
        refusal=refusal,
    )


def _rehearse(plan: RetrainingPlan, by: str, now: datetime.datetime) -> tuple[PoolQuote | None, str]:
    """Return the quote of the option that the job would take, and why it would not start, "" if it would."""
    training, held_out = newest_ready(plan.dataset_id), newest_ready(plan.held_out_id)
    if training is None or held_out is None:
        return None, gettext("The dataset has no version that is ready.")
    request = job_request(plan, training, held_out)
    try:
        rehearsal = rehearse_job(organization=plan.organization_id, request=request, by=by, now=now)
        name, gpu_count = split_key(request.pool or "", gpu_count=request.gpu_count)
    except DomainError as error:
        return None, error.message
    options = (each for each in rehearsal.quotes if name in ("", each.pool.name))
    quoted = next((each for each in options if gpu_count in (None, each.gpu_count)), None)
    return quoted, rehearsal.refusal.message if rehearsal.refusal else ""
