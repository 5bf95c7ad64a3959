"""A measurement row in the spelling of `rows.MeasurementRow`, from the spellings that publishers use.

Only a file to score is read so. What a row does not state stays unstated; what it states in two ways is refused.
"""

import math
import re
from collections.abc import Collection, Mapping
from typing import cast

from apps.contracts.hyperparameters import Method
from apps.estimates.errors import EstimateError
from apps.estimates.models.names import gpu_key
from apps.estimates.published.rows import MeasurementRow

# Another name of a field -> the field.
_FIELDS = {
    "model": ("base_model", "model_name", "model_id", "model_name_or_path", "hub_id"),
    "seq_len": ("sequence_length", "seq_length", "max_seq_length", "max_seq_len", "max_length", "context_length"),
    "micro_batch": ("micro_batch_size", "batch_size", "per_device_batch_size", "per_device_train_batch_size"),
    "grad_accum": ("gradient_accumulation_steps", "gradient_accumulation", "grad_accum_steps"),
    "grad_ckpt": ("gradient_checkpointing", "activation_checkpointing"),
    "rank": ("lora_rank", "lora_r", "r"),
    "targets": ("target_modules", "lora_target_modules"),
    "gpu": ("gpu_name", "gpu_type", "device", "hardware"),
    "gpu_count": ("num_gpus", "gpus", "n_gpus"),
    "precision": ("dtype", "compute_dtype"),
    "unit_note": ("unit", "units"),
}
# The unit of a value or of a measurement's name -> the unit to note, and the factor.
_MEMORY_UNITS = {"": ("GB", 1.0), "gb": ("GB", 1.0), "gib": ("GiB", 1.0), "mb": ("GB", 1e-3), "mib": ("GiB", 1 / 1024)}
_MEMORY = re.compile(
    r"(?=.*(?:mem|vram))(?:(?:gpu|cuda|peak|max|memory|mem|vram|usage|used|reserved|allocated|per|device)_?)+(gi?b|mi?b)?"
)
_GPU_RATES = re.compile(r"(?:tokens|toks?)_(?:per_)?s(?:ec|econd)?_(?:per_)?gpu")
_STEP_TIMES = re.compile(r"(?:s|secs?|seconds)_(?:per_)?(?:it|iter|iteration|step)|step_time_s")
_TOKEN_RATES = re.compile(r"(tokens|toks?|samples|rows)_per_s(?:ec|econd)?|(tokens)_s|train_(samples)_per_second")
_STEP_RATES = re.compile(r"(?:it|iter|iters|iterations|steps?)_(?:per_)?s(?:ec|econd)?|train_steps_per_second")
_TOTALS = {
    "hours_total": 60.0, "total_hours": 60.0, "seconds_total": 1 / 60, "train_runtime": 1 / 60, "total_minutes": 1.0,
}  # fmt: skip
_NUMBER = re.compile(r"(?:r\s*=\s*|~|x)?\s*(-?\d+(?:,\d{3})+(?:\.\d+)?|-?\d+(?:\.\d+)?)\s*(.*)", re.DOTALL)
_MOST = 1e9  # of any count
_COUNTS = ("seq_len", "micro_batch", "gpu_count", "rank", "grad_accum")
_TEXTS = ("id", "source", "source_url", "framework", "model", "method", "targets", "precision", "optimizer",
          "attention", "parallelism", "notes", "unit_note", "gpu", "gpu_key")  # fmt: skip
_OF_GPUS = re.compile(r"(\d+)\s*(?:x|×)\s*(?=[a-z])", re.IGNORECASE)
_SWITCHES = {
    True: ("true", "yes", "on", "enabled", "1"),
    False: ("false", "no", "off", "disabled", "0"),
}
_FULL = re.compile(r"full|fft|all.?parameters|full.?parameter")
_LIKE_LORA = re.compile(r"lora\+|loraplus|pissa|rs-?lora|lora")
_NOT_LORA = re.compile(r"other-peft|adalora|galore|lora-?fa|vera|loha|lokr|q?loftq|relora|longlora|moe-?lora")
_FOUR_BITS = re.compile(r"4.?bits?\b|\bnf4|int4|bnb.?4")
_EIGHT_BITS = re.compile(r"8.?bits?\b|int8|bnb.?8")
_REWARDED = re.compile(r"\b(kto|ppo|grpo|rloo|simpo|cpo|rlhf|reward|distill\w*|pre-?train\w*|cpt)\b")
_SIZES = re.compile(r"\b(12|16|20|24|32|40|48|64|80|94|96|141|144|180|192|256|270|288)(?:gi?b?)?\b", re.IGNORECASE)
_UNCLEAR = "full|unsloth|selective"


def normalized(row: Mapping[str, object], known_gpus: Collection[str]) -> MeasurementRow:
    """Return the row in our spelling. Raises EstimateError with the reason if a stated field cannot be read."""
    found = {name: value for name, value in row.items() if value not in ("", "null", "n/a", "unknown")}
    for name, others in _FIELDS.items():
        stated = next((found[other] for other in others if found.get(other) is not None), None)
        if found.get(name) is None and stated is not None:
            found[name] = stated
    for name in _TEXTS:
        value = found.get(name)
        if value is not None and not isinstance(value, str):
            found[name] = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    found["quality"] = found.get("quality") or "A"
    _read_gpu(found, known_gpus)
    for name in _COUNTS:
        if found.get(name) is not None:
            found[name] = _count(name, found[name])
    _read_value(found)
    _read_switch(found)
    _read_method(found)
    return cast(MeasurementRow, found)


