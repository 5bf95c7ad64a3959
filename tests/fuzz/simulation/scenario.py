"""One seed: customers, operators, machines and the reaper act in a random order, and then the faults stop."""

import functools
import random
from collections.abc import Callable
from unittest.mock import patch

from django.db import transaction

from apps.core.database.clock import db_now
from apps.core.errors import DomainError
from apps.core.objects.store import object_key, store
from apps.finetuning.jobs import control
from apps.finetuning.jobs.creation import create_job
from apps.finetuning.jobs.requests import JobRequest
from apps.finetuning.lifecycle import JOB_TERMINAL, NODE_ENDED, REAPER_SECONDS, JobStatus
from apps.finetuning.models import CapacityKind, CapacityNode, FineTuningJob, GpuPool, PoolCapacity, PricePolicy, Worker
from apps.finetuning.pools import operations
from apps.finetuning.pools.capacity.fleets import set_fleet
from apps.finetuning.pools.capacity.reconciliation import list_elastic_pools, reconcile_pool
from apps.finetuning.runs.leases import reclaim_expired_leases
from apps.finetuning.runs.lending import ask_machines_back
from apps.finetuning.runs.queue.shares import repair_shares
from apps.finetuning.runs.stalls import end_stalled_runs
from apps.finetuning.usage import quotas
from apps.serving.isolation import isolate_replica
from apps.serving.models import ReplicaFleet
from apps.serving.operations import drain_replica
from apps.serving.placements import record_requests
from apps.serving.ready_replicas import ready_replicas
from tests.factories.accounts import make_organization
from tests.factories.finetuning import TrainingSetup, make_pool, make_training_file, make_worker
from tests.factories.money import USD, give_credit
from tests.fuzz.simulation.clock import VirtualClock
from tests.fuzz.simulation.engine import SimulatedEngine
from tests.fuzz.simulation.invariants import broken_rules
from tests.fuzz.simulation.machines import Machine

FAULTY_SECONDS, CALM_SECONDS = 420, 7_200
ANSWERED_SECONDS = 400  # in which a request got a replica: nodes start, and load, for up to a minute and a half each
EMPTY_SECONDS = 600  # in which an elastic pool without work has released its machines
_MAX_JOBS = 6


class BrokenRule(AssertionError):
    """A rule does not hold; the message has the seed, the rule, and the operations until then."""


