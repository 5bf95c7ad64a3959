"""Runs over several machines: all of them get a place under the run's lease at once, or none does.

Workers offer themselves by claiming. The claim that finds enough of them forms the group: its worker is the first
machine and holds the run's lease as always, and the others are `RunMember` rows, which `members.py` serves. No machine
is set aside for a group that is not complete, so two groups cannot each hold what the other one lacks.
"""

import datetime
import math
from collections.abc import Collection, Sequence

import msgspec
from django.conf import settings
from django.db.models import Min, Q
from django.utils.translation import gettext

from apps.accounts.models import is_allowed
from apps.contracts.addresses.machines import NodeGroup, leads_elsewhere
from apps.contracts.addresses.networks import is_loopback
from apps.contracts.failures import FailureCode
from apps.contracts.worker_api import ClaimRequest
from apps.core.errors import InvalidValue
from apps.core.messages import outbox
from apps.finetuning.lifecycle import HEARTBEAT_SECONDS, LEASE_SECONDS, RunStatus
from apps.finetuning.models import FineTuningJob, Run, RunMember, Worker
from apps.finetuning.quotes.pool_facts import live_worker_filter
from apps.finetuning.runs.queue.machines import EARLIEST, Kept, held_on, machines_of
from apps.finetuning.usage.occupancy import Held, held_of
from apps.finetuning.usage.offers import Offer, could_join, read_offer

_SILENT = datetime.timedelta(seconds=2.5 * HEARTBEAT_SECONDS)  # a machine that missed two heartbeats may be gone

_DISTRUSTED = datetime.timedelta(minutes=30)  # for which a worker of a group that failed is chosen last


def offer_of(request: ClaimRequest) -> Offer | None:
    """Return the worker's offer; None if it joins no group. Raises InvalidValue for an address that is no machine's.

    Other machines connect there. Workers that reach the control plane by loopback all run on its machine.
    """
    if not request.address or request.port is None:
        return None
    if not leads_elsewhere(request.address) and not is_loopback(settings.INTERNAL_URL):
        text = gettext(
            "Other machines cannot reach %(address)s. Set ANNEAL_NODE_ADDRESS to the worker's name or IPv4 address."
        )
        raise InvalidValue(text % {"address": request.address}, param="address")
    return Offer(
        address=request.address, port=request.port, free_gpus=request.free_gpus, base_models=request.base_models
    )


def has_room(held: Held, *, worker: Worker, host_bytes: int | None) -> bool:
    """Return whether the machine's own memory holds another run of `host_bytes` beside those it has."""
    return not held.gpus or held.host_bytes + (host_bytes or 0) <= (worker.memory_bytes or math.inf)


def find_others(
    *, job: FineTuningJob, worker: Worker, kept: Collection[str], now: datetime.datetime
) -> list[Worker] | None:
    """Lock and return the other machines of a group that `worker` leads; None if they are too few, or it joins none.

    `kept` are workers whose GPUs wait for an earlier run. A worker whose row another claim has locked is left out: the
    next claim tries again.
    """
    if worker.offer is None:
        return None
    able = [each for each in _offering(job, worker, now) if each.pk not in kept]
    chosen = [each.pk for each in able[: job.node_count - 1]]
    locked = list(Worker.objects.select_for_update(skip_locked=True).filter(pk__in=chosen).order_by("pk"))
    held = held_of(workers=chosen)
    others = [each for each in locked if _can_join(each, job, held.get(each.pk, Held()))]
    return others if len(others) == job.node_count - 1 else None


def keepers(*, job: FineTuningJob, worker: Worker, kept: Collection[str], now: datetime.datetime) -> dict[str, Kept]:
    """Return what workers keep for this group: those that have its GPUs free first, as many as it needs.

    The last of them decides when it starts, by the earliest ends of the runs that they have. Workers `kept` for an
    earlier run are left out if enough others could join. Empty if fewer live workers could ever join it.
    """
    live = worker.pool.workers.filter(live_worker_filter(now), offer__isnull=False)
    able = [each for each in live if could_join(each, gpus=job.gpus_per_node, base_model=job.base_model_id)]
    if len(able) < job.node_count:
        return {}
    others = [each for each in able if each.pk not in kept]
    able = others if len(others) >= job.node_count else able
    machines = machines_of(able, held_on(able), of=EARLIEST)
    first = sorted(machines, key=lambda pk: (machines[pk].start_of(job), pk))[: job.node_count]
    start = machines[first[-1]].start_of(job)
    return {pk: Kept(seconds=start, spare_gpus=machines[pk].spare_at(start, job)) for pk in first}


