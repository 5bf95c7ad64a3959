"""Fetch the pinned sources and write the decontaminated corpus: `corpus.jsonl.xz` and `corpus.json`."""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import lzma
import random
from collections import Counter
from pathlib import Path
from typing import Any

from decontaminate import Checker, load_checker
from extract import PARSERS, Record
from sources import SOURCES, Source, fetch, locate

HERE = Path(__file__).parent
BENCHMARK = HERE.parent / "banking77"
SEED = 20261121

log = logging.getLogger("build_corpus")


def record_text(record: Record) -> str:
    """Return all text of a record, one message per line."""
    if "text" in record:
        return str(record["text"])
    return "\n".join(message["content"] for message in record["messages"])


def collect(source: Source, folder: Path, checker: Checker, seen: set[str]) -> tuple[list[Record], dict[str, Any]]:
    """Extract, deduplicate, decontaminate and cap the records of one source."""
    records = list(PARSERS[source.parser](locate(source, folder)))
    random.Random(SEED).shuffle(records)
    kept: list[Record] = []
    counts: Counter[str] = Counter()
    for record in records:
        text = record_text(record)
        key = " ".join(text.lower().split())
        if key in seen:
            counts["duplicate"] += 1
        elif checker.reason(text.replace("\n", " ")):
            counts["benchmark overlap"] += 1
        elif counts["bytes"] + len(text) <= source.max_bytes:
            seen.add(key)
            counts["bytes"] += len(text)
            kept.append({"source": source.name, **record})
    summary = {"name": source.name, "version": source.version, "licence": source.licence, "registry": source.registry}
    summary |= {"records": len(kept), "bytes": counts["bytes"]}
    summary |= {"duplicates": counts["duplicate"], "dropped_for_overlap": counts["benchmark overlap"]}
    log.info("%s", summary)
    return kept, summary


def write(records: list[Record], summaries: list[dict[str, Any]]) -> None:
    """Write the compressed corpus and its provenance."""
    random.Random(SEED).shuffle(records)
    data = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode()
    path = HERE / "corpus.jsonl.xz"
    path.write_bytes(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME))
    provenance = {
        "sha256": hashlib.sha256(data).hexdigest(),
        "records": len(records),
        "bytes": sum(item["bytes"] for item in summaries),
        "seed": SEED,
        "sources": summaries,
    }
    (HERE / "corpus.json").write_text(json.dumps(provenance, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--downloads", type=Path, required=True)
    parser.add_argument("--fetch", action="store_true", help="download the sources first")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    checker = load_checker(BENCHMARK / "train.csv", BENCHMARK / "test.csv")
    seen: set[str] = set()
    records: list[Record] = []
    summaries: list[dict[str, Any]] = []
    for source in SOURCES:
        if options.fetch:
            fetch(source, options.downloads)
        kept, summary = collect(source, options.downloads, checker, seen)
        records += kept
        summaries.append(summary)
    write(records, summaries)


if __name__ == "__main__":
    main()
