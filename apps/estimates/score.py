"""Score the estimates on any file of measurement rows: `python -m apps.estimates.score FILE.jsonl`.

Prints what was left out and why, the error by source, method and GPU, and ends with one JSON object with the keys
`peak_memory` and `time`. `--rows FILE` also writes each row's prediction beside its measurement. `--rehearse` predicts
the memory of the rows that can be traced by their stack's code, and prints how many others keep the formula, and why.
"""

import argparse
import sys
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from apps.estimates.errors import EstimateError
from apps.estimates.intervals import MEMORY, TIME, UNSEEN_MEMORY, UNSEEN_TIME, PredictionInterval, is_measured
from apps.estimates.models.architectures import Architecture
from apps.estimates.models.names import Names
from apps.estimates.physics import gpus
from apps.estimates.physics.timing import CONSTANTS, Constants
from apps.estimates.published import sources
from apps.estimates.published.accuracy import Accuracy, Prediction, accuracy
from apps.estimates.published.fields import normalized
from apps.estimates.published.predictions import ALIASES, Prepared, known_bytes, predict, prepare
from apps.estimates.published.rehearsals import Rehearsed, rehearsed
from apps.estimates.published.rows import MEMORY as MEMORY_KIND
from apps.estimates.published.rows import TIME as TIME_KIND
from apps.estimates.published.rows import Excluded, Job, MeasurementRow, read_row

DATA = Path(__file__).resolve().parents[1] / "catalog" / "data"
_GROUPS = ("source", "method", "gpu")


class Scored(msgspec.Struct, frozen=True, kw_only=True):
    points: dict[str, tuple[Prediction, ...]]
    excluded: tuple[Excluded, ...]
    rehearsed: Rehearsed | None = None


def score(rows: Iterable[object], *, is_rehearsed: bool = False) -> Scored:
    """Predict every row whose configuration is complete, with `is_rehearsed` by its stack's code where that can run."""
    prepared, excluded = prepared_jobs(rows)
    points: dict[str, list[Prediction]] = {MEMORY_KIND: [], TIME_KIND: []}
    traced = rehearsed(prepared) if is_rehearsed else None
    for each in prepared:
        point = point_of(each, more_bytes=traced.more_bytes.get(each.job.id, 0.0) if traced else 0.0)
        if point is None:
            excluded.append(Excluded(each.job.id, each.job.kind, "the GPU's speed is not known"))
        else:
            points[each.job.kind].append(point)
    scored = {kind: tuple(found) for kind, found in points.items()}
    return Scored(points=scored, excluded=tuple(excluded), rehearsed=traced)


def prepared_jobs(rows: Iterable[object]) -> tuple[list[Prepared], list[Excluded]]:
    """Return the rows that can be predicted, and the others with the reason."""
    architectures = Names(sources.load_known_architectures(DATA))
    types = gpus.load(DATA / "gpus.json")
    known = frozenset((*types, *ALIASES))
    excluded: list[Excluded] = []
    read: list[MeasurementRow] = []
    for number, row in enumerate(rows, 1):
        found = _normalized(row, known, number)
        excluded.append(found) if isinstance(found, Excluded) else read.append(found)
    prepared = []
    for row in read:
        job = _read(row, architectures)
        excluded.append(job) if isinstance(job, Excluded) else prepared.append(prepare(job, types))
    return prepared, excluded


def read_rows(file: Path) -> list[object]:
    """Return the file's rows: one JSON value a line, or one list. A line that is no JSON counts as a row, left out.

    Raises ValueError if no line is JSON.
    """
    content = file.read_bytes().removeprefix(b"\xef\xbb\xbf").strip()
    if content.startswith(b"["):
        return msgspec.json.decode(content, type=list[object])
    rows: list[object] = []
    errors = []
    for line in filter(None, map(bytes.strip, content.splitlines())):
        try:
            rows.append(msgspec.json.decode(line))
        except ValueError as error:  # also of text that is not UTF-8
            rows.append(None)
            errors.append(str(error))
    if errors and len(errors) == len(rows):
        raise ValueError(errors[0])
    return rows


def point_of(
    prepared: Prepared,
    *,
    constants: Constants = CONSTANTS,
    more_bytes: float = 0.0,
) -> Prediction | None:
    """Return one row's prediction with its interval; None if the GPU's speed is unknown.

    `more_bytes` is what a trace found more than the formula.
    """
    job, value = prepared.job, predict(prepared, constants)
    if value is None:
        return None
    value += more_bytes
    known = known_bytes(prepared) if job.kind == MEMORY_KIND else 0.0
    spread = _interval(job)
    return Prediction(
        id=job.id,
        source=job.source,
        method=job.method,
        gpu=job.gpu_key or "unknown",
        predicted=value,
        measured=job.measured,
        p10=known + (value - known) * spread.p10,
        p90=known + (value - known) * spread.p90,
    )


