"""`make bench-training`: trained tokens per second against a plain TRL script, same model, rows, batch and steps.

Each variant trains in a process of its own, one after the other, in turns; the best turn of each counts, because
whatever else runs on a machine only slows. Short rows are banking77's questions; long ones join some of them. The last
line is one JSON object.

    --steps N     measured steps of a training (default 40; long rows have a quarter of the rows a step)
    --turns N     how often each variant is trained (default 2)
    --threads N   torch's threads (default 1)
    --python P    the engines' interpreter
"""

import argparse
import csv
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "demo"
SHORT, LONG = "short", "long"
AGAINST = ("trl", "trl-tuned", "trl-packed")
OVERHEADS = ("ours-qlora", "ours-dora")
_ROWS_A_STEP = {SHORT: 16, LONG: 4}
_MAX_LENGTH = {SHORT: 256, LONG: 512}
_QUESTIONS_A_LONG_ROW = 9
_HELD_OUT = 64
_NOISE = 0.05  # of the loss: order of rows and 16-bit rounding differ


def main(argv: Sequence[str] | None = None) -> int:
    """Print a table and the JSON line; returns 1 where a target is missed."""
    options = _options(argv)
    with tempfile.TemporaryDirectory() as folder:
        results = {kind: _measure(kind, Path(folder), options) for kind in (SHORT, LONG)}
    for kind, by_variant in results.items():
        _print_table(kind, by_variant)
    summary = _summary(results, options)
    sys.stdout.write(json.dumps(summary) + "\n")
    return 0 if summary["meets_targets"] else 1


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--python", type=Path, default=ROOT / ".venv-engines" / "bin" / "python")
    parser.add_argument("--model", type=Path, default=DEMO / "base_model")
    return parser.parse_args(argv)


def _measure(kind: str, folder: Path, options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    count = _ROWS_A_STEP[kind] * (options.steps + 3)  # the first three warm up
    rows, held_out = folder / f"{kind}.jsonl", folder / f"{kind}-held-out.jsonl"
    made = _rows(kind, count + _HELD_OUT)
    rows.write_text("\n".join(made[:count]))
    held_out.write_text("\n".join(made[count:]))
    variants = ("ours", *AGAINST, *(OVERHEADS if kind == SHORT else ()))
    best: dict[str, dict[str, Any]] = {}
    for _ in range(options.turns):
        for variant in variants:
            request = {
                "variant": variant,
                "model": str(options.model),
                "rows": str(rows),
                "held_out": str(held_out),
                "batch_size": _ROWS_A_STEP[kind],
                "epochs": 1,
                "max_length": _MAX_LENGTH[kind],
                "threads": options.threads,
            }
            found = _train(request, folder, options)
            if variant not in best or found["trained_tokens_per_second"] > best[variant]["trained_tokens_per_second"]:
                best[variant] = found
    return best


def _train(request: dict[str, Any], folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    path = folder / "request.json"
    path.write_text(json.dumps(request))
    command = [str(options.python), "-m", "tests.bench.training_child", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{request['variant']} failed:\n{done.stderr[-3000:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


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


def _summary(results: dict[str, dict[str, dict[str, Any]]], options: argparse.Namespace) -> dict[str, Any]:
    ratios = {kind: _ratio(found, "ours", "trl") for kind, found in results.items()}
    losses = {
        kind: abs(found["ours"]["held_out_loss"] / found["trl"]["held_out_loss"] - 1) for kind, found in results.items()
    }
    return {
        "bench": "training",
        "ratio_short_rows": round(ratios[SHORT], 3),
        "ratio_long_rows": round(ratios[LONG], 3),
        "ratio_short_rows_to_grouped_trl": round(_ratio(results[SHORT], "ours", "trl-tuned"), 3),
        "ratio_short_rows_to_packed_trl": round(_ratio(results[SHORT], "ours", "trl-packed"), 3),
        "ratio_long_rows_to_grouped_trl": round(_ratio(results[LONG], "ours", "trl-tuned"), 3),
        "ratio_long_rows_to_packed_trl": round(_ratio(results[LONG], "ours", "trl-packed"), 3),
        "loss_difference_short_rows": round(losses[SHORT], 4),
        "loss_difference_long_rows": round(losses[LONG], 4),
        "overhead_qlora": round(_ratio(results[SHORT], "ours", "ours-qlora") - 1, 3),
        "overhead_dora": round(_ratio(results[SHORT], "ours", "ours-dora") - 1, 3),
        "threads": options.threads,
        "meets_targets": ratios[SHORT] >= 1.5 and ratios[LONG] >= 1.0 and max(losses.values()) <= _NOISE,
    }


def _ratio(found: dict[str, dict[str, Any]], one: str, other: str) -> float:
    return float(found[one]["trained_tokens_per_second"] / found[other]["trained_tokens_per_second"])


def _print_table(kind: str, by_variant: dict[str, dict[str, Any]]) -> None:
    sys.stdout.write(f"\n{kind} rows         trained tok/s   processed tok/s   held-out loss\n")
    for variant, found in by_variant.items():
        sys.stdout.write(
            f"  {variant:14} {found['trained_tokens_per_second']:14.0f} "
            f"{found['processed_tokens_per_second']:16.0f} {found['held_out_loss']:15.4f}\n"
        )


if __name__ == "__main__":
    sys.exit(main())
