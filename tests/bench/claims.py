"""How fast and how fair runs are claimed: `make bench-claims`.

    python -m tests.bench.claims [--rate N] [--seconds S] [--runs N --organizations N --claimers N --processes N]

10,000 runs of 500 organizations wait in one pool of 1,280 machines with 8 GPUs, and 64 claimers (processes with
threads) take them through `apps.finetuning.runs.claims.claim`, each for one machine after another. Twenty organizations
queued ten times as much as the others, and queued it first; every second organization has twice the weight. Each has
limits, and ended runs of this month to count. PostgreSQL is the embedded one, durable.

steady      the claimers begin a claim every 64 / rate seconds. A claim that begins late counts from when it was due.
saturated   every claimer claims again at once, until the queue is empty or the time is over
jain        Jain's index of claims divided by weight, over the first claims: then no queue is empty yet
cpu         milliseconds of processor that a claim takes in the claimers' processes and in their connections' servers.
            Unlike the rates they hardly depend on what else the machine does.

The last line is one JSON object, whose `claims_per_s` and `claim_p99_ms` are those of the steady part.
"""

import argparse
import datetime
import itertools
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

from scripts.embedded import ensure_running
from tests.services.environment import bench_environment

GPUS = 8  # of each machine
ENDED_RUNS = 10  # of each organization, this month
_START_SECONDS = 2.0
_TICKS = os.sysconf("SC_CLK_TCK")


class Size(NamedTuple):
    """What is measured. By default one organization in 25 is large and has seven times as many runs as the others."""

    runs: int = 10_000
    organizations: int = 500
    claimers: int = 64
    processes: int = 8

    @property
    def machines(self) -> int:
        return self.runs // GPUS + 30

    @property
    def large(self) -> int:
        return self.organizations // 25

    @property
    def large_runs(self) -> int:
        return self.runs * 7 // self.organizations

    @property
    def counted(self) -> int:
        """Return the claims that the index of fairness looks at: the small queues last for longer."""
        return self.runs * 2 // 5

    @property
    def threads(self) -> int:
        return self.claimers // self.processes


class Claim(NamedTuple):
    """`organization_id` is "" if there was nothing to claim. Times are of the monotonic clock."""

    organization_id: str
    due: float
    ended: float


class Claims(NamedTuple):
    """The claims of one process, and the seconds of processor that it used for them."""

    made: list[Claim]
    cpu: float


# --- The queue --------------------------------------------------------------------------------------------------------


def make_world(size: Size) -> dict[str, int]:
    """Migrate an empty database and fill it; return the organizations' weights."""
    from django.core.management import call_command
    from django.db import connection

    from apps.accounts.models import DEFAULT_NAME, Organization, Project, default_project_id
    from apps.finetuning.models import Quota, Worker
    from tests.factories.accounts import make_organization, make_user
    from tests.factories.finetuning import TrainingSetup

    call_command("migrate", verbosity=0)
    floor = TrainingSetup(make_organization("Bench", owner=make_user("bench")))
    template = floor.job()
    template.runs.update(created_at=template.created_at, status="cancelled", finished_at=template.created_at)
    organizations = Organization.objects.bulk_create(
        Organization(name=f"Tenant {number}", slug=f"tenant-{number}", has_own_share=True)
        for number in range(size.organizations)
    )
    Project.objects.bulk_create(
        Project(id=default_project_id(each), organization=each, name=DEFAULT_NAME, created_by="system")
        for each in organizations
    )
    Quota.objects.bulk_create(
        Quota(
            organization=organization, weight=1 + number % 2, concurrent_gpus=size.runs, gpu_seconds_per_month=10**12,
            queued_jobs=None, updated_by="system",
        )
        for number, organization in enumerate(organizations)
    )  # fmt: skip
    Worker.objects.bulk_create(
        Worker(
            pool=floor.pool, hostname=f"gpu-{number}", credential_sha256=f"{number:064}",
            gpus=floor.worker.gpus[:1] * GPUS,
        )
        for number in range(size.machines)
    )  # fmt: skip
    Worker.objects.filter(pk=floor.worker.pk).update(revoked_at=template.created_at)
    _fill_queue(template, organizations, size)
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE")
    return {organization.pk: 1 + number % 2 for number, organization in enumerate(organizations)}


