"""The findings of the checks as one report: the problems, and the next steps."""

import enum
from collections.abc import Sequence

import msgspec

from apps.contracts.struct import Struct


class Verdict(enum.StrEnum):
    PASSED = "passed"
    WARNING = "warning"  # jobs run, but slower or with less than the machine could do
    FAILED = "failed"
    SKIPPED = "skipped"  # not possible on this machine


class Finding(Struct, frozen=True, kw_only=True):
    """The result of one check: `said` is a sentence, `advice` the next step, if one is needed."""

    verdict: Verdict
    said: str
    advice: str = ""
    figures: dict[str, float] = {}


class Checked(Struct, frozen=True, kw_only=True):
    """A finding with the check that made it and the seconds it took."""

    name: str
    title: str
    seconds: float
    finding: Finding


def is_failed(checked: Sequence[Checked]) -> bool:
    return any(each.finding.verdict is Verdict.FAILED for each in checked)


def render_line(checked: Checked) -> str:
    """Return one check as a line for the terminal."""
    return f"{checked.finding.verdict:<8} {checked.title} ({checked.seconds:.0f} s): {checked.finding.said}"


def render_report(checked: Sequence[Checked]) -> str:
    """Return the end of the report: how many checks passed, and what to do about the others, failures first."""
    counts = {verdict: sum(each.finding.verdict is verdict for each in checked) for verdict in Verdict}
    lines = ["", ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count) + "."]
    for verdict in (Verdict.FAILED, Verdict.WARNING):
        lines += [
            f"- {each.title}: {each.finding.said}" + (f" {each.finding.advice}" if each.finding.advice else "")
            for each in checked
            if each.finding.verdict is verdict
        ]
    if not counts[Verdict.FAILED]:
        lines.append("This machine can train and serve.")
    return "\n".join(lines)


def to_json(checked: Sequence[Checked]) -> bytes:
    return msgspec.json.format(msgspec.json.encode(list(checked)), indent=2) + b"\n"
