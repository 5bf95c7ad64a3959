"""How much of each limit an organization uses: of its quota, and of what it allows members, labels and projects."""

import datetime
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from django.db.models import Q

from apps.accounts.members.projects import names_of_projects
from apps.accounts.models import Organization, default_project_id
from apps.accounts.queries import names_of_creators
from apps.accounts.shares import get_share_holder, share_of
from apps.finetuning.lifecycle import JOB_OPEN
from apps.finetuning.models import Allowance, AllowanceScope, FineTuningJob, Run
from apps.finetuning.usage.allowances import ALLOWED, list_allowances
from apps.finetuning.usage.demand import WINDOW, Span, count_now, held_seconds, most_at_once
from apps.finetuning.usage.job_use import month_of, read_use
from apps.finetuning.usage.quotas import LIMITS, get_quota
from apps.finetuning.usage.rates import RecentRequests, recent_requests
from apps.finetuning.usage.storage import MemberStorage, storage_of_members, stored_bytes

_MOST_TARGETS = 20  # those without an allowance that used the most GPU time, and then the most tokens
Target = tuple[AllowanceScope, str]


@dataclass(frozen=True)
class QuotaUse:
    """One limit, how much of it is used, and how much is held for unfinished jobs.

    None: no limit, or a rate, which only the gateway counts.
    """

    name: str
    limit: int | None
    used: int | None
    held: int | None = 0

    @property
    def available(self) -> int | None:
        if self.limit is None or self.used is None:
            return None
        return max(0, self.limit - self.used - (self.held or 0))


@dataclass(frozen=True, kw_only=True)
class RecentUse:
    """What was used in the last 30 days: the most GPUs and unfinished jobs at once, the GPU-seconds, and requests.

    `stored_bytes` are those of what was stored in this time and is kept.
    """

    gpus: int
    gpu_seconds: int
    jobs: int
    stored_bytes: int
    requests: RecentRequests

    @property
    def is_some(self) -> bool:
        return self.gpu_seconds > 0 or self.stored_bytes > 0 or self.requests.requests > 0


@dataclass(frozen=True, kw_only=True)
class TargetUse:
    """A member, label or project: its name, its allowance if it has one, and what it uses of each limit."""

    scope: AllowanceScope
    target: str
    name: str
    allowance: Allowance | None
    limits: tuple[QuotaUse, ...]
    recent: RecentUse


def list_quota_use(*, organization: Organization, now: datetime.datetime) -> list[QuotaUse]:
    """Return each limit with what counts against it, with that of organizations that share the limit."""
    quota = get_quota(organization=organization)
    with share_of(organization) as organizations:
        open_jobs = FineTuningJob.objects.filter(organization_id__in=organizations, status__in=JOB_OPEN)
        unfinished = list(open_jobs.values_list("pk", flat=True))
        use = read_use(holder=get_share_holder(organization=organization), jobs=unfinished, now=now)
        stored = stored_bytes(organizations=organizations).total()
    used = {
        "concurrent_gpus": use.gpus,
        "queued_jobs": len(unfinished),
        "gpu_seconds_per_month": int(use.seconds),
        "storage_bytes": stored,
    }
    held: dict[str, int | None] = dict.fromkeys(used, 0)
    held["gpu_seconds_per_month"] = round(sum(use.remaining.values()))
    limits = (name for name in LIMITS if name != "weight")  # a share of the queue, not a limit
    return [QuotaUse(name, getattr(quota, name), used.get(name), held.get(name)) for name in limits]


def list_target_use(*, organization: Organization, now: datetime.datetime) -> list[TargetUse]:
    """Return each member, label and project with an allowance, and then those that used something of late.

    The default project counts only if it has an allowance: without projects, all jobs and keys are its own.
    """
    allowances = {(each.scope, each.target): each for each in list_allowances(organization=organization)}
    names = names_of_creators(organization=organization)
    jobs, begin = _Jobs.read(organization, now), now - WINDOW
    requests = recent_requests(organization=organization, begin=begin)
    members = storage_of_members(organization=organization, begin=begin)
    stored = {(AllowanceScope.MEMBER, member): members.get(member, MemberStorage()) for member in names}
    recent = {
        target: jobs.recent_of(target, stored.get(target, MemberStorage()), requests.get(target, RecentRequests()))
        for target in {*jobs.targets, *requests, *stored, *allowances}
    }
    default = (AllowanceScope.PROJECT, default_project_id(organization))
    others = [
        target for target, use in recent.items() if use.is_some and target != default and target not in allowances
    ]
    others.sort(key=lambda target: (-recent[target].gpu_seconds, -recent[target].requests.tokens, target))
    shown = [*allowances, *others[:_MOST_TARGETS]]
    names |= names_of_projects(organization=organization, ids=[target for _, target in shown])
    return [
        TargetUse(
            scope=target[0],
            target=target[1],
            name=names.get(target[1], target[1]),
            allowance=allowances.get(target),
            limits=jobs.limits_of(target, allowances.get(target), stored.get(target)),
            recent=recent[target],
        )
        for target in shown
    ]