def _interval(job: Job) -> PredictionInterval:
    if job.kind == MEMORY_KIND:
        return MEMORY if is_measured(job.stack, "memory") else UNSEEN_MEMORY
    return TIME if is_measured(job.stack, "time") else UNSEEN_TIME


def cards() -> list[int]:
    """Return the distinct usable memories of the known GPU types."""
    return sorted({gpu.memory_bytes for gpu in gpus.load(DATA / "gpus.json").values()})


def write_table(title: str, points: Sequence[Prediction], usable: Sequence[int]) -> None:
    """Write one line for each source, method and GPU."""
    write = sys.stdout.write
    write(f"\n{title}\n{'':34}    n  median    mean     P90   <=5%  <=10%  <=15%    bias  false  inside\n")
    for group in (*_GROUPS, None):
        groups: dict[str, list[Prediction]] = defaultdict(list)
        for point in points:
            groups[getattr(point, group) if group else "all rows"].append(point)
        for name, found in sorted(groups.items()):
            write(_line(name, accuracy(found, cards=usable)))


def _line(name: str, a: Accuracy) -> str:
    def percent(value: float | None, width: int) -> str:
        return f"{100 * value:{width}.1f}" if value is not None else " " * (width - 1) + "-"

    wide = (a.median_ape, a.mape, a.p90_ape)
    narrow = (a.share_5, a.share_10, a.share_15)
    last = percent(a.bias, 8) + percent(a.false_fits, 7) + percent(a.coverage_p10_p90, 8)
    columns = "".join(percent(v, 8) for v in wide) + "".join(percent(v, 7) for v in narrow) + last
    return f"{name[:34]:34}{a.n:5}{columns}\n"


def _write_rehearsed(found: Rehearsed) -> None:
    """Write how many rows of memory were traced, and why the others keep the formula."""
    write, traced, kept = sys.stdout.write, len(found.more_bytes), Counter(found.kept.values())
    write(f"\n{traced} of {traced + kept.total()} rows of {MEMORY_KIND} rehearsed; the others keep the formula:\n")
    for reason, count in sorted(kept.items(), key=lambda each: (-each[1], each[0])):
        write(f"{count:5}  {reason}\n")


def _normalized(row: object, known_gpus: Collection[str], number: int) -> MeasurementRow | Excluded:
    if not isinstance(row, Mapping):
        return Excluded(f"row {number}", "", "the row is not a JSON object")
    named = {"id": f"row {number}", **row}
    try:
        return normalized(named, known_gpus)
    except EstimateError as error:
        return Excluded(str(named["id"]), "", str(error))


def _read(row: MeasurementRow, architectures: Mapping[str, Architecture]) -> Job | Excluded:
    try:
        return read_row(row, architectures)
    except (EstimateError, KeyError, TypeError, ValueError) as error:
        return Excluded(str(row.get("id")), "", f"the row cannot be read: {error}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m apps.estimates.score", description=__doc__)
    parser.add_argument("file", type=Path, help="measurement rows, one JSON object a line")
    parser.add_argument("--rows", type=Path, help="write each row's prediction here, one JSON object a line")
    parser.add_argument(
        "--rehearse", action="store_true", help="trace rows of transformers' stacks with their code, where installed"
    )
    options = parser.parse_args(arguments)
    try:
        rows = read_rows(options.file)
    except (OSError, ValueError) as error:
        sys.stderr.write(f"{options.file}: {error}\n")
        return 2
    scored, usable = score(rows, is_rehearsed=options.rehearse), cards()
    if options.rows:
        options.rows.write_bytes(b"".join(msgspec.json.encode(p) + b"\n" for g in scored.points.values() for p in g))
    sys.stdout.write(f"{len(rows)} rows; left out:\n")
    for (kind, reason), count in sorted(Counter((e.kind, e.reason) for e in scored.excluded).items()):
        sys.stdout.write(f"{count:5}  {kind or 'unreadable'}: {reason}\n")
    left_out = Counter(each.kind for each in scored.excluded)
    found = {}
    for kind, points in scored.points.items():
        of_kind = usable if kind == MEMORY_KIND else ()
        write_table(kind, points, of_kind)
        found[kind] = msgspec.to_builtins(accuracy(points, cards=of_kind)) | {"left_out": left_out[kind]}
    if scored.rehearsed:
        found[MEMORY_KIND]["rehearsed"] = len(scored.rehearsed.more_bytes)
        _write_rehearsed(scored.rehearsed)
    sys.stdout.write(msgspec.json.encode(found).decode() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
