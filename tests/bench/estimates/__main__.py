"""Our estimates and others' on the same published rows: `make bench-estimates`.

Ours are scored leave-one-source-out: time with constants fitted without the row's source; memory has no fitted
constant, so that its figures are the same either way; the intervals of both are quantiles over the other sources.
Rivals run from their own packages on the rows within what they model, with ours on the very same rows beside them.
Prints a line for each source, method and GPU and, last, one JSON line.
"""

import math
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence

import msgspec

from apps.estimates.physics.timing import CONSTANTS
from apps.estimates.published.accuracy import Accuracy, Prediction, accuracy
from apps.estimates.published.predictions import Prepared, known_bytes
from apps.estimates.published.rows import MEMORY, TIME
from apps.estimates.score import cards, point_of, write_table
from tests.bench.estimates import rivals
from tests.bench.estimates.fit_timing import leave_one_out
from tests.bench.estimates.scored_rows import prepared_rows


def main() -> None:
    prepared, usable = prepared_rows(), cards()
    ours = held_out_points(prepared)
    unseen = {kind: unseen_coverage(ours[kind]) for kind in ours}
    others, notes = rivals.ask(prepared)
    write_table("peak memory, ours, leave-one-source-out", ours[MEMORY], usable)
    write_table("time, ours, leave-one-source-out", ours[TIME], ())
    result: dict[str, object] = {
        "unseen": unseen,
        "ours": {kind: accuracy(ours[kind], cards=_cards(kind, usable)) for kind in ours},
    }
    for name, predictions in sorted(others.items()):
        for kind in (MEMORY, TIME):
            theirs = [_rival_point(each, predictions) for each in prepared if each.job.kind == kind]
            points = [point for point in theirs if point is not None]
            if not points:
                continue
            same = {point.id for point in points}
            write_table(f"{kind}, {name}", points, _cards(kind, usable))
            beside = [point for point in ours[kind] if point.id in same]
            result[f"{name}, {kind}"] = accuracy(points, cards=_cards(kind, usable))
            result[f"ours on the rows of {name}, {kind}"] = accuracy(beside, cards=_cards(kind, usable))
    _write_comparison(result)
    for note in notes:
        sys.stdout.write(f"{note}\n")
    sys.stdout.write(msgspec.json.encode(result | {"notes": notes}).decode() + "\n")


def held_out_points(prepared: Sequence[Prepared]) -> dict[str, list[Prediction]]:
    """Each row predicted, and its interval found, without its source."""
    constants = leave_one_out([each for each in prepared if each.job.kind == TIME])
    bare: dict[str, list[tuple[Prepared, Prediction]]] = {MEMORY: [], TIME: []}
    for each in prepared:
        point = point_of(each, constants=constants.get(each.job.source, CONSTANTS))
        if point is not None:
            bare[each.job.kind].append((each, point))
    return {kind: _with_intervals(pairs, kind) for kind, pairs in bare.items()}


def residuals(pairs: Sequence[tuple[Prepared, Prediction]], kind: str) -> dict[str, list[float]]:
    """Measured / predicted by source; of memory, of what is not weights."""
    found: dict[str, list[float]] = defaultdict(list)
    for each, point in pairs:
        known = known_bytes(each) if kind == MEMORY else 0.0
        found[point.source].append((point.measured - known) / (point.predicted - known))
    return found


def _with_intervals(pairs: Sequence[tuple[Prepared, Prediction]], kind: str) -> list[Prediction]:
    by_source, points = residuals(pairs, kind), []
    for each, point in pairs:
        others = sorted(value for source, values in by_source.items() if source != point.source for value in values)
        low, high = decile_bounds(others)
        known = known_bytes(each) if kind == MEMORY else 0.0
        rest = point.predicted - known
        points.append(msgspec.structs.replace(point, p10=known + rest * low, p90=known + rest * high))
    return points


def decile_bounds(ordered: Sequence[float]) -> tuple[float, float]:
    """The order statistics that a further value lies below with chance 0.1 and 0.9, for any distribution.

    Of n values the k-th smallest is passed with chance k / (n + 1), not k / n (split conformal prediction: Vovk,
    Gammerman, Shafer, Algorithmic Learning in a Random World, 2005, chapter 4).
    """
    count = len(ordered)
    low, high = math.floor(0.1 * (count + 1)), math.ceil(0.9 * (count + 1))
    return ordered[max(low, 1) - 1], ordered[min(high, count) - 1]


def unseen_coverage(points: Sequence[Prediction]) -> dict[str, float]:
    """The share of rows inside the interval of a publisher of whom nothing is known: for each, and the mean of all.

    The interval is that of the other publishers, each with the same weight, and of half a publisher at either end.
    """
    by_source: dict[str, list[float]] = defaultdict(list)
    for point in points:
        by_source[point.source].append(point.measured / point.predicted)
    shares = {}
    for source, values in by_source.items():
        low, high = publisher_bounds({name: found for name, found in by_source.items() if name != source})
        shares[source] = round(sum(low <= value <= high for value in values) / len(values), 3)
    return shares | {"mean": round(sum(shares.values()) / len(shares), 3)}


def publisher_bounds(by_source: Mapping[str, Sequence[float]]) -> tuple[float, float]:
    """The deciles of a further publisher's values, from one value or more of each other publisher."""
    weighed = sorted((value, 1 / len(values)) for values in by_source.values() for value in values)
    count, passed = len(by_source), 0.0
    low = high = weighed[-1][0]
    is_low_found = False
    for value, weight in weighed:
        passed += weight
        if not is_low_found and passed >= 0.1 * (count + 0.5) - 0.25:
            low, is_low_found = value, True
        if passed >= 0.9 * (count + 0.5) - 0.25:
            return low, value
    return low, high


def _rival_point(each: Prepared, predictions: dict[str, float]) -> Prediction | None:
    value = predictions.get(each.job.id)
    if value is None:
        return None
    job = each.job
    return Prediction(
        id=job.id, source=job.source, method=job.method, gpu=job.gpu_key, predicted=value, measured=job.measured
    )


def _cards(kind: str, usable: Sequence[int]) -> Sequence[int]:
    return usable if kind == MEMORY else ()


def _write_comparison(result: dict[str, object]) -> None:
    sys.stdout.write(f"\n{'':52}    n  median    mean     P90    bias  false fits\n")
    for name, found in result.items():
        named = found.items() if isinstance(found, dict) else ((name, found),)
        for label, a in named:
            if isinstance(a, Accuracy) and a.n:
                sys.stdout.write(_comparison_line(f"ours, {label}" if name == "ours" else name, a))


def _comparison_line(label: str, a: Accuracy) -> str:
    figures = "".join(f"{100 * (value or 0.0):8.1f}" for value in (a.median_ape, a.mape, a.p90_ape, a.bias))
    false = f"{100 * a.false_fits:12.1f}" if a.false_fits is not None else f"{'-':>12}"
    return f"{label[:52]:52}{a.n:5}{figures}{false}\n"


if __name__ == "__main__":
    main()
