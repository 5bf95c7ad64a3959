"""`make bench-training`: trained tokens per second against a plain TRL script, same model, rows, batch and steps.

Every variant trains in a process of its own, one after the other. Short rows are banking77's questions; long ones join
some of them. Ours and plain TRL train several times, each time with the rows in another order. The best time counts,
because other processes can only slow a training down. So does the mean loss over rows that neither side trained on; the
spread of TRL's own losses is printed too. On a CUDA card Unsloth and Axolotl train too if they are installed; the
output names what is missing. The last line is one JSON object.

    --steps N        measured steps of a training (default 120)
    --orders N       how often ours and plain TRL are trained, each time in another order (default 3)
    --threads N      torch's threads (default 1)
    --tiny           few steps, one order: whether it works, not how fast
    --only A,B       these variants only
    --model FOLDER   another base model than the demo's, for a card that yawns at it
    --python P       the engines' interpreter
"""

import argparse
import csv
import json
import os
import random
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
DEMO = ROOT / "demo"
SHORT, LONG = "short", "long"
AGAINST = ("trl", "trl-tuned", "trl-packed")
OVERHEADS = ("ours-qlora", "ours-dora")
RIVALS = ("unsloth", "axolotl")
_ROWS_A_STEP = {SHORT: 16, LONG: 4}
_MAX_LENGTH = {SHORT: 256, LONG: 512}
_QUESTIONS_A_LONG_ROW = 9
_WARM_UP_STEPS = 3
_HELD_OUT = 64
_JUDGED = ("ours", "trl")
_TARGET = {SHORT: 1.5, LONG: 1.0}
Found = dict[str, dict[str, Any]]


def main(argv: Sequence[str] | None = None) -> int:
    """Print a table and the JSON line; returns 1 where a target is missed."""
    options = _options(argv)
    machine: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        results = {kind: _measure(kind, Path(folder), options, machine) for kind in (SHORT, LONG)}
    for kind, found in results.items():
        sys.stdout.write(f"\n{kind} rows: the best time and the mean loss of each\n")
        for each in found.values():
            sys.stdout.write(f"  {_line(each)}\n")
    for reason in machine["missing"]:
        sys.stdout.write(f"not measured: {reason}\n")
    summary = _summary(results, machine, options)
    sys.stdout.write(json.dumps(summary) + "\n")
    return 0 if summary["meets_targets"] in (True, None) else 1


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--orders", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--python", type=Path, default=ROOT / ".venv-engines" / "bin" / "python")
    parser.add_argument("--model", type=Path, default=DEMO / "base_model")
    options = parser.parse_args(argv)
    if options.tiny:
        options.steps, options.orders = 3, 1
    return options


def _measure(kind: str, folder: Path, options: argparse.Namespace, machine: dict[str, Any]) -> Found:
    """Return what each variant reached; `machine` is filled with what the engines' environment says of itself."""
    count = _ROWS_A_STEP[kind] * (options.steps + _WARM_UP_STEPS)
    rows, held_out = folder / f"{kind}.jsonl", folder / f"{kind}-held-out.jsonl"
    made = _rows(kind, count + _HELD_OUT)
    rows.write_text("\n".join(made[:count]))
    held_out.write_text("\n".join(made[count:]))
    variants = ("ours", *AGAINST, *(OVERHEADS if kind == SHORT else ()), *RIVALS)
    wanted = options.only.split(",") if options.only else variants
    request = {
        "model": str(options.model.resolve()),
        "rows": str(rows),
        "held_out": str(held_out),
        "batch_size": _ROWS_A_STEP[kind],
        "max_length": _MAX_LENGTH[kind],
        "threads": options.threads,
        "warm_up_steps": _WARM_UP_STEPS,
    }
    requests = [
        request | {"variant": name, "seed": seed}
        for seed in range(options.orders)
        for name in variants
        if name in wanted and (seed == 0 or name in _JUDGED)
    ]
    runs: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for found in _train(requests, folder, options):
        if "variant" not in found:
            machine.update(found)
            continue
        sys.stderr.write(f"{kind} rows, {_line(found)}\n")
        runs[found["variant"]].append(found)
    return {name: _best(each) for name, each in runs.items()}


