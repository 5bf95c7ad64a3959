"""Run the tests: parts in parallel on all cores, the longest first; parts that need the whole machine run alone, last.

    python -m scripts.test                   every part, without the tests marked slow
    python -m scripts.test --all             every part, as CI runs them
    python -m scripts.test unit api          these parts, with their slow tests
    python -m scripts.test --quick           the tests of the current change, within a minute
    python -m scripts.test --record          as --all, and store each file's time in .ci/durations.json

The output of each part goes to .anneal/test-logs and is shown if the part fails. The last line is `N passed, N failed,
N skipped`; the exit code is 0 only if each part ran at least one test and none failed.
"""

import argparse
import json
import math
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

from gpu_workers.common.process_tree import die_with_parent
from gpu_workers.trainer.children.cpu_threads import count_cores
from scripts.touched import UNKNOWN_SECONDS, pick_tests

ROOT = Path(__file__).resolve().parents[1]
LOGS = ROOT / ".anneal" / "test-logs"
DURATIONS = ROOT / ".ci" / "durations.json"
PYTHONS = {"web": ROOT / ".venv/bin/python", "engines": ROOT / ".venv-engines/bin/python"}
# Each environment has its own pytest settings; paths are relative to the repository's root in both.
CONFIGURATIONS = {"web": "pyproject.toml", "engines": "tests/engines/pytest.ini"}
WITH_NIGHTLY = ("unit", "web", "api", "integration", "training", "serving", "e2e")
QUICK_SECONDS = 60
STOP_SECONDS = 60
SLOWEST = 10
LONGEST_TEMPORARY = 46  # bytes; the path of a test's socket may have 107
NO_TESTS_COLLECTED = 5  # pytest.ExitCode
_PERCENT = re.compile(rb"\[ *(\d+)%\]")


@dataclass(frozen=True)
class Part:
    """Some folders or files of tests that one process of pytest runs, one test after the other.

    It uses `places` of the number that `--at-once` allows, or the whole machine. A long part is split into `shares`, so
    that no core is idle while the last part runs.
    """

    name: str
    paths: tuple[str, ...]
    environment: str = "web"
    marks: str = "not chaos and not nightly"
    places: int = 1
    is_alone: bool = False
    shares: int = 1
    may_be_empty: bool = False
    is_slow: bool = False  # as if each of its tests were marked slow

    def seconds(self, durations: dict[str, float]) -> float:
        """Return the recorded time of its files; an unrecorded part may be the longest."""
        return sum(taken for file, taken in durations.items() if self.holds(file)) or math.inf

    def split(self, durations: dict[str, float]) -> list["Part"]:
        """Return its shares: parts of about equal recorded time, each with whole files."""
        if self.shares == 1:
            return [self]
        shares: list[list[str]] = [[] for _ in range(self.shares)]
        files = [str(file.relative_to(ROOT)) for path in self.paths for file in (ROOT / path).rglob("test_*.py")]
        taken = {file: durations.get(file, UNKNOWN_SECONDS) for file in files}
        for file in sorted(files, key=lambda file: (-taken[file], file)):
            min(shares, key=lambda share: sum(taken[each] for each in share)).append(file)
        return [
            replace(self, name=f"{self.name}-{number}", paths=tuple(sorted(share)), shares=1)
            for number, share in enumerate(shares, start=1)
        ]

    def holds(self, file: str) -> bool:
        """Return whether a test file belongs to this part."""
        return any(file == path or file.startswith(f"{path}/") for path in self.paths)


PARTS = (
    Part("unit", ("tests/unit",), shares=2),
    Part("integration", ("tests/integration",)),
    Part("api", ("tests/api",), shares=2),
    Part("guards", ("tests/guards",)),
    Part("web", ("tests/web",), shares=2),
    Part("browser", ("tests/browser",)),
    Part("training", ("tests/engines/training", "tests/engines/estimates"), "engines"),
    Part("serving", ("tests/engines/serving",), "engines"),
    # A platform of fifteen processes that trains and answers: it counts as two parts. A busy machine does
    # not reach the caps of its jobs, and none of its tests compares a time with a quote.
    Part("e2e", ("tests/e2e",), places=2, is_slow=True),
)


@dataclass(frozen=True)
class Case:
    """One test as pytest reported it: passed, failed or skipped; its time includes its fixtures."""

    file: str
    name: str
    seconds: float
    outcome: str


