"""How much of each limit an organization uses."""

import datetime
from dataclasses import dataclass

from django.db.models import Sum

from apps.accounts.models import Organization
from apps.accounts.shares import share_of
from apps.finetuning.lifecycle import JOB_OPEN, RUN_HOLDING_LEASE
from apps.finetuning.models import FineTuningJob, Run
from apps.finetuning.usage.quotas import LIMITS, get_quota, used_gpu_seconds
from apps.finetuning.usage.storage import stored_bytes


@dataclass(frozen=True)
class QuotaUse:
    """One limit. None: no limit, or a rate, which only the gateway counts."""

    name: str
    limit: int | None
    used: int | None

    @property
    def available(self) -> int | None:
        return None if self.limit is None or self.used is None else max(0, self.limit - self.used)


def list_quota_use(*, organization: Organization, now: datetime.datetime) -> list[QuotaUse]:
    """Return each limit with what counts against it, with that of organizations that share the limit."""
    quota = get_quota(organization=organization)
    with share_of(organization) as organizations:
        jobs = FineTuningJob.objects.filter(organization_id__in=organizations, status__in=JOB_OPEN)
        running = Run.objects.filter(organization_id__in=organizations, status__in=RUN_HOLDING_LEASE)
        used = {
            "concurrent_gpus": running.aggregate(total=Sum("job__gpu_count", default=0))["total"],
            "queued_jobs": jobs.count(),
            "gpu_seconds_per_month": int(sum(used_gpu_seconds(organizations=organizations, now=now).values())),
            "storage_bytes": stored_bytes(organizations=organizations).total(),
        }
    limits = (name for name in LIMITS if name != "weight")  # a share of the queue, not a limit
    return [QuotaUse(name, getattr(quota, name), used.get(name)) for name in limits]
