"""Runs on an elastic pool of a real Slurm whose nodes die: `make bench-capacity`.

    python -m tests.bench.capacity [--runs 200 --waves 5 --nodes 8 --deaths 0.3 --idle 30 --seed 1]

First one job trains for real, from an empty pool: `seconds_zero_to_first_step` counts from the order to the first
reported step. Then the runs, of 1 to 4 nodes each, come in waves. Each wave begins with an empty pool and ends with
one. The worker API, Celery and its clock, PostgreSQL, Slurm and the workers are real; only their children train
without torch (child.py), so that hundreds of nodes fit on one host. Each node of Slurm that starts is killed with the
probability `deaths`, together with its daemon, at a random moment. It comes back some seconds later. Once, the
controller is killed too.

lost                    jobs that did not succeed
billed_twice            jobs that were billed for more than the time of their steps, so for a step twice
partial_groups_billed   attempts that were billed although not every machine of their group had begun
broken_rules            of the queue, leases, groups and books, which the simulation checks as well
seconds_idle_to_zero    from the last job's end to an empty queue of Slurm: the longest of the waves

The last line is one JSON object. The exit code is 1 if a job was lost, something was billed wrongly, or a rule broke.
"""

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.bench.capacity.child import STEP_SECONDS, STEPS
from tests.bench.capacity.stage import Stage, nodes_of_jobs, running_stage
from tests.services.slurm import INSTALL

_WAVE_SECONDS = 1_800.0
_LOOK_SECONDS = 0.5
_RULES_SECONDS = 5.0
_DIES_WITHIN = (2.0, 25.0)  # seconds after it enrolled
_BACK_WITHIN = (5.0, 15.0)
_PARTIAL = """
    SELECT count(*) FROM finetuning_run run JOIN finetuning_finetuningjob job ON job.id = run.job_id
    WHERE run.billed_gpu_ms > 0 AND job.node_count - 1 > (
        SELECT count(*) FROM finetuning_runmember member WHERE member.run_id = run.id AND member.started_at IS NOT NULL
    )
"""


@dataclass
class Deaths:
    """The deaths of nodes and of the controller, at random moments."""

    stage: Stage
    share: float
    chance: random.Random
    seen: set[str] = field(default_factory=set)
    killed: int = 0
    _due: dict[str, float] = field(default_factory=dict)  # by the number of a job of Slurm
    _back: dict[str, float] = field(default_factory=dict)  # by the name of a daemon

    def look(self) -> None:
        """Kill what is due, start again what was killed, and draw the fate of new nodes."""
        now, cluster = time.monotonic(), self.stage.cluster
        for name in [name for name, at in self._back.items() if at <= now]:
            del self._back[name]
            cluster.start(name)
        for external_id in [each for each, at in self._due.items() if at <= now]:
            del self._due[external_id]
            self._kill_node_of(external_id)
        for external_id in set(_running_nodes()) - self.seen:
            self.seen.add(external_id)
            if self.chance.random() < self.share:
                self._due[external_id] = now + self.chance.uniform(*_DIES_WITHIN)

    def kill_controller(self) -> None:
        self.stage.cluster.kill("controller")
        self._back["controller"] = time.monotonic() + self.chance.uniform(*_BACK_WITHIN)

    def _kill_node_of(self, external_id: str) -> None:
        if "controller" in self._back:  # it cannot be located: it dies later
            self._due[external_id] = self._back["controller"] + self.chance.uniform(*_DIES_WITHIN)
            return
        name = self.stage.cluster.ask("squeue", "--noheader", f"--job={external_id}", "--format=%N").decode().strip()
        if name and name not in self._back:  # else the node has ended
            self.stage.cluster.kill_node(name)
            self.killed += 1
            self._back[name] = time.monotonic() + self.chance.uniform(*_BACK_WITHIN)


class Rules:
    """The rules that were broken at any time."""

    def __init__(self) -> None:
        self.broken: set[str] = set()
        self._checked = 0.0

    def look(self) -> None:
        from tests.fuzz.simulation.invariants import broken_rules

        if time.monotonic() - self._checked < _RULES_SECONDS:
            return
        self._checked = time.monotonic()
        for rule in broken_rules():
            if rule not in self.broken:
                self.broken.add(rule)
                _say(f"broken: {rule}")


def _running_nodes() -> list[str]:
    """Return the numbers of the Slurm jobs whose worker has enrolled and not ended."""
    from apps.finetuning.lifecycle import NodeStatus
    from apps.finetuning.models import CapacityNode

    return list(CapacityNode.objects.filter(status=NodeStatus.RUNNING).values_list("external_id", flat=True))


def _wait(what: str, holds: Callable[[], bool], look: Callable[[], None], seconds: float = _WAVE_SECONDS) -> None:
    """Look around until it holds. Raises TimeoutError."""
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {seconds:.0f} s: {what}")
        look()
        time.sleep(_LOOK_SECONDS)


def _is_empty(stage: Stage) -> bool:
    from apps.finetuning.lifecycle import NODE_ENDED
    from apps.finetuning.models import CapacityNode

    has_rows = CapacityNode.objects.exclude(status__in=NODE_ENDED).exists()
    return not has_rows and not stage.cluster.ask("squeue", "--noheader")