def _fill_queue(template: Any, organizations: Sequence[Any], size: Size) -> None:
    """Queue the large organizations' runs first, then one of each other in turn, behind the runs that ended."""
    from apps.accounts.models import default_project_id
    from apps.core.ids import new_id
    from apps.finetuning.models import FineTuningJob, Run

    base = template.created_at - datetime.timedelta(minutes=5)
    large, small = organizations[: size.large], organizations[size.large :]
    turns = [organization for organization in large for _ in range(size.large_runs)]
    turns += itertools.islice(itertools.cycle(small), size.runs - len(turns))
    ended = [organization for organization in organizations for _ in range(ENDED_RUNS)]
    jobs, runs = [], []
    for number, organization in enumerate([*ended, *turns]):
        has_ended = number < len(ended)
        at = base + datetime.timedelta(milliseconds=number)
        job = FineTuningJob.objects.get(pk=template.pk) if not jobs else _copy(jobs[0])
        job.pk, job.organization_id, job.last_event_sequence = new_id("ftjob", "-"), organization.pk, 0
        job.project_id = default_project_id(organization)
        job.status, job.finished_at = ("succeeded", at) if has_ended else ("queued", None)
        spent = {"status": "succeeded", "leased_at": at - datetime.timedelta(hours=1), "finished_at": at}
        jobs.append(job)
        runs.append(
            Run(organization=organization, job=job, attempt=1, pool_id=job.pool_id, created_at=at,
                **(spent if has_ended else {}))
        )  # fmt: skip
    FineTuningJob.objects.bulk_create(jobs, batch_size=1000)
    Run.objects.bulk_create(runs, batch_size=1000)


def _copy(job: Any) -> Any:
    return type(job)(**{field.attname: getattr(job, field.attname) for field in job._meta.concrete_fields})


# --- The claimers -----------------------------------------------------------------------------------------------------

_barrier: Any = None


def _enter(barrier: Any) -> None:
    global _barrier
    _barrier = barrier
    import django

    django.setup()


def claim_for_machines(process: int, worker_ids: Sequence[str], size: Size, rate: float, seconds: float) -> Claims:
    """Claim with this process's threads, at `rate` in all processes, or as fast as possible if it is 0."""
    count = size.threads
    _barrier.wait()
    start = time.monotonic() + _START_SECONDS
    with ThreadPoolExecutor(count) as threads:
        first = process * count
        jobs = [
            threads.submit(_claim_in_thread, worker_ids[each::count], start, first + each, size, rate, seconds)
            for each in range(count)
        ]
        time.sleep(_START_SECONDS)
        used = time.process_time()
        made = [claim for job in jobs for claim in job.result()]
        return Claims(made, time.process_time() - used)


def _claim_in_thread(
    worker_ids: Sequence[str], start: float, number: int, size: Size, rate: float, seconds: float
) -> list[Claim]:
    from django.db import close_old_connections, connection

    from apps.finetuning.models import Worker
    from apps.finetuning.runs.claims import claim

    machines = list(Worker.objects.filter(pk__in=worker_ids).select_related("pool"))
    made: list[Claim] = []
    turns, free = itertools.count(), GPUS
    with connection.cursor() as cursor:
        cursor.execute("SELECT 1")
    close_old_connections()
    while machines:
        due = start + (next(turns) * size.claimers + number) / rate if rate else max(time.monotonic(), start)
        time.sleep(max(due - time.monotonic(), 0))
        if due > start + seconds:
            break
        answer = claim(worker=machines[-1], base_models=None)
        close_old_connections()  # as after each request
        made.append(Claim(answer.spec.organization_id if answer else "", due, time.monotonic()))
        free -= 1
        if answer is None or not free:
            machines.pop()
            free = GPUS
    return made


# --- The figures ------------------------------------------------------------------------------------------------------


