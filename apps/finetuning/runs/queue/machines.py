"""When the GPUs of machines are free, by what the runs that hold them still need."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from apps.finetuning.lifecycle import RUN_HOLDING_LEASE
from apps.finetuning.models import FineTuningJob, Run, RunMember, Worker

EARLIEST, LATEST = "train_seconds_p10", "train_seconds_p90"  # of an estimate
_READ = ("pool", "gpu_count", "node_count", "step", "total_steps", "estimate")  # of jobs that hold machines


class Kept(NamedTuple):
    """GPUs that a machine keeps for a run which starts in so many seconds.

    A later run that ends before takes none of them, and neither does one of at most `spare_gpus`, however long.
    """

    seconds: float
    spare_gpus: int = 0

    def allows(self, job: FineTuningJob) -> bool:
        """Return whether a run of the job delays no start. One without an estimate might."""
        is_short = bool(job.estimate.get("train_seconds_p50")) and seconds_left(job, LATEST) <= self.seconds
        return job.node_count == 1 and (is_short or job.gpu_count <= self.spare_gpus)

    def with_another(self, other: "Kept") -> "Kept":
        """Return what the machine keeps for two runs."""
        return Kept(min(self.seconds, other.seconds))


class Machine:
    """A machine and the seconds after which each of its GPUs is free; `ready_after` if it does not run yet."""

    def __init__(self, gpus: int, *, joins: bool, ready_after: float = 0.0) -> None:
        self.gpus, self.joins = gpus, joins
        self.free_after = [ready_after] * gpus

    @classmethod
    def of(cls, worker: Worker) -> "Machine":
        return cls(worker.gpu_count, joins=worker.offer is not None)

    def can_take(self, job: FineTuningJob) -> bool:
        return self.gpus >= job.gpus_per_node and (self.joins or job.node_count == 1)

    def start_of(self, job: FineTuningJob) -> float:
        return self.free_after[job.gpus_per_node - 1]

    def spare_at(self, seconds: float, job: FineTuningJob) -> int:
        """Return how many GPUs beside those of the job are free in so many seconds."""
        return max(sum(free <= seconds for free in self.free_after) - job.gpus_per_node, 0)

    def take(self, gpus: int, seconds: float) -> None:
        gpus = min(gpus, self.gpus)
        self.free_after[:gpus] = [self.free_after[gpus - 1] + seconds] * gpus
        self.free_after.sort()


def machines_of(workers: Iterable[Worker], held: Iterable[tuple[str, FineTuningJob]], *, of: str) -> dict[str, Machine]:
    """Return the workers' machines by their ids, as the jobs that hold them leave them by the quantile `of`."""
    machines = {worker.pk: Machine.of(worker) for worker in workers}
    for worker_id, job in held:
        machines[worker_id].take(job.gpus_per_node, seconds_left(job, of))
    return machines


def held_on(workers: Sequence[Worker]) -> list[tuple[str, FineTuningJob]]:
    """Return each job that holds GPUs of the workers, with the worker's id; a group's job is on several."""
    live = [worker.pk for worker in workers]
    led = Run.objects.filter(worker__in=live, status__in=RUN_HOLDING_LEASE).select_related("job")
    joined = RunMember.objects.filter(worker__in=live, run__status__in=RUN_HOLDING_LEASE, left_at=None)
    held = [(str(run.worker_id), run.job) for run in led.only("worker", *(f"job__{name}" for name in _READ))]
    places = joined.select_related("run__job").only("worker", *(f"run__job__{name}" for name in _READ))
    return held + [(str(place.worker_id), place.run.job) for place in places]


def first_free(job: FineTuningJob, machines: Iterable[Machine]) -> list[Machine]:
    """Return the machines that the job can take first, the last one at the end; none if they are too few."""
    able = sorted((each for each in machines if each.can_take(job)), key=lambda each: each.start_of(job))
    return able[: job.node_count] if len(able) >= job.node_count else []


def seconds_left(job: FineTuningJob, of: str) -> float:
    """Return the seconds that a run of the job still needs, by the quantile `of` of its estimate."""
    estimate, done = job.estimate, job.step / job.total_steps if job.total_steps else 0.0
    training = estimate.get("train_seconds_p50") or 0.0
    beside = max((estimate.get("run_seconds_p50") or training) - training, 0.0)  # download, start-up, checkpoints
    return float((estimate.get(of) or training) * (1.0 - done) + (beside if not job.step else 0.0))