def measure_real_start(stage: Stage, rules: Rules) -> float:
    """Return the seconds from an order at an empty pool to the first step of real training."""
    from apps.core.database.clock import db_now
    from apps.finetuning.lifecycle import JobStatus
    from apps.finetuning.models import FineTuningJob

    stage.real.touch()
    job = stage.order(nodes=1, number=0)

    def has_step() -> bool:
        return FineTuningJob.objects.filter(pk=job.pk, step__gt=0).exists()

    _wait("the first real step", has_step, rules.look, 300)
    seconds = (db_now() - job.created_at).total_seconds()
    _say(f"an empty pool took its first step after {seconds:.1f} s")
    _wait("the end of the real job", lambda: _open_jobs() == 0, rules.look, 600)
    job.refresh_from_db()
    if job.status != JobStatus.SUCCEEDED:
        raise AssertionError(f"the real job is {job.status}: {job.error_message}")
    stage.real.unlink()
    _wait("an empty pool", lambda: _is_empty(stage), rules.look, 300)
    return seconds


def _open_jobs() -> int:
    from apps.finetuning.lifecycle import JOB_ACTIVE
    from apps.finetuning.models import FineTuningJob

    return FineTuningJob.objects.filter(status__in=JOB_ACTIVE).count()


def run_wave(stage: Stage, deaths: Deaths, rules: Rules, nodes: list[int]) -> float:
    """Order a job for each number of nodes and wait for all; return the seconds from the last end to an empty pool."""
    from apps.core.database.clock import db_now
    from apps.finetuning.models import FineTuningJob

    for number, count in enumerate(nodes):
        stage.order(nodes=count, number=number)

    def look() -> None:
        deaths.look()
        rules.look()

    _wait("the end of a wave", lambda: _open_jobs() == 0, look)
    _wait("an empty pool", lambda: _is_empty(stage), look, 300)
    last = FineTuningJob.objects.order_by("-finished_at").values_list("finished_at", flat=True)[0]
    return (db_now() - last).total_seconds()


def figures(jobs: Any) -> dict[str, Any]:
    """Return what became of the jobs and what was billed."""
    from django.db import connection

    from apps.finetuning.lifecycle import JobStatus, RunStatus
    from apps.finetuning.models import Run

    lost, twice = [], []
    for job in jobs:
        attempts = list(job.runs.order_by("attempt"))
        owed_ms = STEPS * STEP_SECONDS * 1000 * job.gpu_count
        if job.status != JobStatus.SUCCEEDED:
            lost.append(job)
            _say(f"lost: {job.pk} {job.status} {job.error_message}")
        if sum(run.billed_gpu_ms for run in attempts) > owed_ms + job.gpu_count * len(attempts):  # rounded up
            twice.append(job)
            _say(f"billed twice: {job.pk}, {[run.billed_gpu_ms for run in attempts]} of {owed_ms:.0f} ms")
    with connection.cursor() as cursor:
        cursor.execute(_PARTIAL)
        partial = cursor.fetchone()[0]
    return {
        "runs": len(jobs),
        "lost": len(lost),
        "billed_twice": len(twice),
        "partial_groups_billed": partial,
        "attempts": Run.objects.filter(job__in=jobs).count(),
        "attempts_lost": Run.objects.filter(job__in=jobs, status=RunStatus.LOST).count(),
        "attempts_of_groups": Run.objects.filter(job__in=jobs, job__node_count__gt=1).count(),
    }


def _say(line: str) -> None:
    sys.stdout.write(f"{time.strftime('%T')} {line}\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--waves", type=int, default=5)
    parser.add_argument("--nodes", type=int, default=8, help="of the Slurm cluster")
    parser.add_argument("--deaths", type=float, default=0.3, help="share of started nodes that are killed")
    parser.add_argument("--idle", type=int, default=30, help="seconds after which an idle node ends, at least 30")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    if not shutil.which("slurmctld"):
        parser.error(f"Slurm is not installed: {INSTALL}")
    with tempfile.TemporaryDirectory(prefix="bench") as folder:
        home = Path(folder)
        home.chmod(0o755)  # PostgreSQL gives up root and must still reach its files
        with running_stage(home, nodes=given.nodes, idle_seconds=given.idle) as stage:
            from apps.finetuning.models import FineTuningJob

            began, rules = time.monotonic(), Rules()
            deaths = Deaths(stage, given.deaths, random.Random(given.seed))
            first_step = measure_real_start(stage, rules)
            real = list(FineTuningJob.objects.values_list("pk", flat=True))
            nodes, idle = nodes_of_jobs(given.runs), []
            for wave in range(given.waves):
                if wave == given.waves // 2:
                    deaths.kill_controller()
                idle.append(run_wave(stage, deaths, rules, nodes[wave :: given.waves]))
                _say(f"wave {wave + 1}: {len(deaths.seen)} nodes, {deaths.killed} killed; empty after {idle[-1]:.1f} s")
            found = figures(FineTuningJob.objects.exclude(pk__in=real).order_by("pk"))
            result = found | {
                "seconds_zero_to_first_step": round(first_step, 1),
                "seconds_idle_to_zero": round(max(idle), 1),
                "idle_seconds": given.idle,
                "broken_rules": len(rules.broken),
                "nodes_started": len(deaths.seen),
                "nodes_killed": deaths.killed,
                "slurm_nodes": given.nodes,
                "seconds": round(time.monotonic() - began),
            }
    sys.stdout.write(json.dumps(result) + "\n")
    return int(any(result[name] for name in ("lost", "billed_twice", "partial_groups_billed", "broken_rules")))


if __name__ == "__main__":
    sys.exit(main())