@dataclass
class Run:
    """A running or finished part."""

    part: Part
    process: subprocess.Popen[bytes]
    temporary: str
    started: float = field(default_factory=time.monotonic)
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    cases: list[Case] = field(default_factory=list)

    @property
    def log(self) -> Path:
        """Return the file of its output."""
        return LOGS / f"{self.part.name}.log"

    @property
    def failures(self) -> int:
        """Return the number of failed tests; a part that crashed or found no test counts as one.

        A part of `--quick` may be empty, because the files nearest to a change may have only nightly tests.
        """
        if self.part.may_be_empty and self.process.returncode == NO_TESTS_COLLECTED:
            return 0
        failed = sum(case.outcome == "failed" for case in self.cases)
        return failed or int(self.process.returncode != 0 or not self.cases)

    def progress(self) -> str:
        """Return its progress, from pytest's last output."""
        found = _PERCENT.findall(self.log.read_bytes())
        return f"{self.part.name} {int(found[-1]) if found else 0}%"

    def has_ended(self) -> bool:
        """Return whether its process has ended, and record the CPU time of it and its children if so."""
        before = _cpu_seconds_of_children()
        if self.process.poll() is None:
            return False
        self.cpu_seconds += _cpu_seconds_of_children() - before
        return True

    def finish(self) -> None:
        """Read the report of a finished process, and delete what its tests wrote."""
        shutil.rmtree(self.temporary, ignore_errors=True)
        self.seconds = time.monotonic() - self.started
        report = _report_of(self.part)
        self.cases = _read_cases(report) if report.exists() else []


def main(arguments: Sequence[str] | None = None, *, all_parts: Sequence[Part] = PARTS) -> int:
    """Run the parts that the command line names; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [part.name for part in all_parts]
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(names)}; all by default")
    # Two more than there are cores: each part is idle half of its time.
    parser.add_argument("--at-once", type=int, default=count_cores() + 2, help="parts side by side")
    parser.add_argument("--all", action="store_true", help="also the tests marked slow, as CI does")
    parser.add_argument("--quick", action="store_true", help="what the current change touches, within a minute")
    parser.add_argument("--record", action="store_true", help="keep what each file took in .ci/durations.json")
    parser.add_argument("--nightly", action="store_true", help="the tests marked nightly, in place of the others")
    given = parser.parse_args(arguments)
    if unknown := set(given.parts) - set(names):
        parser.error(f"no part is called {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    durations: dict[str, float] = json.loads(DURATIONS.read_text()) if DURATIONS.exists() else {}
    parts = [part for part in all_parts if not given.parts or part.name in given.parts]
    if not (given.parts or given.all or given.record or given.nightly):
        parts = [replace(part, marks=f"{part.marks} and not slow") for part in parts if not part.is_slow]
    if given.quick:
        parts = _quick_parts(durations)
    if given.nightly:
        parts = [replace(part, marks="nightly", is_alone=True, shares=1) for part in parts if part.name in WITH_NIGHTLY]
    if not parts:
        print("No test belongs to this change.\n0 passed, 0 failed, 0 skipped")
        return 0
    for number in (signal.SIGINT, signal.SIGTERM):  # SIGINT too: a shell makes its background jobs ignore it
        signal.signal(number, signal.default_int_handler)
    started = time.monotonic()
    try:
        runs = _run([share for part in parts for share in part.split(durations)], durations, given.at_once)
    except KeyboardInterrupt:
        print("\nStopped.")
        return 130
    if given.record:
        _record(runs, durations)
    return _conclude(runs, time.monotonic() - started)


def _quick_parts(durations: dict[str, float]) -> list[Part]:
    """Return the parts, limited to the test files nearest to the current change."""
    chosen = pick_tests(ROOT, durations, seconds=QUICK_SECONDS * 0.75)  # the rest is for starting
    parts = [part for part in PARTS if part.places == 1]
    cut = [(part, tuple(file for file in chosen if part.holds(file))) for part in parts]
    return [Part(part.name, files, part.environment, part.marks, may_be_empty=True) for part, files in cut if files]


def _run(parts: Iterable[Part], durations: dict[str, float], at_once: int) -> list[Run]:
    """Run the parts in parallel, then those that run alone. Stop all of them on a signal."""
    LOGS.mkdir(parents=True, exist_ok=True)
    # A part of several places starts first: later, a shorter part would take each place that becomes free.
    waiting = sorted(parts, key=lambda part: (part.is_alone, -part.places, -part.seconds(durations)))
    going: list[Run] = []
    done: list[Run] = []
    screen = _Screen()
    try:
        while waiting or going:
            while part := _next(waiting, [run.part for run in going], at_once):
                waiting.remove(part)
                going.append(_start(part))
            time.sleep(0.2)
            screen.show(going, waiting)
            for run in [run for run in going if run.has_ended()]:
                going.remove(run)
                run.finish()
                done.append(run)
                screen.end(run)
    finally:
        _stop(going)
    return done


def _next(waiting: Sequence[Part], going: Sequence[Part], at_once: int) -> Part | None:
    """Return the longest part that may start now."""
    return next((part for part in waiting if has_place(part, going, at_once)), None)


def has_place(part: Part, others: Sequence[Part], at_once: int) -> bool:
    """Return whether a part may start beside the running ones. If none runs, any may."""
    if any(each.is_alone for each in (part, *others)):
        return not others
    return not others or sum(each.places for each in (part, *others)) <= at_once


def _start(part: Part) -> Run:
    """Start pytest for one part in a separate process group, so that Ctrl-C reaches it only once, through us."""
    report = _report_of(part)
    report.unlink(missing_ok=True)
    # Each part has its own: pytest restricts the directory that it shares by default whenever it starts.
    folder = tempfile.gettempdir()
    folder = "/tmp" if len(folder) > LONGEST_TEMPORARY else folder  # noqa: S108  mkdtemp makes it private
    temporary = tempfile.mkdtemp(prefix="anneal-", dir=folder)
    command = [str(PYTHONS[part.environment]), "-m", "pytest", "-c", CONFIGURATIONS[part.environment], "--rootdir", "."]
    command += [
        "-m",
        part.marks,
        f"--basetemp={temporary}",
        f"--junitxml={report}",
        "-o",
        "junit_family=xunit1",
        *part.paths,
    ]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment["TMPDIR"] = folder
    with (LOGS / f"{part.name}.log").open("wb") as log:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            process_group=0,
            preexec_fn=partial(die_with_parent, signal.SIGINT),
        )
    return Run(part, process, temporary)


def _stop(runs: Sequence[Run]) -> None:
    """Let pytest tear its fixtures down, as on Ctrl-C. Kill the remaining processes after a minute."""
    for run in runs:
        run.process.send_signal(signal.SIGINT)
    deadline = time.monotonic() + STOP_SECONDS
    for run in runs:
        try:
            run.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(run.process.pid, signal.SIGKILL)
            run.process.wait()
        shutil.rmtree(run.temporary, ignore_errors=True)


def _report_of(part: Part) -> Path:
    return LOGS / f"{part.name}.xml"


def _read_cases(report: Path) -> list[Case]:
    """Return the tests of a JUnit report. A test that failed together with its teardown counts once."""
    found: dict[tuple[str, str], Case] = {}
    for node in ElementTree.parse(report).iter("testcase"):  # noqa: S314  pytest wrote it a moment ago
        outcomes = {child.tag for child in node}
        outcome = "failed" if outcomes & {"failure", "error"} else "skipped" if "skipped" in outcomes else "passed"
        file, name = node.get("file", node.get("classname", "")), f"{node.get('classname')}::{node.get('name')}"
        known = found.get((file, name))
        if known is None or known.outcome != "failed":
            found[file, name] = Case(file, str(node.get("name")), float(node.get("time", 0)), outcome)
    return list(found.values())


class _Screen:
    """One line that shows the parts' progress. Without a terminal, a line is printed every minute."""

    def __init__(self) -> None:
        self._is_watched = sys.stdout.isatty()
        self._started = self._shown = time.monotonic()

    def show(self, going: Sequence[Run], waiting: Sequence[Part]) -> None:
        """Show the running and the waiting parts."""
        if time.monotonic() - self._shown < (1 if self._is_watched else 60):
            return
        self._shown = time.monotonic()
        words = [_clock(self._shown - self._started), *(run.progress() for run in going)]
        words += [f"({', '.join(part.name for part in waiting)} to come)"] if waiting else []
        line = "  ".join(words)
        print(f"\r\033[K{line}" if self._is_watched else line, end="" if self._is_watched else "\n", flush=True)

    def end(self, run: Run) -> None:
        """Print the result of a part, with all of its output if it failed."""
        if self._is_watched:
            print("\r\033[K", end="")
        if run.failures:
            print(f"\n--- {run.part.name} failed: {run.log}\n{run.log.read_text(errors='replace')}")
        took = f"{_clock(run.seconds)} ({_clock(run.cpu_seconds)} of CPU)"
        print(f"{run.part.name:10} {took}  {_summary(run.cases, run.failures)}", flush=True)


