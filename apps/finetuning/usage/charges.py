"""Charges for a job's GPU time: durable training, the minimum charge of a start, and the limits of the spend cap."""

import datetime
import math
from collections.abc import Iterable

from django.utils.translation import gettext

from apps.accounts.models import Organization
from apps.catalog.models import PriceRule
from apps.catalog.queries import list_active_prices
from apps.contracts.failures import Blame, FailureCode
from apps.core.errors import InvalidValue
from apps.core.money import dollars, rated, usd_decimal
from apps.finetuning.lifecycle import LEASE_SECONDS, RunStatus
from apps.finetuning.models import FineTuningJob, GpuPool, Run

MINIMUM_SECONDS = 60  # of each GPU, for each start; less if the GPUs were held for less
STOP_IN_ORDER_SECONDS = LEASE_SECONDS // 4  # from the heartbeat that requests the stop to the checkpoint
_ENDS_A_START = (RunStatus.SUCCEEDED, RunStatus.PAUSED, RunStatus.CANCELLED)


class SpendCapTooLow(InvalidValue):
    """The cap does not pay for one start of the job; the message gives the lowest cap that does."""

    code = "spend_cap_too_low"


def billed_ms(*, job: FineTuningJob, before: Run | None = None) -> int:
    """Return the GPU milliseconds to bill, of all GPUs; with `before`, only of the attempts before it.

    Training is billed if its steps are durable. A start is the first one, or a resume after a pause. It is billed for
    at least `MINIMUM_SECONDS` of each GPU, or for as long as its last attempt held them if that is less: loading,
    evaluation and upload use the GPUs as well, also if the customer stops it before training. A lost attempt does not
    end a start.
    """
    runs = job.runs.order_by("attempt")
    return _billed_ms(job, runs.filter(attempt__lt=before.attempt) if before else runs)


def _billed_ms(job: FineTuningJob, runs: Iterable[Run]) -> int:
    total = kept_ms = 0
    for run in runs:
        kept_ms += run.billed_gpu_ms
        if _ends_a_start(run):
            total += max(kept_ms, _minimum_ms(run, run.finished_at) * job.gpu_count)
            kept_ms = 0
    return total + kept_ms


def spent_ms(*, job: FineTuningJob, run: Run, before: Iterable[Run], seconds: float, now: datetime.datetime) -> int:
    """Return the GPU milliseconds to bill if the attempt, after `seconds` of training, stopped in order now.

    `before` are the job's earlier attempts, in their order.
    """
    trained = max(run.billed_gpu_ms, int(seconds * 1000) * job.gpu_count)
    return _billed_ms(job, before) + max(trained, _minimum_ms(run, now) * job.gpu_count)


def trained_ms(*, job: FineTuningJob) -> int:
    """Return the GPU milliseconds of durable training, without any minimum."""
    return sum(job.runs.values_list("billed_gpu_ms", flat=True))


def cost_of(*, job: FineTuningJob, gpu_ms: int) -> int:
    """Return the cost of this GPU time at the job's own price, never above its cap."""
    return min(value_of(job=job, gpu_ms=gpu_ms), job.spend_cap_nano)


def spent_nano(*, job: FineTuningJob) -> int:
    """Return the cost of what the job's attempts trained so far; 0 before it began."""
    return cost_of(job=job, gpu_ms=billed_ms(job=job))


def value_of(*, job: FineTuningJob, gpu_ms: int) -> int:
    """Return this GPU time at the job's own price, above the cap as well.

    What was billed before the job moved to another pool keeps the price of that pool.
    """
    if job.price_rule is None:
        return 0
    moved_ms = min(gpu_ms, job.moved_gpu_ms)
    moved_nano = job.moved_nano * moved_ms // job.moved_gpu_ms if moved_ms else 0
    own = rated(quantity=gpu_ms - moved_ms, price_nano=job.price_rule.price_nano, per=job.price_rule.per)
    return moved_nano + own


def estimate_loss_nano(*, job: FineTuningJob, gpu_ms: int, cost_nano: int) -> int:
    """Return the part of this time's value that a firm price leaves to the operator; 0 without a firm price."""
    return max(value_of(job=job, gpu_ms=gpu_ms) - cost_nano, 0) if job.is_firm else 0


