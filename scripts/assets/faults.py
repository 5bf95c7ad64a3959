"""Write docs/operations/faults.md: each fault that a test injects, what must hold, and what was measured.

    python -m scripts.assets.faults [REPORT.xml …]

Each report is one of pytest (`--junitxml`, with `-o junit_family=xunit1`). Its cases and the figures that tests record
with `record_property` replace the earlier ones of the same test in docs/operations/fault_figures.json. Only the tests
of faults.json count. Without a report, the page is written from the stored figures.
"""

import json
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from xml.etree import ElementTree

import msgspec
from msgspec import Struct

from scripts.processes import REPOSITORY

PAGE = REPOSITORY / "docs/operations/faults.md"
FIGURES = REPOSITORY / "docs/operations/fault_figures.json"
_GROUPS = Path(__file__).with_suffix(".json")
_OWN = ("cases", "measured")
_HEAD = """# Faults

Each row is a fault that tests really inject, with what must hold afterwards. `python -m scripts.assets.faults` writes
this page from the reports of these tests, whose files are below `tests/`. *Cases* counts the runs of a test with
different parameters. All of them passed on the day given. Figures are the largest of all cases, on two cores without a
GPU that also did other work. A row without a figure has tests that assert the outcome and measure nothing.

"""
_LANES = """`make test-all` runs most of these tests. Those of the whole platform take long, and `make chaos` and
`make nightly` run them. `make bench-capacity` kills the nodes of a real Slurm under 200 runs, and `make simulate`
injects many faults in virtual time ([faults in virtual time](../training.md#faults-in-virtual-time)). No test cuts the
power of a disk: PostgreSQL, Redis and the processes are killed, and the kernel keeps what they wrote.
"""


class Fault(Struct, frozen=True):
    """A row of the page. `tests` are nodes of pytest without their parameters."""

    injected: str
    outcome: str
    tests: tuple[str, ...]


class Group(Struct, frozen=True):
    title: str
    faults: tuple[Fault, ...]


Figures = dict[str, dict[str, float | str]]  # by test: "cases", "measured" (a day), and what it recorded


def read_groups() -> tuple[Group, ...]:
    return msgspec.json.decode(_GROUPS.read_bytes(), type=tuple[Group, ...])


def read_report(path: str, *, tests: Collection[str]) -> Figures:
    """Return the cases and figures of each of these tests in the report. Raises ValueError if one of them failed."""
    found: Figures = {}
    report = ElementTree.parse(path)  # noqa: S314 - our own report
    day = str(next(report.iter("testsuite")).get("timestamp"))[:10]
    for case in report.iter("testcase"):
        test = f"{case.get('file')}::{str(case.get('name')).partition('[')[0]}"
        if test not in tests or case.find("skipped") is not None:
            continue
        if case.find("failure") is not None or case.find("error") is not None:
            raise ValueError(f"{test} failed, see {path}")
        entry = found.setdefault(test, {"cases": 0, "measured": day})
        entry["cases"] = int(entry["cases"]) + 1
        for each in case.iter("property"):
            name, value = str(each.get("name")), float(str(each.get("value")))
            entry[name] = max(float(entry.get(name, value)), value)
    return found


def render(groups: Sequence[Group], figures: Figures) -> str:
    """Return the page."""
    parts = [_HEAD]
    for group in groups:
        parts.append(f"## {group.title}\n\n| fault | what holds | tests | measured |\n|---|---|---|---|\n")
        for fault in group.faults:
            files = dict.fromkeys(test.partition("::")[0].removeprefix("tests/") for test in fault.tests)
            cells = (
                fault.injected,
                fault.outcome,
                "<br>".join(f"`{file}`" for file in files),
                _measured(fault, figures),
            )
            parts.append(f"| {' | '.join(cells)} |\n")
        parts.append("\n")
    return "".join(parts) + _LANES


def _measured(fault: Fault, figures: Figures) -> str:
    found = [figures[test] for test in fault.tests if test in figures]
    if not found:
        return "not run yet"
    cases, day = sum(int(each["cases"]) for each in found), max(str(each["measured"]) for each in found)
    words = [_words(name, float(value)) for each in found for name, value in each.items() if name not in _OWN]
    return ", ".join([f"{cases} case{'s' if cases > 1 else ''}", *words, day])


def _words(name: str, value: float) -> str:
    if name.startswith("seconds_"):
        return f"{name.removeprefix('seconds_').replace('_', ' ')} {value:.3g} s"
    return f"{name.replace('_', ' ')} {value:g}"


def main() -> None:
    groups = read_groups()
    figures: Figures = json.loads(FIGURES.read_text()) if FIGURES.exists() else {}
    for path in sys.argv[1:]:
        figures |= read_report(path, tests={test for group in groups for fault in group.faults for test in fault.tests})
    FIGURES.write_text(json.dumps(dict(sorted(figures.items())), indent=1) + "\n")
    PAGE.write_text(render(groups, figures))


if __name__ == "__main__":
    main()