def figures_of(claims: Sequence[Claim], cpu: float, database_cpu: float) -> dict[str, Any]:
    """Return the rate and the percentiles of one part; times in milliseconds. The two `cpu` are in seconds."""
    found = [claim for claim in claims if claim.organization_id]
    took = max(claim.ended for claim in claims) - min(claim.due for claim in claims)
    times = sorted((claim.ended - claim.due) * 1000 for claim in claims)
    return {
        "claims_per_s": round(len(found) / took, 1),
        "p50_ms": round(times[len(times) // 2], 1),
        "p99_ms": round(times[int(0.99 * (len(times) - 1))], 1),
        "claimer_cpu_ms": round(cpu * 1000 / len(claims), 2),
        "database_cpu_ms": round(database_cpu * 1000 / len(claims), 2),
        "claims": len(found),
        "empty_answers": len(claims) - len(found),
        "seconds": round(took, 1),
    }


def _database_cpu(home: Path) -> float:
    """Return the seconds of processor that the claimers' connections have used in the server under this directory."""
    ticks = 0
    for status in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it may have ended
            is_here = status.with_name("cwd").resolve().is_relative_to(home.resolve())
            if is_here and status.with_name("cmdline").read_bytes().startswith(b"postgres: anneal_internal "):
                ticks += sum(int(field) for field in status.read_text().rpartition(")")[2].split()[11:13])
    return ticks / _TICKS


def jain(claims: Sequence[Claim], weights: dict[str, int]) -> float:
    """Return Jain's index of the organizations' claims, each divided by its weight; 1 is perfectly fair."""
    counts = Counter(claim.organization_id for claim in claims)
    shares = [counts[id] / weight for id, weight in weights.items()]
    return sum(shares) ** 2 / (len(shares) * sum(share**2 for share in shares))


def measure(home: Path, size: Size, rate: float, seconds: float) -> dict[str, Any]:
    from django.db import connection

    from apps.finetuning.lifecycle import RunStatus
    from apps.finetuning.models import Run, Worker

    weights = make_world(size)
    workers = list(Worker.objects.filter(revoked_at=None).values_list("pk", flat=True))
    connection.close()
    halves = {"steady": (workers[::2], rate), "saturated": (workers[1::2], 0.0)}
    context = multiprocessing.get_context("spawn")
    found: list[Claim] = []
    figures: dict[str, dict[str, Any]] = {}
    with ProcessPoolExecutor(
        size.processes, context, initializer=_enter, initargs=(context.Barrier(size.processes),)
    ) as processes:
        for name, (machines, at) in halves.items():
            before = _database_cpu(home)
            jobs = [
                processes.submit(claim_for_machines, number, machines[number :: size.processes], size, at, seconds)
                for number in range(size.processes)
            ]
            results = [job.result() for job in jobs]
            made = sorted((claim for each in results for claim in each.made), key=lambda claim: claim.ended)
            figures[name] = figures_of(made, sum(each.cpu for each in results), _database_cpu(home) - before)
            found += [claim for claim in made if claim.organization_id]
    if Run.objects.filter(status=RunStatus.LEASED).count() != len(found):
        raise AssertionError("the claims that workers got are not the runs that are leased")
    counted = found[: size.counted]
    return {
        "claims_per_s": figures["steady"]["claims_per_s"],
        "claim_p99_ms": figures["steady"]["p99_ms"],
        "jain": round(jain(counted, weights), 4),
        "claims_counted_for_jain": len(counted),
        "rate": rate, **figures, **size._asdict(),
        "machines": size.machines, "cpus": len(os.sched_getaffinity(0)), "durable": True,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=320, help="claims a second of the steady part")
    parser.add_argument("--seconds", type=float, default=15, help="of each part at most")
    for name, default in Size()._asdict().items():
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    size = Size(*(getattr(given, name) for name in Size._fields))
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench")))
        home.chmod(0o755)  # PostgreSQL gives up root and must still reach its files
        services = stack.enter_context(ensure_running(home, durable=True))
        os.environ.update(bench_environment(home, services, "owner"))
        import django

        django.setup()
        os.environ["DATABASE_URL"] = services.database_url("internal")  # the claimers' role and settings
        os.environ["DJANGO_SETTINGS_MODULE"] = "apps.config.settings.internal"
        result = measure(home, size, given.rate, given.seconds)
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