@dataclass(frozen=True)
class _Jobs:
    """An organization's jobs of the last 30 days and of this month, by member, label and project.

    `held` are the spans in which their attempts held GPUs, `lives` those from creation to end, and `needed` has the
    GPU-seconds that its unfinished jobs still need.
    """

    now: datetime.datetime
    held: Mapping[Target, Sequence[Span]]
    lives: Mapping[Target, Sequence[Span]]
    needed: Mapping[Target, float]

    @classmethod
    def read(cls, organization: Organization, now: datetime.datetime) -> "_Jobs":
        ended = Q(finished_at__gt=min(now - WINDOW, month_of(now)))
        jobs = FineTuningJob.objects.for_organization(organization).order_by()
        held: dict[Target, list[Span]] = defaultdict(list)
        lives: dict[Target, list[Span]] = defaultdict(list)
        needed: dict[Target, float] = defaultdict(float)
        columns = ("pk", "member_id", "project_id", "labels", "created_at", "finished_at")
        # Two statements, each with an index of its own.
        rows = [row for each in (Q(status__in=JOB_OPEN), ended) for row in jobs.filter(each).values_list(*columns)]
        unfinished = [pk for pk, *_, finished in rows if finished is None]
        remaining = read_use(holder=organization.pk, jobs=unfinished, now=now).remaining if unfinished else {}
        for pk, member, project, labels, created, finished in rows:
            for target in _targets_of(member, project, labels):
                lives[target].append((created, finished, 1))
                needed[target] += remaining.get(pk, 0.0)
        runs = Run.objects.for_organization(organization).filter(Q(finished_at=None) | ended)
        spans = runs.order_by().values_list(
            "job__member_id", "job__project_id", "job__labels", "leased_at", "finished_at", "job__gpu_count"
        )
        for member, project, labels, leased, finished, gpus in spans:
            if leased is None:
                continue
            for target in _targets_of(member, project, labels):
                held[target].append((leased, finished, gpus))
        return cls(now, held, lives, needed)

    @property
    def targets(self) -> set[Target]:
        return {*self.held, *self.lives}

    def recent_of(self, target: Target, stored: MemberStorage, requests: RecentRequests) -> RecentUse:
        begin, held = self.now - WINDOW, self.held.get(target, ())
        return RecentUse(
            gpus=most_at_once(held, begin),
            gpu_seconds=held_seconds(held, begin, self.now),
            jobs=most_at_once(self.lives.get(target, ()), begin),
            stored_bytes=stored.recent_bytes,
            requests=requests,
        )

    def limits_of(
        self, target: Target, allowance: Allowance | None, stored: MemberStorage | None
    ) -> tuple[QuotaUse, ...]:
        spans = self.held.get(target, ())
        used = {
            "concurrent_gpus": count_now(spans),
            "gpu_seconds_per_month": held_seconds(spans, month_of(self.now), self.now),
            "queued_jobs": count_now(self.lives.get(target, ())),
        }
        if stored is not None:
            used["storage_bytes"] = stored.bytes
        held: dict[str, int | None] = dict.fromkeys(used, 0)
        held["gpu_seconds_per_month"] = round(self.needed.get(target, 0.0))
        return tuple(QuotaUse(name, getattr(allowance, name, None), used.get(name), held.get(name)) for name in ALLOWED)


def _targets_of(member: str, project: str, labels: Mapping[str, str]) -> list[Target]:
    found = [(AllowanceScope.LABEL, f"{name}={value}") for name, value in labels.items()]
    found.append((AllowanceScope.PROJECT, project))
    return [*([(AllowanceScope.MEMBER, member)] if member else []), *found]