def _summary(cases: Sequence[Case], failures: int) -> str:
    passed, skipped = (sum(case.outcome == outcome for case in cases) for outcome in ("passed", "skipped"))
    return f"{passed} passed, {failures} failed, {skipped} skipped"


def _cpu_seconds_of_children() -> float:
    """Return the CPU seconds of all ended child processes, their children included."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


def _conclude(runs: Sequence[Run], seconds: float) -> int:
    """Print the slowest tests, the time of each part and of all, and the total."""
    for run in runs:
        print(f"\n{run.part.name}: {_clock(run.seconds)}, slowest tests")
        for case in sorted(run.cases, key=lambda case: -case.seconds)[:SLOWEST]:
            print(f"{case.seconds:8.1f} s  {case.file}::{case.name}")
    failures = sum(run.failures for run in runs)
    print(f"\nall parts: {_clock(seconds)}")
    print(_summary([case for run in runs for case in run.cases], failures))
    return int(failures > 0)


def _record(runs: Sequence[Run], durations: dict[str, float]) -> None:
    """Write the time of each file of the parts that ran. Keep the times of the others and drop deleted files."""
    taken: dict[str, float] = defaultdict(float)
    for run in runs:
        for case in run.cases:
            taken[case.file] += case.seconds
    ran = [run.part for run in runs]
    kept = {
        file: seconds
        for file, seconds in durations.items()
        if not any(part.holds(file) for part in ran) and (ROOT / file).exists()
    }
    new = kept | {file: round(seconds, 1) for file, seconds in taken.items()}
    DURATIONS.write_text(json.dumps(new, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    sys.exit(main())
