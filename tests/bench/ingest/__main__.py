"""How fast training data is taken in: `make bench-ingest`, or `python -m tests.bench.ingest --megabytes 50`.

Writes a JSONL file of short rows like banking77's, a third of its bytes, and of longer conversations, and times, each
in a process of its own: validating it; validating and counting it as the product does; `encode_batch_fast` alone on the
same rendered texts; `datasets.load_dataset` with `map` in the engines' environment. The last line is one JSON object.
Wall-clock ratios compare sides that ran one after another: on a machine with other work look at the CPU seconds too.
"""

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from apps.contracts.chat import ChatRenderer, RowKind, parse_row_as, split_lines
from apps.contracts.templating.process import shared_process
from apps.datasets.problems import MAX_LINE_BYTES
from apps.datasets.stream import CHUNK_BYTES
from apps.datasets.token_counts import count_rows, measure_rows
from apps.datasets.validation.validator import validate_file

ROOT = Path(__file__).resolve().parents[3]
MODEL = ROOT / "demo/base_model"
BATCH_ROWS = 512
TARGETS = {"validate_mb_per_s_core": 25.0, "ratio_bare": 0.8, "ratio_datasets": 1.2, "rss_mib": 400.0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=1_000)
    parser.add_argument("--tokenise-megabytes", type=int, help="tokenise only so much of it, for a quick look")
    parser.add_argument("--rounds", type=int, default=1, help="take turns so often and keep each side's best")
    parser.add_argument("--engines", type=Path, default=ROOT / ".venv-engines/bin/python")
    parser.add_argument("--side", choices=SIDES)
    parser.add_argument("--file", type=Path)
    given = parser.parse_args()
    if given.side:
        sys.stdout.write(json.dumps(measure(SIDES[given.side], given.file)) + "\n")
        return
    with tempfile.TemporaryDirectory() as folder:
        tokenised = given.tokenise_megabytes or given.megabytes
        run(given.megabytes * 1_000_000, tokenised * 1_000_000, Path(folder), given.engines, given.rounds)


def run(size_bytes: int, tokenised_bytes: int, folder: Path, engines: Path, rounds: int) -> None:
    file, tokenised, texts = folder / "rows.jsonl", folder / "tokenised.jsonl", folder / "texts.jsonl"
    write_rows(file, size_bytes)
    write_rows(tokenised, tokenised_bytes)
    write_texts(tokenised, texts)
    makers: dict[str, Callable[[], dict[str, Any]]] = {
        "validate": lambda: side(sys.executable, "validate", file),
        "bare": lambda: side(sys.executable, "bare", texts),
        "ingest": lambda: side(sys.executable, "ingest", tokenised),
    }
    if engines.exists():
        makers["datasets"] = lambda: datasets_side(engines, tokenised, folder)
    turns = [{name: make() for name, make in makers.items()} for _ in range(rounds)]
    sides = {name: min((turn[name] for turn in turns), key=lambda seen: seen["seconds"]) for name in makers}
    for name, seen in sides.items():
        sys.stdout.write(f"{name:9} {seen}\n")
    sys.stdout.write(json.dumps(summary(sides, file.stat().st_size / 1e6, tokenised.stat().st_size / 1e6)) + "\n")


def summary(sides: dict[str, dict[str, Any]], validated: float, megabytes: float) -> dict[str, Any]:
    validate, bare, ingest = sides["validate"], sides["bare"], sides["ingest"]
    found: dict[str, Any] = {
        "megabytes": round(validated, 1),
        "rows": validate["rows"],
        "tokenised_megabytes": round(megabytes, 1),
        "validate_mb_per_s": round(validated / validate["seconds"], 1),
        "validate_mb_per_s_core": round(validated / validate["cpu_seconds"], 1),
        "ingest_mb_per_s": round(megabytes / ingest["seconds"], 2),
        "bare_mb_per_s": round(megabytes / bare["seconds"], 2),
        "ratio_bare": round(bare["seconds"] / ingest["seconds"], 2),
        "cpu_ratio_bare": round(bare["cpu_seconds"] / ingest["cpu_seconds"], 2),
        "tokens": ingest["tokens"],
        "tokens_agree": ingest["tokens"] == bare["tokens"],
        "rss_mib": round(max(validate["rss_mib"], ingest["rss_mib"])),
        "load_average": round(os.getloadavg()[0], 1),
    }
    if "datasets" in sides:
        slow = sides["datasets"]
        found["datasets_mb_per_s"] = round(megabytes / slow["seconds"], 2)
        found["ratio_datasets"] = round(slow["seconds"] / ingest["seconds"], 2)
        found["cpu_ratio_datasets"] = round(slow["cpu_seconds"] / ingest["cpu_seconds"], 2)
    found["targets"] = TARGETS
    found["missed"] = [
        name
        for name, target in TARGETS.items()
        if name in found and (found[name] > target if name == "rss_mib" else found[name] < target)
    ]
    return found


# --- data -------------------------------------------------------------------------------------------------------------


UNIQUE_BYTES = 20_000_000


def write_rows(file: Path, size_bytes: int) -> None:
    """Write rows until the file has about the size: new ones first, then those again, which costs no side less."""
    with file.open("wb") as out:
        block = b"".join(_unique_rows(min(size_bytes, UNIQUE_BYTES)))
        for _ in range(max(1, round(size_bytes / len(block)))):
            out.write(block)


