"""The demo base model has never seen the benchmark it is scored on."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import lzma
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

DEMO = Path(__file__).parents[4] / "demo"
PRETRAINING = DEMO / "pretraining"
BENCHMARK = (DEMO / "banking77" / "train.csv", DEMO / "banking77" / "test.csv")


class Sourced(msgspec.Struct):
    """The one member of a record that the provenance describes."""

    source: str


@cache
def decontaminate() -> ModuleType:
    """Load the checker module, which lives outside any package."""
    spec = importlib.util.spec_from_file_location("demo_decontaminate", PRETRAINING / "decontaminate.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def checker() -> Any:
    """Return the checker of the whole benchmark."""
    return decontaminate().load_checker(*BENCHMARK)


@cache
def corpus() -> tuple[list[bytes], str]:
    """Return the lines of the committed corpus and the SHA-256 of its uncompressed bytes."""
    data = lzma.decompress((PRETRAINING / "corpus.jsonl.xz").read_bytes())
    return data.splitlines(), hashlib.sha256(data).hexdigest()


def passage(line: bytes) -> str:
    """Join all text of a record."""
    record = json.loads(line)
    if "text" in record:
        return str(record["text"])
    return " ".join(message["content"] for message in record["messages"])


@pytest.mark.slow
@pytest.mark.parametrize("step", [20, pytest.param(1, marks=pytest.mark.nightly)])
def test_corpus_shares_nothing_with_the_benchmark(step: int) -> None:
    """No passage holds a label, a 6-word sequence of a row, or a whole shorter row.

    The recorded hash pins the corpus, so every 20th passage is enough for a quick run.
    """
    reason_of = checker().reason
    passages = [passage(line) for line in corpus()[0][::step]]
    assert len(passages) > 50_000 / step
    found = [(reason, text) for text in passages if (reason := reason_of(text))]
    assert found == []


@pytest.mark.parametrize(
    "planted",
    [
        "The answer was card_arrival in the end.",
        "They asked about the Exchange Rate at the border.",
        "Is it a Visa or Mastercard?",
        "First words, then: how do I locate my card, and more words after it.",
        "We wrote: my card got lost. Then nothing.",
    ],
)
def test_checker_flags_planted_passages(planted: str) -> None:
    """Labels and rows are found inside longer passages."""
    assert checker().reason(planted)


def test_checker_finds_every_benchmark_row() -> None:
    """Every row and label of the benchmark is flagged, in any case."""
    module = decontaminate()
    rows = [row for path in BENCHMARK for row in module.read_rows(path)]
    assert len(rows) == 13_083
    assert all(checker().reason(f"before {text.upper()} after") for text, _ in rows)
    assert all(checker().reason(label) for label in {label for _, label in rows})


def test_checker_accepts_clean_text() -> None:
    """Ordinary text passes."""
    assert checker().reason("The harbour was quiet and the boats were asleep.") is None


def test_corpus_matches_its_provenance() -> None:
    """The recorded hash, counts and licences describe the committed corpus."""
    lines, digest = corpus()
    provenance = json.loads((PRETRAINING / "corpus.json").read_text())
    assert provenance["sha256"] == digest
    assert provenance["records"] == len(lines)
    assert {msgspec.json.decode(line, type=Sourced).source for line in lines} <= {
        source["name"] for source in provenance["sources"]
    }
    assert all(source["licence"] and source["version"] for source in provenance["sources"])


def test_model_was_trained_on_the_committed_corpus() -> None:
    """Tokenizer and weights were made from this corpus and nothing else."""
    _, digest = corpus()
    training = json.loads((DEMO / "base_model" / "training.json").read_text())
    assert training["corpus_sha256"] == digest
    assert training["tokenizer_corpus_sha256"] == digest
    tokenizer = (DEMO / "base_model" / "tokenizer.json").read_bytes()
    assert training["tokenizer_sha256"] == hashlib.sha256(tokenizer).hexdigest()
    assert digest in (DEMO / "base_model" / "README.md").read_text()


def test_vocabulary_holds_no_label() -> None:
    """No vocabulary entry is a whole label."""
    vocabulary = json.loads((DEMO / "base_model" / "tokenizer.json").read_text())["model"]["vocab"]
    labels = {label.lower() for path in BENCHMARK for _, label in decontaminate().read_rows(path)}
    assert not labels & {entry.lower().strip("\u0120_") for entry in vocabulary}
