"""How wrong the estimates are, against published measurements: `python -m tests.bench.estimate_error`.

Memory is compared for every single-GPU row whose batch, length, method and model shape are known. Time is compared by
carrying each published speed to each other job: within one source and GPU ("same stack"), and from the nearest row of
the other sources ("other stack"). Prints a table per source and, last, one JSON line.
"""

import math
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import mean, median, quantiles
from typing import Any

import msgspec

from apps.estimates import gpus, published
from apps.estimates.architectures import Architecture
from apps.estimates.memory import peak_memory
from apps.estimates.plans import Method, TrainingPlan
from apps.estimates.throughput import ProbeRow, Throughput, tokens_per_second

DATA = Path(__file__).resolve().parents[2] / "apps" / "catalog" / "data"
# What a source's figure counts, read from the rows' `unit_note`. Where it says nothing, reserved is assumed.
ALLOCATED_SOURCES = {"litgpt_confighub"}  # torch.cuda.max_memory_allocated, in 1e9 bytes
# Rows whose `seq_len` is a cap, the real lengths unknown: an over-estimate is expected and they are listed apart.
CAPPED_SOURCES = {"unsloth_notebooks", "peft_metamath", "ms_swift", "litgpt_confighub"}
Z90 = 1.2816  # 90th percentile of the standard normal distribution
FUSED_LOSS_SOURCES = {"unsloth_notebooks"}
# Full fine-tuning with weights and moments in bf16 alone ("bf16-true", "bfloat16" in the rows' precision).
PURE_BF16_SOURCES = {"litgpt_confighub", "peft_metamath", "ms_swift"}

SINGLE_GPU = " (1 GPU)"


class Errors(msgspec.Struct, frozen=True, kw_only=True):
    n: int
    mean_absolute_percent: float
    median_absolute_percent: float
    bias_percent: float
    within_10_percent: float
    log_spread: float


def main() -> None:
    rows, architectures = published.load_rows(DATA), published.load_architectures(DATA)
    memory = by_group(memory_ratios(rows, architectures))
    speeds = published.speeds(rows=rows, architectures=architectures)
    same, other = by_group(transfers(speeds, same_stack=True)), by_group(transfers(speeds, same_stack=False))
    tables = {"memory": memory, "time, same stack": same, "time, other stack": other}
    for title, table in tables.items():
        _write_table(title, table)
    line = {
        title: {group: msgspec.to_builtins(errors) for group, errors in table.items()}
        for title, table in tables.items()
    }
    sys.stdout.write(msgspec.json.encode(line).decode() + "\n")


def memory_ratios(
    rows: Iterable[Mapping[str, Any]], architectures: Mapping[str, Architecture]
) -> Iterable[tuple[str, float]]:
    """Predicted / measured peak of each comparable row, with its source (marked where its length is only a cap)."""
    for row in rows:
        plan = _plan_of_row(row, architectures)
        if plan is not None:
            measured = float(row["value"]) * (1e9 if row["source"] in ALLOCATED_SOURCES else gpus.GIB)
            group = f"{row['source']} {plan.method}" + (" (length is a cap)" if row["source"] in CAPPED_SOURCES else "")
            yield group, _predicted_bytes(row, architectures[row["model"]], plan) / measured


def transfers(speeds: Iterable[ProbeRow], *, same_stack: bool) -> Iterable[tuple[str, float]]:
    """Predicted / measured time of each published job, from the most similar published speed of its GPU type."""
    speeds = tuple(speeds)
    for asked in speeds:
        others = tuple(
            row for row in speeds if (_stack(row) == _stack(asked)) == same_stack and _job(row) != _job(asked)
        )
        speed = _carried_speed(asked, others)
        if speed is not None:
            gpu_count = SINGLE_GPU if asked.gpu_count == 1 else " (several GPUs)"
            yield f"{_stack(asked)}{gpu_count}", asked.tokens_per_second / speed.tokens_per_second