def bind(*, run: Run, worker: Worker, others: Sequence[Worker], now: datetime.datetime) -> None:
    """Give the machines beside `worker` their places under the run's lease, and ring a doorbell for each.

    A machine learns of its place with its next claim. Its offer ends, so that one that dies now is in no other group
    before it has claimed again.
    """
    for rank, other in enumerate(others, start=1):
        RunMember.objects.create(
            organization_id=run.organization_id,
            run=run,
            rank=rank,
            worker=other,
            address=_offer(other).address,
            heartbeat_at=now,
        )
        key, payload = f"wake:{run.pk}:{rank}", {"pool": run.pool.machines.name}
        outbox.publish(topic="train.wake", key=key, payload=payload, organization=run.organization_id)
    for taken in (worker, *others) if others else ():
        taken.offer = msgspec.to_builtins(msgspec.structs.replace(_offer(taken), free_gpus=0))
        taken.save(update_fields=["offer"])


def master_of(worker: Worker) -> str:
    """Return where the machines of a group meet that this worker leads."""
    offer = _offer(worker)
    return f"{offer.address}:{offer.port}"


def place_of(*, run: Run, job: FineTuningJob, member: RunMember | None) -> NodeGroup | None:
    """Return a machine's place in the run's group, the first one's for None; None if the run has one machine."""
    if job.node_count == 1:
        return None
    host, _, port = run.master.rpartition(":")
    return NodeGroup(
        rank=member.rank if member else 0,
        node_count=job.node_count,
        master_address=host,
        master_port=int(port),
        address=member.address if member else host,
    )


def lease_end(*, run: Run, job: FineTuningJob, now: datetime.datetime) -> datetime.datetime:
    """Return when the lease ends that the run's worker renews now: a group's oldest heartbeat decides."""
    return min(now, _oldest_heartbeat(run, job) or now) + datetime.timedelta(seconds=LEASE_SECONDS)


def alive_until(*, run: Run, job: FineTuningJob, now: datetime.datetime) -> datetime.datetime:
    """Return until when every machine of the run was alive: now, or the last heartbeat of one that is silent."""
    oldest = _oldest_heartbeat(run, job)
    return oldest if oldest is not None and now - oldest > _SILENT else now


def is_draining(*, run: Run, job: FineTuningJob) -> bool:
    """Return whether one of the run's machines is to be given up, or its organization may not use the region now."""
    if run.return_requested_at is not None:
        return True
    facts = Run.objects.filter(pk=run.pk).values_list(
        "worker__drain_requested_at", "pool__region", "organization__regions"
    )
    drained_at, region, regions = facts.get()
    if drained_at is not None or not is_allowed(regions, region):
        return True
    return job.node_count > 1 and run.members.filter(left_at=None, worker__drain_requested_at__isnull=False).exists()


def explain_loss(*, run: Run, job: FineTuningJob, now: datetime.datetime) -> tuple[FailureCode, str]:
    """Return why a run lost its lease. A group that never came together is no failure of the training."""
    if job.node_count > 1:
        silent = run.members.filter(left_at=None, heartbeat_at__lt=now - _SILENT).order_by("rank").first()
        if silent is not None and silent.started_at is None:
            return FailureCode.PREEMPTED, f"Not all {job.node_count} machines started"
        if silent is not None:
            message = f"Lost contact with machine {silent.rank + 1} of {job.node_count}"
            return FailureCode.WORKER_LOST, message
    return FailureCode.WORKER_LOST, "Lost contact with the worker"


def _offering(job: FineTuningJob, worker: Worker, now: datetime.datetime) -> list[Worker]:
    """Return the pool's other workers that could join now, the smallest first.

    Those of groups that lately failed, or did not come together, come last: one of them may do that to every group.
    """
    live = list(worker.pool.workers.filter(live_worker_filter(now), offer__isnull=False).exclude(pk=worker.pk))
    held = held_of(workers=[each.pk for each in live])
    able = [each for each in live if _can_join(each, job, held.get(each.pk, Held()))]
    places = RunMember.objects.filter(worker__in=able, run__finished_at__gte=now - _DISTRUSTED)
    failed = places.filter(Q(started_at=None) | Q(run__status__in=(RunStatus.FAILED, RunStatus.LOST)))
    last = set(failed.values_list("worker_id", flat=True))
    return sorted(able, key=lambda each: (each.pk in last, each.gpu_count, each.pk))


def _can_join(worker: Worker, job: FineTuningJob, held: Held) -> bool:
    if worker.offer is None or not worker.takes_work:
        return False
    offer, free = _offer(worker), worker.gpu_count - held.gpus
    if offer.free_gpus is not None:
        free = min(free, offer.free_gpus)
    has_gpus = free >= job.gpus_per_node and offer.has_model(job.base_model_id)
    return has_gpus and has_room(held, worker=worker, host_bytes=job.estimate.get("host_bytes"))


def _offer(worker: Worker) -> Offer:
    return read_offer(worker.offer)


def _oldest_heartbeat(run: Run, job: FineTuningJob) -> datetime.datetime | None:
    """Return the oldest last heartbeat of a group's other machines that still train; None without any."""
    if job.node_count == 1:
        return None
    oldest: datetime.datetime | None = run.members.filter(left_at=None).aggregate(oldest=Min("heartbeat_at"))["oldest"]
    return oldest
