"""The list of rows that the estimates are scored on: `python -m tests.bench.estimates.scored_rows` writes it anew.

The rules are those of `apps.estimates.published.rows`. The list was committed before any constant was fitted, so that a
later change of the rules shows as a change of the list.
"""

from collections import defaultdict
from pathlib import Path

import msgspec

from apps.estimates.physics import gpus
from apps.estimates.published import sources
from apps.estimates.published.predictions import Prepared, prepare
from apps.estimates.published.rows import MEMORY, Job, read_row

DATA = Path(__file__).resolve().parents[3] / "apps" / "catalog" / "data"
LIST = Path(__file__).with_name("scored_rows.json")


def scored_rows() -> dict[str, dict[str, list[str]]]:
    """Ids by kind and source, and those left out by reason."""
    rows, architectures = sources.load_rows(DATA), sources.load_architectures(DATA)
    found: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        job = read_row(row, architectures)
        group = (f"scored {job.kind}", job.source) if isinstance(job, Job) else (f"excluded {job.kind}", job.reason)
        found[group[0]][group[1]].append(job.id)
    return {kind: dict(sorted(groups.items())) for kind, groups in sorted(found.items())}


def prepared_rows() -> list[Prepared]:
    """Every row of the committed list; of times, those whose GPU has a data sheet."""
    rows, architectures = sources.load_rows(DATA), sources.load_architectures(DATA)
    types = gpus.load(DATA / "gpus.json")
    jobs = [job for row in rows if isinstance(job := read_row(row, architectures), Job)]
    found = [prepare(job, types) for job in jobs]
    return [each for each in found if each.job.kind == MEMORY or each.gpu.reachable_flops]


if __name__ == "__main__":
    LIST.write_bytes(msgspec.json.format(msgspec.json.encode(scored_rows()), indent=1) + b"\n")