def _carried_speed(asked: ProbeRow, others: tuple[ProbeRow, ...]) -> Throughput | None:
    probe = published.nearest(
        published=others,
        gpu_key=asked.gpu_key,
        architecture=asked.architecture,
        method=asked.method,
        max_length=asked.sequence_length,
    )
    gpu = gpus.Gpu(key=asked.gpu_key, name=asked.gpu_key, memory_bytes=0)
    plan = TrainingPlan(
        method=asked.method,
        max_length=asked.sequence_length,
        micro_batch_size=max(1, asked.tokens_per_micro_step // asked.sequence_length),
        lora_rank=asked.lora_rank,
        target_modules=asked.target_modules,
        gradient_checkpointing=asked.gradient_checkpointing,
    )
    speed = tokens_per_second(architecture=asked.architecture, plan=plan, gpu=gpu, probe=probe)
    return speed if isinstance(speed, Throughput) else None


def _stack(row: ProbeRow) -> str:
    return row.conditions.split(":", 1)[0]


def _job(row: ProbeRow) -> tuple[object, ...]:
    return (_stack(row), row.architecture.n_layers, row.architecture.hidden_size, row.method, row.sequence_length)


def _plan_of_row(row: Mapping[str, Any], architectures: Mapping[str, Architecture]) -> TrainingPlan | None:
    is_known = row["seq_len"] and row["micro_batch"] and row["grad_ckpt"] is not None and row["model"] in architectures
    if row["metric"] != "peak_vram_gb" or row["gpu_count"] != 1 or row["method"] not in set(Method) or not is_known:
        return None
    if re.search(r"modules_to_save|embed_tokens", f"{row['targets']}"):
        return None  # trains embeddings too
    return TrainingPlan(
        method=row["method"],
        max_length=row["seq_len"],
        micro_batch_size=row["micro_batch"],
        lora_rank=row["rank"] or 16,
        target_modules=published.target_modules(row, architectures[row["model"]]),
        gradient_checkpointing=bool(row["grad_ckpt"]),
        optimizer="adamw_8bit" if "8bit" in (row["optimizer"] or "") else "adamw",
        loss="tiled" if row["source"] in FUSED_LOSS_SOURCES else "stock",
        master_weights=row["source"] not in PURE_BF16_SOURCES,
    )


def _predicted_bytes(row: Mapping[str, Any], architecture: Architecture, plan: TrainingPlan) -> int:
    """The part of the prediction that the source's counter sees: torch's counters leave the CUDA context out."""
    gpu = gpus.Gpu(key=row["gpu_key"], name=row["gpu"], memory_bytes=0)
    estimate = peak_memory(architecture=architecture, plan=plan, gpu=gpu)
    unseen = {"framework"} | ({"allocator"} if row["source"] in ALLOCATED_SOURCES else set())
    return sum(part.bytes for part in estimate.parts if part.key not in unseen)


def by_group(ratios: Iterable[tuple[str, float]]) -> dict[str, Errors]:
    groups: dict[str, list[float]] = defaultdict(list)
    for group, ratio in ratios:
        groups[group].append(ratio)
        groups["all"].append(ratio)
        if group.endswith(SINGLE_GPU):
            groups[f"all{SINGLE_GPU}"].append(ratio)
    return {group: _errors(values) for group, values in sorted(groups.items())}


def _errors(ratios: list[float]) -> Errors:
    off = [abs(ratio - 1) for ratio in ratios]
    return Errors(
        n=len(ratios),
        mean_absolute_percent=round(100 * mean(off), 1),
        median_absolute_percent=round(100 * median(off), 1),
        bias_percent=round(100 * (median(ratios) - 1), 1),
        within_10_percent=round(100 * mean(value <= 0.1 for value in off), 1),
        log_spread=round(_log_spread(ratios), 3),
    )


def _log_spread(ratios: list[float]) -> float:
    """The standard deviation of a log-normal whose p10-p90 interval around 1 covers as many of these ratios."""
    off = [abs(math.log(ratio)) for ratio in ratios]
    if len(off) < 2:
        return off[0] / Z90
    return quantiles(off, n=10, method="inclusive")[7] / Z90  # four fifths lie within p10 to p90


def _write_table(title: str, table: Mapping[str, Errors]) -> None:
    sys.stdout.write(f"\n{title}\n{'':44}    n   mean  median    bias  <=10%  spread\n")
    for group, e in table.items():
        figures = f"{e.mean_absolute_percent:6.1f} {e.median_absolute_percent:6.1f}% {e.bias_percent:+6.1f}%"
        sys.stdout.write(f"{group:44} {e.n:4} {figures} {e.within_10_percent:5.1f}% {e.log_spread:7.3f}\n")


if __name__ == "__main__":
    main()