def _unique_rows(size_bytes: int) -> Iterator[bytes]:
    chance = random.Random(77)
    words = _vocabulary()
    written = {False: 0, True: 0}
    while sum(written.values()) < size_bytes:
        is_long = written[True] <= 2 * written[False]
        line = msgspec.json.encode({"messages": _long(chance, words) if is_long else _short(chance, words)}) + b"\n"
        written[is_long] += len(line)
        yield line


def _vocabulary() -> list[str]:
    text = " ".join(path.read_text() for path in sorted((ROOT / "docs").rglob("*.md")))
    words = sorted({word for word in text.split() if word.isascii() and word.isprintable()})
    return [*words, "café", "naïve", "100 €", "東京", "🙂", 'a "quoted" word', "two\nlines"]


def _sentence(chance: random.Random, words: list[str], count: int) -> str:
    # Zipf-like: text repeats its common words, and tokenizers live on that.
    return " ".join(words[int(len(words) * chance.random() ** 3)] for _ in range(count))


def _short(chance: random.Random, words: list[str]) -> list[dict[str, str]]:
    label = f"label_{chance.randrange(77)}"
    system = "Classify the customer's question. Answer with the label alone."
    return [
        {"role": "system", "content": system},
        {"role": "user", "content": _sentence(chance, words, chance.randint(6, 20))},
        {"role": "assistant", "content": label},
    ]


def _long(chance: random.Random, words: list[str]) -> list[dict[str, str]]:
    turns = [{"role": "system", "content": _sentence(chance, words, 40)}]
    for _ in range(chance.randint(1, 4)):
        turns.append({"role": "user", "content": _sentence(chance, words, chance.randint(10, 150))})
        turns.append({"role": "assistant", "content": _sentence(chance, words, chance.randint(60, 400))})
    return turns


def write_texts(file: Path, texts: Path) -> None:
    """Write the rendered text of each row: what the bare side tokenises."""
    renderer = ChatRenderer.from_folder(MODEL)
    encode = msgspec.json.Encoder().encode
    with texts.open("wb") as out:
        for row in renderer.render_many(_rows(file)):
            out.write(encode(row.text) + b"\n")


def _chunks(file: Path) -> Iterator[bytes]:
    with file.open("rb") as stream:
        while chunk := stream.read(CHUNK_BYTES):
            yield chunk


def _rows(file: Path) -> Iterator[Any]:
    for line in split_lines(_chunks(file), max_line_bytes=MAX_LINE_BYTES):
        yield parse_row_as(line.data, RowKind.CHAT, line_number=line.number)


# --- sides ------------------------------------------------------------------------------------------------------------


def validate(file: Path) -> dict[str, Any]:
    report = validate_file(_chunks(file), filename=file.name)
    assert report.is_valid, report.errors[:1]
    return {"rows": report.rows}


def ingest(file: Path) -> dict[str, Any]:
    """Validate, then count tokens and trained tokens: what the product does with an upload."""
    validate(file)
    lengths = count_rows(measure_rows(ChatRenderer.from_folder(MODEL), _rows(file)))
    return {"tokens": lengths.tokens, "trained_tokens": lengths.trained_tokens}


def bare(texts: Path) -> dict[str, Any]:
    """Tokenise texts that are rendered already; reading them is not timed."""
    tokenizer = ChatRenderer.from_folder(MODEL).tokenizer
    decode = msgspec.json.Decoder(str).decode
    tokens, seconds, cpu = 0, 0.0, 0.0
    with texts.open("rb") as lines:
        while batch := [decode(line) for line in islice(lines, BATCH_ROWS)]:
            started, cpu_started = time.perf_counter(), time.process_time()
            encodings = tokenizer.encode_batch_fast(batch, add_special_tokens=False)
            seconds += time.perf_counter() - started
            cpu += time.process_time() - cpu_started
            tokens += sum(len(encoding.ids) for encoding in encodings)
    return {"tokens": tokens, "seconds": seconds, "cpu_seconds": cpu}


SIDES: dict[str, Callable[[Path], dict[str, Any]]] = {"validate": validate, "ingest": ingest, "bare": bare}


def measure(run: Callable[[Path], dict[str, Any]], file: Path) -> dict[str, Any]:
    started, cpu_started = time.perf_counter(), _cpu_seconds()
    found = run(file)
    seconds = time.perf_counter() - started
    shared_process.stop()  # what templates took counts too, and is only known of a child that has ended
    timed = {"seconds": seconds, "cpu_seconds": _cpu_seconds() - cpu_started}
    both = [resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return timed | found | {"rss_mib": sum(both) / 1024}


def _cpu_seconds() -> float:
    both = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in both)


def side(python: str, name: str, file: Path) -> dict[str, Any]:
    command = [python, "-m", "tests.bench.ingest", "--side", name, "--file", str(file)]
    return _last_json(command, {**os.environ})


def datasets_side(python: Path, file: Path, folder: Path) -> dict[str, Any]:
    """Run load_dataset and map where `datasets` is installed, with an empty cache."""
    home = tempfile.mkdtemp(dir=folder)
    environment = {**os.environ, "HF_HOME": home, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "true"}
    script = Path(__file__).with_name("rival.py")
    return _last_json([str(python), str(script), str(file), str(MODEL)], environment)


def _last_json(command: list[str], environment: dict[str, str]) -> dict[str, Any]:
    done = subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.strip().splitlines()[-1])


if __name__ == "__main__":
    main()
