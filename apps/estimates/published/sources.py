"""Published measurements as speed sources, for GPU types that none of our workers has probed yet."""

import math
import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from apps.estimates.models.architectures import (
    Architecture,
    active_linear_parameter_count,
    from_catalog_row,
    from_config,
    linear_layers,
)
from apps.estimates.physics.plans import DEFAULT_TARGET_MODULES
from apps.estimates.physics.throughput import ProbeRow, SpeedSource
from apps.estimates.published.rows import MeasurementRow

_METHODS = {"lora": "lora", "qlora": "qlora", "full": "full"}
# The trainer computes in bf16: speeds measured in 8 or 4 bits, or with weights offloaded to the CPU, do not apply.
_OTHER_PRECISION = re.compile(r"fp8|float8|nvfp4", re.IGNORECASE)
_ANSWERAI_SAMPLES = 1024  # "dummy data, 1024 samples" (notes of every answerai_fsdp_qlora row)


def load_architectures(folder: Path) -> dict[str, Architecture]:
    """Return shapes by every name that measurement rows use, from `models.json` and `measured_models.json`."""
    models = msgspec.json.decode((folder / "models.json").read_bytes())["models"]
    measured = msgspec.json.decode((folder / "measured_models.json").read_bytes())
    shapes = {row["name"]: from_catalog_row(row) for row in models}
    shapes |= {alias: shapes[name] for alias, name in measured["aliases"].items()}
    for row in measured["models"]:
        shapes |= dict.fromkeys(row["names"], from_catalog_row(row))
    return shapes


def load_known_architectures(folder: Path) -> dict[str, Architecture]:
    """Return the same shapes, and those of other common public models, which rows of further publishers may name."""
    known = msgspec.json.decode((folder / "known_models.json").read_bytes())["models"]
    shapes: dict[str, Architecture] = {}
    for row in known:
        shape = from_config(row["config"]) if "config" in row else msgspec.convert(row["architecture"], Architecture)
        shapes |= dict.fromkeys(row["names"], shape)
    return shapes | load_architectures(folder)


def load_rows(folder: Path) -> list[MeasurementRow]:
    """Return the lines of `measurements.jsonl`."""
    lines = (folder / "measurements.jsonl").read_bytes().splitlines()
    return [msgspec.json.decode(line) for line in lines if line]


def load(folder: Path) -> tuple[ProbeRow, ...]:
    """Return every published speed in the folder that is comparable with a bf16 trainer."""
    architectures = load_architectures(folder)
    found = (speed(row=row, architecture=architectures.get(row["model"])) for row in load_rows(folder))
    return tuple(probe for probe in found if probe is not None)


def speed(*, row: MeasurementRow, architecture: Architecture | None) -> ProbeRow | None:
    """Return one row as a speed source.

    Return None if its model, method, precision or tokens per second are unknown or unusable.
    """
    rate = _tokens_per_second(row)
    if architecture is None or rate is None or not _is_comparable(row):
        return None
    length = int(row["seq_len"])
    gpus = f"{row['gpu_count']} x {row['gpu']}" if row["gpu_count"] > 1 else row["gpu"]
    batch = f"{row['micro_batch']} x {row['seq_len']} tokens"
    return ProbeRow(
        gpu_key=row["gpu_key"] or "",
        architecture=architecture,
        method=_METHODS[row["method"]],
        tokens_per_second=rate,
        tokens_per_micro_step=length * int(row["micro_batch"]),
        sequence_length=length,
        source=SpeedSource(
            kind="published",
            text=f"Published measurement: {row['model']}, {row['method']}, {batch}, {gpus} ({row['source']})",
            url=row["source_url"],
        ),
        lora_rank=int(row["rank"] or 16),
        target_modules=target_modules(row, architecture),
        gradient_checkpointing=bool(row["grad_ckpt"]),
        gpu_count=int(row["gpu_count"]),
        conditions=f"{row['source']}: {row['notes'] or row['unit_note'] or ''}",
    )


def nearest(
    *, published: Sequence[ProbeRow], gpu_key: str, architecture: Architecture, method: str, max_length: int
) -> ProbeRow | None:
    """Return the published speed of this GPU type whose job is most like the requested one; None if there is none."""
    candidates = [probe for probe in published if probe.gpu_key == gpu_key]
    size = active_linear_parameter_count(architecture)

    def distance(probe: ProbeRow) -> float:
        off_size = abs(math.log2(size / probe.active_parameter_count))
        off_length = abs(math.log2(max_length / probe.sequence_length)) / 4
        return off_size + off_length + (probe.method != method) + (probe.gpu_count > 1)

    return min(candidates, key=distance, default=None)


def target_modules(row: MeasurementRow, architecture: Architecture) -> tuple[str, ...]:
    """Return the row's adapted modules in this family's own names; all linear layers if it does not state them."""
    stated = tuple(name.strip() for name in str(row["targets"] or "").split(","))
    stated = tuple({"query": "q_proj", "value": "v_proj", "key": "k_proj"}.get(name, name) for name in stated)
    names = {layer.name.rsplit(".", 1)[-1] for layer in linear_layers(architecture)}
    known = tuple(name for name in stated if name in names)
    return known if known and "all linear" not in str(row["targets"]).lower() else DEFAULT_TARGET_MODULES


def _is_comparable(row: MeasurementRow) -> bool:
    if row["method"] not in _METHODS or not row["gpu_key"]:
        return False
    if not row["seq_len"] or not row["micro_batch"] or not row["gpu_count"]:
        return False
    settings = f"{row['precision']} {row['parallelism']} {row['notes']}"
    return not _OTHER_PRECISION.search(settings) and "offload" not in settings.lower()


def _tokens_per_second(row: MeasurementRow) -> float | None:
    """Return tokens per second and GPU; None unless the row fixes the number of tokens.

    The tokens are padded to a known length, or counted.
    """
    length, value = row["seq_len"], float(row["value"])
    match row["metric"], row["source"]:
        case "tokens_per_s_per_gpu", _:
            return value
        case "seconds_per_iter", "qwen_readme" if length:
            return float(length * row["micro_batch"] * row["grad_accum"] / value)
        case "minutes_total", "answerai_fsdp_qlora" if length:
            return float(_ANSWERAI_SAMPLES * length / (value * 60) / row["gpu_count"])
        case _:
            return None
