"""The range of a publisher of whom nothing is known: `python -m tests.bench.estimates.publishers [FILE ...]`.

Over all rows of the files (by default the committed ones): quantiles over publishers, each with the same weight, of
measured / predicted, of memory without the weights. Then the share of each publisher's rows inside the range that the
other publishers give.
"""

import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from apps.estimates.published.predictions import Prepared, known_bytes, predict
from apps.estimates.published.rows import MEMORY, TIME
from apps.estimates.score import DATA, prepared_jobs, read_rows
from tests.bench.estimates.__main__ import publisher_bounds

FILES = tuple(DATA / f"{name}measurements.jsonl" for name in ("", "unseen_", "third_"))
# Sources of a publisher that another source has rows of too.
PUBLISHERS = {
    "litgpt_tutorials": "litgpt_confighub",
    "ms_swift_examples": "ms_swift",
    "torchtune_prs": "torchtune_readme",
    "unsloth_context_hf": "unsloth_context",
}


def residuals(files: Iterable[Path]) -> dict[str, dict[str, list[float]]]:
    """Return the factors by kind and publisher."""
    found: dict[str, dict[str, list[float]]] = {MEMORY: defaultdict(list), TIME: defaultdict(list)}
    for file in files:
        for each in prepared_jobs(read_rows(file))[0]:
            value = residual_of(each)
            if value is not None:
                source = each.job.source
                found[each.job.kind][PUBLISHERS.get(source, source)].append(value)
    return found


def residual_of(prepared: Prepared) -> float | None:
    """Return measured / predicted, of memory without the weights; None if it cannot be predicted."""
    value = predict(prepared)
    known = known_bytes(prepared) if prepared.job.kind == MEMORY else 0.0
    return (prepared.job.measured - known) / (value - known) if value is not None and value > known else None


def coverage(by_source: Mapping[str, list[float]]) -> dict[str, float]:
    """Return the share of each publisher's rows inside the range of the others, and the mean of the shares."""
    shares = {}
    for source, values in by_source.items():
        low, high = publisher_bounds({name: found for name, found in by_source.items() if name != source})
        shares[source] = round(sum(low <= value <= high for value in values) / len(values), 3)
    return shares | {"mean": round(sum(shares.values()) / len(shares), 3)}


def main() -> None:
    found = residuals([Path(each) for each in sys.argv[1:]] or FILES)
    result = {
        kind: {"publishers": len(by), "bounds": publisher_bounds(by), "inside": coverage(by)}
        for kind, by in found.items()
    }
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(result), indent=1).decode() + "\n")


if __name__ == "__main__":
    main()