class World:
    """What all seeds share: a pool, a base model, and two organizations, one of which can pay little."""

    def __init__(self) -> None:
        self.setup = TrainingSetup(make_organization("First"))
        second = make_organization("Second")
        give_credit(second, USD // 4)
        self.organizations = (self.setup.organization, second)
        now = db_now()
        for organization in self.organizations:
            quotas.set_quota(organization=organization, by="system", now=now, concurrent_gpus=6)
        self.files = {
            each.pk: make_training_file(each, self.setup.base_model, rows=10_000) for each in self.organizations
        }
        Worker.objects.filter(pk=self.setup.worker.pk).update(cordoned_at=now)

    def forget_files(self) -> None:
        """Delete what the machines of a seed stored; their rows are rolled back."""
        for organization in self.organizations:
            store().delete_prefix(object_key(organization.pk, "runs"))


class Scenario:
    """One seed in a world, for the length of a transaction."""

    def __init__(self, world: World, seed: int) -> None:
        self.world, self.seed, self.random = world, seed, random.Random(seed)
        self.clock = VirtualClock()
        self.now = self.reaper_at = 0.0
        self.done: list[str] = []
        self.submitted = 0
        policy = self.random.choice(list(PricePolicy))
        GpuPool.objects.filter(pk=world.setup.pool.pk).update(price_policy=policy)
        holders: dict[str, str] = {}
        self.engine = SimulatedEngine(self.random, holders)
        self.fleet: ReplicaFleet | None = None
        self.asked_until = 0.0
        self.own = [
            Machine(make_worker(world.setup.pool, credential=f"annw_{number}", gpus=gpus), number, self.random, holders)
            for number, gpus in enumerate(self.random.choices((1, 1, 2), k=self.random.randint(2, 4)))
        ]
        if self.random.random() < 0.4:
            PoolCapacity.objects.create(
                pool=world.setup.pool, kind=CapacityKind.SLURM, maximum=self.random.randint(1, 4), idle_seconds=60,
                on_demand_nodes=self.random.choice((None, 0, 1)),
            )  # fmt: skip
            if self.random.random() < 0.5:
                self.own = []  # every machine is the engine's
            if self.random.random() < 0.5:
                self.fleet = self._make_fleet()
        self.borrower: GpuPool | None = None
        if self.own and self.random.random() < 0.4:
            self.borrower = make_pool("low")
            changes = {"borrows_from": world.setup.pool, "is_spot": True, "interruptions_per_hour": 1.0}
            GpuPool.objects.filter(pk=self.borrower.pk).update(**changes)

    def run(self) -> None:
        """Act with faults, then without, until every job ended or waits for its customer. Raises BrokenRule."""
        weights = {
            self.create: 3, self.cancel: 1, self.pause: 2, self.resume: 2, self.lose_messages: 3, self.silence: 3,
            self.restart: 3, self.fail: 2, self.repeat: 3, self.drain: 2, self.uncordon: 3, self.revoke: 0.2,
            self.stop_reaper: 0.5, self.lose_machine: 2, self.hinder_engine: 2, self.ask: 3, self.fail_replica: 2,
            self.drain_replica: 0.5, self.isolate: 0.3, self.nothing: 15,
        }  # fmt: skip
        self._do(self.create)
        while self.now < FAULTY_SECONDS:
            (act,) = self.random.choices(list(weights), list(weights.values()))
            self._do(act)
            self._pass(self.random.uniform(1, 10))
        self._do(self.calm)
        while self._open_jobs() and self.now < FAULTY_SECONDS + CALM_SECONDS:
            self._pass(20.0)
        if left := self._open_jobs():
            raise self._broken(f"these jobs never end: {[(job.pk, job.status) for job in left]}")
        if self.fleet is not None:
            self._require_answer()
        until = self.now + EMPTY_SECONDS
        kept = self.fleet.minimum if self.fleet is not None else 0
        while max(len(self.engine.nodes), len(self._open_nodes())) > kept and self.now < until:
            self._pass(20.0)
        if len(left := self._open_nodes()) > kept or len(left := list(self.engine.nodes)) > kept:
            raise self._broken(f"of these machines only {kept} should be left: {left}")

    def _require_answer(self) -> None:
        """Have a request get a replica. Raises BrokenRule if none is ready within the time of a start."""
        self.asked_until, self.engine.asked = self.now + ANSWERED_SECONDS, 1
        while not ready_replicas().exists() and self.now < self.asked_until:
            self._pass(5.0)
        if not ready_replicas().exists():
            raise self._broken("a request got no replica")
        self.asked_until = self.now

    # --- what happens -------------------------------------------------------------------------------------------------

    def nothing(self) -> None:
        pass

    def create(self) -> None:
        if FineTuningJob.objects.count() >= _MAX_JOBS:
            return
        organization, pool = self.random.choice(self.world.organizations), self.world.setup.pool
        if self.borrower is not None and self.random.random() < 0.5:
            pool = self.borrower
        request = JobRequest(
            base_model=self.world.setup.base_model.name,
            training_file=self.world.files[organization.pk].pk,
            pool=pool.name,
        )
        try:
            job = create_job(organization=organization, request=request, by="key_test", now=self.clock.now)
        except DomainError as refused:
            self.done.append(f"(refused: {refused.code})")
            return
        self.submitted += 1
        if len(self.own) > 2 and self.random.random() < 0.4:
            estimate = job.estimate | {"parallelism": "ddp"}
            FineTuningJob.objects.filter(pk=job.pk).update(gpu_count=2, node_count=2, estimate=estimate)

    def cancel(self) -> None:
        self._ask(control.request_cancellation)

    def pause(self) -> None:
        self._ask(control.request_pause)

    def resume(self) -> None:
        self._ask(control.continue_overrun if self.random.random() < 0.3 else control.resume)

    def lose_messages(self) -> None:
        self._on_a_machine(lambda machine: setattr(machine, "loss", self.random.choice((0.0, 0.1, 0.5))))

    def silence(self) -> None:
        """Stop a machine's processes for a while, as SIGSTOP does."""

        def stop(machine: Machine) -> None:
            machine.silent_until = self.now + self.random.uniform(20, 150)
            machine.has_fence = self.random.random() < 0.5

        self._on_a_machine(stop)

    def restart(self) -> None:
        self._on_a_machine(lambda machine: machine.restart(self.now, self.random.uniform(5, 90)))

    def fail(self) -> None:
        self._on_a_machine(Machine.fail)

    def repeat(self) -> None:
        self._on_a_machine(Machine.repeat)

    def drain(self) -> None:
        self._on_a_machine(lambda machine: operations.drain(worker=_worker(machine), by="user_operator"))

    def uncordon(self) -> None:
        self._on_a_machine(lambda machine: operations.uncordon(worker=_worker(machine), by="user_operator"))

    def revoke(self) -> None:
        """Refuse a machine from now on, unless too few are left for a group."""
        if len(self.own) > 2 and Worker.objects.filter(revoked_at=None).count() > 3:  # one of them is the world's
            self._on_a_machine(lambda machine: operations.revoke(worker=_worker(machine), by="user_operator"))

    def stop_reaper(self) -> None:
        """Have Celery do nothing for a while."""
        self.reaper_at = self.now + 120

    def lose_machine(self) -> None:
        self.engine.lose()

    def hinder_engine(self) -> None:
        self.engine.faults = self.random.choice((0.0, 0.2, 0.6))

    def ask(self) -> None:
        """Send requests to the replicas for a while."""
        if self.fleet is not None:
            self.asked_until = self.now + self.random.uniform(1, 120)
            self.engine.asked = self.random.randint(1, 4 * self.fleet.requests_per_replica)

    def fail_replica(self) -> None:
        if replicas := self.engine.replicas:
            self.random.choice(replicas).fail(self.now)

    def drain_replica(self) -> None:
        if replicas := self.engine.replicas:
            drain_replica(replica=self.random.choice(replicas).replica, is_draining=True, by="user_operator")

    def isolate(self) -> None:
        if replicas := self.engine.replicas:
            isolate_replica(replica_id=self.random.choice(replicas).replica.pk, reason="It counted wrong.")

    def reap(self) -> None:
        reclaim_expired_leases()
        end_stalled_runs()
        ask_machines_back(now=db_now())
        assert repair_shares() == 0, "a share of the queue had wrong counts"
        with patch("apps.finetuning.pools.capacity.reconciliation.engine_of", lambda _: self.engine):
            for pool_id in list_elastic_pools():
                reconcile_pool(pool_id=pool_id)

    def calm(self) -> None:
        """End every fault."""
        self.engine.faults = 0.0
        PoolCapacity.objects.update(failures=0, retry_at=None)  # as saving its settings does
        for replica in self.engine.replicas:
            replica.recover(self.now)
        for machine in self.machines:
            machine.loss, machine.silent_until, machine.gone_until, machine.has_fence = 0.0, 0.0, 0.0, True
            if machine in self.own:
                operations.uncordon(worker=_worker(machine), by="user_operator")

    # --- how it happens -----------------------------------------------------------------------------------------------

    @property
    def machines(self) -> list[Machine]:
        return [*self.own, *self.engine.machines]

    def _on_a_machine(self, act: Callable[[Machine], None]) -> None:
        if self.machines:
            act(self.random.choice(self.machines))

    def _open_nodes(self) -> list[str]:
        return list(CapacityNode.objects.exclude(status__in=NODE_ENDED).values_list("pk", flat=True))

    def _make_fleet(self) -> ReplicaFleet:
        limits = {
            "minimum": self.random.choice((0, 0, 1)), "maximum": self.random.randint(1, 3),
            "requests_per_replica": self.random.choice((1, 4)), "idle_seconds": self.random.choice((60, 120)),
        }  # fmt: skip
        setup = self.world.setup
        return set_fleet(pool=setup.pool, base_model=setup.base_model, by="user_operator", **limits)

    def _note_requests(self) -> None:
        """Note requests as the gateways do."""
        if self.fleet is not None:
            record_requests(counts={}, fleets=[self.fleet.pk], now=self.clock.now)

    def _ask(self, operation: Callable[..., FineTuningJob]) -> None:
        """Do what a customer or operator asks for a job, which may be refused."""
        jobs = list(FineTuningJob.objects.order_by("pk"))
        if not jobs:
            return
        try:
            operation(job=self.random.choice(jobs), by="key_test", now=self.clock.now)
        except DomainError as refused:
            self.done.append(f"(refused: {refused.code})")

    def _open_jobs(self) -> list[FineTuningJob]:
        return list(FineTuningJob.objects.exclude(status__in=[*JOB_TERMINAL, JobStatus.PAUSED]))

    def _pass(self, seconds: float) -> None:
        """Let time pass, have every machine do what is due, and check the rules."""
        self.now += seconds
        self.clock.advance(seconds)
        if self.now >= self.reaper_at:
            self.reaper_at = self.now + REAPER_SECONDS
            self._do(self.reap)
        if self.fleet is not None and self.now < self.asked_until:
            self._do(self._note_requests, name="machines get requests")
        elif self.engine.asked:
            self.engine.asked = 0
        for machine in self.own:
            self._do(functools.partial(machine.live, self.now), name=f"machine {machine.number}")
        self._do(functools.partial(self.engine.live, self.now), name="machines of the engine")
        if broken := broken_rules():
            raise self._broken("; ".join(broken))

    def _do(self, act: Callable[[], None], *, name: str = "") -> None:
        """Do it; nothing may raise an error that was not expected."""
        name = name or act.__name__
        if not name.startswith(("machine", "nothing", "reap")):
            self.done.append(f"{self.now:.0f} {name}")
        try:
            act()
        except Exception as error:
            raise self._broken(f"{name}: {error!r}") from error
        self.clock.correct_defaults()

    def _broken(self, what: str) -> BrokenRule:
        return BrokenRule(f"seed {self.seed}, {self.now:.0f} s: {what}\nafter {', '.join(self.done[-30:])}")


def _worker(machine: Machine) -> Worker:
    return Worker.objects.get(pk=machine.worker.pk)


def simulate(world: World, seed: int) -> tuple[int, list[str]]:
    """Run one seed and forget all it did. Raises BrokenRule.

    Return how many jobs were submitted, and the status that each job came to.
    """
    try:
        with transaction.atomic():
            scenario = Scenario(world, seed)
            scenario.run()
            ends = list(FineTuningJob.objects.values_list("status", flat=True))
            transaction.set_rollback(True)
            return scenario.submitted, ends
    finally:
        world.forget_files()