def least_seconds(*, step_seconds: float) -> int:
    """Return the seconds of each GPU that a cap must pay for: the minimum charge, or one step and the stop after it."""
    return max(MINIMUM_SECONDS, math.ceil(STOP_IN_ORDER_SECONDS + step_seconds))


def least_cap_nano(*, price: PriceRule, gpu_count: int, step_seconds: float = 0.0, billed_ms: int = 0) -> int:
    """Return the lowest spend cap with which a job already billed `billed_ms` may start or resume."""
    start_ms = least_seconds(step_seconds=step_seconds) * 1000 * gpu_count
    return rated(quantity=billed_ms + start_ms, price_nano=price.price_nano, per=price.per)


def cheapest_start_nano(*, organization: Organization | str) -> int:
    """Return the minimum charge of a start on the cheapest open pool, 0 if no pool has a price."""
    names = GpuPool.objects.filter(is_open=True).values_list("name", flat=True)
    skus = {f"training:{name}" for name in names}
    prices = list_active_prices(prefix="training:", organization=organization)
    return min((least_cap_nano(price=rule, gpu_count=1) for rule in prices if rule.sku in skus), default=0)


def least_cap_of(*, job: FineTuningJob) -> int:
    """Return the lowest cap with which an admitted job may resume: for a firm price at most the quoted maximum."""
    if job.price_rule is None:
        return 0
    least_nano = job.moved_nano + least_cap_nano(
        price=job.price_rule,
        gpu_count=job.gpu_count,
        step_seconds=_step_seconds(job),
        billed_ms=max(job.billed_gpu_ms - job.moved_gpu_ms, 0),
    )
    return least_nano if job.firm_max_nano is None else min(least_nano, job.firm_max_nano)


def require_cap(*, cap_nano: int, least_nano: int) -> None:
    """Raise SpendCapTooLow for a cap below the least."""
    if cap_nano < least_nano:
        raise SpendCapTooLow(
            gettext(
                "A spend cap of %(cap)s does not pay for one start: it is billed for %(minimum_seconds)s "
                "seconds of each GPU, or for one step if that takes longer. Set a cap of %(least)s or more."
            )
            % {"cap": dollars(cap_nano), "minimum_seconds": MINIMUM_SECONDS, "least": dollars(least_nano)},
            param="budget.max_cost_usd",
            least_usd=usd_decimal(least_nano),
        )


def is_at_cap(*, job: FineTuningJob, gpu_ms: int) -> bool:
    """Return whether one more step and the time to stop, after this GPU time, would reach the cap.

    With a firm price, return whether this time has reached its limit: the time to stop is at the operator's expense.
    """
    if job.price_rule is None:
        return False
    if job.is_firm:
        return value_of(job=job, gpu_ms=gpu_ms) >= (job.firm_limit_nano or job.spend_cap_nano)
    stop_ms = math.ceil((STOP_IN_ORDER_SECONDS + _step_seconds(job)) * 1000) * job.gpu_count
    return value_of(job=job, gpu_ms=gpu_ms + stop_ms) >= job.spend_cap_nano


def _step_seconds(job: FineTuningJob) -> float:
    """Return the estimated seconds of one step of the job."""
    return (job.estimate.get("train_seconds_p50") or 0.0) / (job.estimate.get("steps") or 1)


def _minimum_ms(run: Run, until: datetime.datetime | None) -> int:
    """Return the minimum charge in milliseconds for each GPU that the attempt held until then.

    A group that not all its machines began cost its customer nothing.
    """
    if run.leased_at is None or until is None:
        return 0
    if run.master and run.members.filter(started_at=None).exists():
        return 0
    held_ms = max(int((until - run.leased_at).total_seconds() * 1000), 0)
    return min(held_ms, MINIMUM_SECONDS * 1000)


def _ends_a_start(run: Run) -> bool:
    if run.status == RunStatus.FAILED and run.failure_code in list(FailureCode):
        return FailureCode(run.failure_code).blame is Blame.CUSTOMER
    return run.status in _ENDS_A_START