def _best(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the fastest run, with the mean of all losses and how far apart they lie, as a share of it."""
    losses = [run["held_out_loss"] for run in runs]
    fastest = max(runs, key=lambda run: run["trained_tokens_per_second"])
    return fastest | {"held_out_loss": mean(losses), "loss_spread": (max(losses) - min(losses)) / mean(losses)}


def _train(requests: list[dict[str, Any]], folder: Path, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield what the children print, as it comes."""
    path = folder / "requests.json"
    path.write_text(json.dumps(requests))
    command = [str(options.python), "-m", "tests.bench.training.child", str(path)]
    environment = os.environ | {"OMP_NUM_THREADS": str(options.threads), "TOKENIZERS_PARALLELISM": "false"}
    with (folder / "errors.txt").open("w+") as errors:
        child = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True)
        assert child.stdout is not None
        for line in child.stdout:
            if line.startswith("{"):  # libraries print too
                yield json.loads(line)
        if child.wait():
            errors.seek(0)
            raise SystemExit(f"A training failed:\n{errors.read()[-4000:]}")


def _rows(kind: str, count: int) -> list[str]:
    with (DEMO / "banking77" / "train.csv").open(newline="") as file:
        pairs = [(row["text"], row["category"]) for row in csv.DictReader(file)]
    draw = random.Random(0)
    if kind == SHORT:
        return [_row(question, answer) for question, answer in draw.sample(pairs, count)]
    chosen = [draw.sample(pairs, _QUESTIONS_A_LONG_ROW) for _ in range(count)]
    return [_row("\n".join(q for q, _ in group), "\n".join(a for _, a in group)) for group in chosen]


def _row(question: str, answer: str) -> str:
    return json.dumps({"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]})


def _summary(results: dict[str, Found], machine: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    ratios = {f"ratio_{kind}_rows": _ratio(found, "ours", "trl") for kind, found in results.items()}
    losses = {
        f"loss_{kind}_rows": {name: round(each["held_out_loss"], 4) for name, each in found.items()}
        for kind, found in results.items()
    }
    differences = {
        f"loss_difference_{kind}_rows": _relative(found, "held_out_loss", "ours", "trl")
        for kind, found in results.items()
    }
    spreads = {
        f"loss_spread_trl_{kind}_rows": round(found["trl"]["loss_spread"], 4)
        for kind, found in results.items()
        if "trl" in found
    }
    others = {
        f"ratio_{kind}_rows_to_{name.replace('-', '_')}": _ratio(found, "ours", name)
        for kind, found in results.items()
        for name in ("trl-tuned", "trl-packed", *RIVALS)
        if name in found
    }
    overheads = {
        f"overhead_{name.removeprefix('ours-')}": _relative(
            results[SHORT], "trained_tokens_per_second", "ours", name, signed=True
        )
        for name in OVERHEADS
    }
    is_judged = options.orders > 1 and not (options.tiny or options.only)
    meets = _meets(ratios, results) if is_judged else None
    return (
        {"bench": "training"}
        | ratios
        | others
        | differences
        | spreads
        | losses
        | overheads
        | {"threads": options.threads, "steps": options.steps, "orders": options.orders}
        | machine
        | {"meets_targets": meets}
    )


def _meets(ratios: dict[str, float | None], results: dict[str, Found]) -> bool:
    """Tell whether ours is fast enough, and its mean loss no further from plain TRL's than TRL's orders lie apart."""
    is_fast = all((ratios[f"ratio_{kind}_rows"] or 0) >= target for kind, target in _TARGET.items())
    return is_fast and all(
        abs(found["ours"]["held_out_loss"] / found["trl"]["held_out_loss"] - 1) <= found["trl"]["loss_spread"]
        for found in results.values()
    )


def _ratio(found: Found, one: str, other: str) -> float | None:
    """Return how many trained tokens `one` gets through for each of `other`'s; None where one was not measured."""
    if one not in found or other not in found:
        return None
    name = "trained_tokens_per_second"
    return round(found[one][name] / found[other][name], 3)


def _relative(found: Found, name: str, one: str, other: str, *, signed: bool = False) -> float | None:
    if one not in found or other not in found:
        return None
    difference = found[one][name] / found[other][name] - 1
    return round(difference if signed else abs(difference), 4)


def _line(found: dict[str, Any]) -> str:
    return (
        f"{found['variant']:11} {found['trained_tokens_per_second']:9.0f} trained tok/s "
        f"{found['processed_tokens_per_second']:9.0f} processed tok/s  {found['steps']:3} steps in "
        f"{found['seconds']:6.1f} s ({found['cpu_seconds']:6.1f} s of CPU)  held-out loss {found['held_out_loss']:.4f}"
    )


if __name__ == "__main__":
    sys.exit(main())