def _count(name: str, value: object) -> int:
    number, rest = _number(name, value)
    rest = rest.strip().lower()
    number *= {"k": 1024 if number in (1, 2, 4, 8, 16, 32, 64, 128) else 1000}.get(rest.split(" ")[0], 1)
    if not 1 <= number <= _MOST or number != int(number):
        raise EstimateError(name, f"{name} {value!r} is not a whole number from 1 to a billion")
    return int(number)


def _number(name: str, value: object) -> tuple[float, str]:
    """Return a number and what stands behind it."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise EstimateError(name, f"{name} {value!r} is not a number")
    if isinstance(value, str):
        match = _NUMBER.fullmatch(value.strip())
        if match is None or re.match(r"\s*(-|–|to|/)\s*\d", match[2]):
            raise EstimateError(name, f"{name} {value!r} is not one number")
        return float(match[1].replace(",", "")), match[2]
    if not math.isfinite(value):
        raise EstimateError(name, f"{name} {value!r} is not a number")
    return float(value), ""


def _read_gpu(row: dict[str, object], known: Collection[str]) -> None:
    name, key = str(row.get("gpu") or ""), row.get("gpu_key")
    if count := _OF_GPUS.match(name):
        row["gpu_count"], row["gpu"] = row.get("gpu_count") or count[1], name[count.end() :]
    if key and key not in known:
        spelled = re.sub(r"[-_]+", " ", str(key))
        found, sizes = gpu_key(None, spelled), _SIZES.findall(spelled)
        if found and (not sizes or set(sizes) & set(found.split("-"))):
            row["gpu_key"] = found
    elif not key:
        row["gpu_key"] = gpu_key(None, re.sub(r"[-_]+", " ", name)) or None


def _read_value(row: dict[str, object]) -> None:
    """Give the metric our name, and the value its unit."""
    value, unit = _number("value", row.get("value"))
    metric = re.sub(r"[\s/-]+", "_", str(row.get("metric") or "").strip().lower())
    if memory := _MEMORY.fullmatch(metric):
        named = re.match(r"(gi?b|mi?b)\b", unit.strip().lower())
        name = named[1] if named else (memory[1] or "") if metric != "peak_vram_gb" else ""
        written, factor = _MEMORY_UNITS[name]
        row["metric"], value = "peak_vram_gb", value * factor
        if name:
            row["unit_note"] = f"{written}; {row.get('unit_note') or ''}".strip("; ")
        for counter in ("reserved", "allocated"):
            if counter in metric:
                row["unit_note"] = f"{row.get('unit_note') or 'GB'}; {counter}"
    elif metric in _TOTALS:
        row["metric"], value = "minutes_total", value * _TOTALS[metric]
    elif _STEP_RATES.fullmatch(metric):
        row["metric"], value = "seconds_per_iter", 1 / value if value > 0 else value
    elif rate := _TOKEN_RATES.fullmatch(metric):
        gpus, length = row.get("gpu_count"), row.get("seq_len")
        if not isinstance(gpus, int) or not isinstance(length, int):
            raise EstimateError("value", "a rate of all GPUs needs their number and the sequence length")
        row["metric"] = "tokens_per_s_per_gpu"
        value *= (1 if (rate[1] or rate[2] or rate[3]).startswith("tok") else length) / gpus
    else:
        if _GPU_RATES.fullmatch(metric):
            row["metric"] = "tokens_per_s_per_gpu"
        elif _STEP_TIMES.fullmatch(metric):
            row["metric"] = "seconds_per_iter"
            value /= 1000 if unit.strip().lower().startswith("ms") else 1
    row["value"] = value


def _read_switch(row: dict[str, object]) -> None:
    stated = str(row.get("grad_ckpt")).strip().lower()
    if re.search(_UNCLEAR, stated):
        return
    row["grad_ckpt"] = next((switch for switch, words in _SWITCHES.items() if stated in words), None)


def _read_method(row: dict[str, object]) -> None:
    """Give the method our name. "SFT" alone names none, and neither does "DPO": rank and precision decide."""
    name = str(row.get("method") or "").strip().lower().replace("_", "-")
    if name in (*Method, "dora", "rslora"):
        row["method"] = name
        return
    if not name or _NOT_LORA.search(name):
        return
    if other := _REWARDED.search(name):
        raise EstimateError("method", f"training by {other[1].upper()} is not modelled")
    bits = f"{name} {row.get('precision') or ''}".lower()
    is_quantized = bool(re.search(r"q-?lora|q-?dora", name) or _FOUR_BITS.search(bits) or _EIGHT_BITS.search(bits))
    is_dora, is_full = "dora" in name, _FULL.search(name) is not None
    is_lora = _LIKE_LORA.search(name) is not None or (not is_full and row.get("rank") is not None)
    if is_dora and is_quantized:
        row["method"], row["notes"] = Method.QLORA, f"{row.get('notes') or ''} with-dora"
    elif is_dora:
        row["method"] = "dora"
    elif is_lora:
        row["method"] = Method.QLORA if is_quantized else Method.LORA
    elif is_full:
        row["method"] = Method.FULL
    elif re.search(r"sft|dpo|orpo|fine-?tun", name):
        raise EstimateError("method", f"method {name!r} does not state LoRA, QLoRA or full training")
    if is_lora and _EIGHT_BITS.search(name) and not _EIGHT_BITS.search(str(row.get("precision")).lower()):
        row["precision"] = f"{row.get('precision') or 'bf16'}, int8"
    if preference := re.search(r"\b(dpo|orpo)\b", name):
        row["preference"] = preference[1]
