"""Published measurement rows as jobs that can be predicted, or the reason why one cannot.

The rules use a row's stated configuration, never its value or any prediction. If a row does not name its framework,
plain transformers is assumed.
"""

import re
from collections.abc import Mapping
from typing import TypedDict

import msgspec

from apps.contracts.hyperparameters import Method
from apps.estimates.errors import EstimateError
from apps.estimates.models.architectures import Architecture, linear_layers, parameter_count
from apps.estimates.models.names import gpu_key
from apps.estimates.physics.gpus import GIB
from apps.estimates.physics.plans import DEFAULT_TARGET_MODULES, TrainingPlan, parse_method
from apps.estimates.physics.stacks import (
    BEFORE_449_SUFFIX,
    LIGER_SUFFIX,
    LIGER_WHOLE_SUFFIX,
    MIXED_SUFFIX,
    STACKS,
    TILED_SUFFIX,
    WHOLE_SUFFIX,
)

MEMORY, TIME = "peak_memory", "time"
_METRICS = {"peak_vram_gb": MEMORY, "tokens_per_s_per_gpu": TIME, "seconds_per_iter": TIME, "minutes_total": TIME}
_GRADES = ("A", "B")
# "1024 samples" in the notes of a row of total minutes gives the number of its tokens.
_SAMPLES = re.compile(r"\b([\d,]+) samples, one epoch")
# A row means GiB if it names GiB or shows the division; a bare "GB" is 1e9 bytes.
_GIB = re.compile(r"GiB|1024|2\^30", re.IGNORECASE)
_SPLIT_MODEL = re.compile(r"\b(TP|PP|CP)([2-9]|\d\d)", re.IGNORECASE)
_LIGER = re.compile(
    r"(?<!no )(?<!without )liger(?![\W_]?(fused[\W_]?linear[\W_]?)?(cross|ce\b|flce|loss))", re.IGNORECASE
)
_WHOLE_LOGITS = re.compile(r"plain cross.entropy|logits materialized", re.IGNORECASE)
_FUSED_LOSS = re.compile(
    r"(?<!no )(?<!without )liger|cut.cross.entropy|\bcce\b|fused.(linear.)?cross.entropy", re.IGNORECASE
)
_COMPILED = re.compile(r"\bcompile=True|torch.?compile enabled", re.IGNORECASE)
# The names of one matrix for query, key and value, as a source that adapts one of them means in such a model.
_FUSED_QKV = ("query_key_value", "qkv_proj", "c_attn", "W_pack", "Wqkv")
_OTHER_OPTIMIZER = re.compile(r".*(galore|apollo|muon|lomo|shampoo|adafactor)|(?!.*adam).*(sgd|lion)", re.IGNORECASE)
# What notes say if a row's length is the limit or the longest of a dataset's rows, not the length of each.
_VARYING = re.compile(
    r"\bcap(s|ped)?\b|variable.length|\bsamples\b|\bshort\b|truncat|\blongest\b|\bunpadded\b|\bdynamic", re.IGNORECASE
)
_FP32 = re.compile(r"(float32|fp32|32-true)\b", re.IGNORECASE)
_LOSS_OF_449 = "2025-02-17"  # the day of transformers 4.49
_LOW_PRECISION = re.compile(r"fp8|float8|nvfp4", re.IGNORECASE)
_OFFLOADED = re.compile(
    r"(?<!no[ _-])(?<!without )(?<!no cpu )(?<!without cpu )offload"
    r"(?![\w.]*\s*[:=]?\s*\b(none|null|false|off|disabled)\b)",
    re.IGNORECASE,
)
# Megatron's, LitGPT's, torchtune's and short names of modules -> the names in transformers.
_MLP = ("gate_proj", "up_proj", "down_proj", "fc1", "fc2", "gate_up_proj")
_SHORT_NAMES = {
    "query": ("q_proj",), "key": ("k_proj",), "value": ("v_proj",), "projection": ("o_proj", "dense"),
    "q": ("q_proj",), "k": ("k_proj",), "v": ("v_proj",), "o": ("o_proj", "dense"), "output_proj": ("o_proj", "dense"),
    "wq": ("q_proj",), "wk": ("k_proj",), "wv": ("v_proj",), "wo": ("o_proj", "dense"),
    "linear_qkv": ("q_proj", "k_proj", "v_proj"), "linear_proj": ("o_proj", "dense"),
    "linear_fc1": ("gate_proj", "up_proj", "fc1", "gate_up_proj"), "linear_fc2": ("down_proj", "fc2"),
    **dict.fromkeys(_FUSED_QKV, ("q_proj", "k_proj", "v_proj")), "dense": ("dense", "o_proj"),
    "dense_h_to_4h": ("dense_h_to_4h", "gate_proj", "up_proj"), "dense_4h_to_h": ("dense_4h_to_h", "down_proj"),
    **dict.fromkeys(("qkv", "qkvo", "attn", "attention"), ("q_proj", "k_proj", "v_proj", "o_proj", "dense")),
    "gate": ("gate_proj",), "up": ("up_proj",), "down": ("down_proj",), "mlp": _MLP, "ffn": _MLP, "head": (),
}  # fmt: skip
# ms-swift's DEFAULT at the commit of its rows: the query, key and value projections of each family.
_SWIFT_DEFAULT = ("q_proj", "k_proj", "v_proj", "c_attn", "W_pack", "query_key_value", "qkv_proj")
# Frameworks whose adapters have no dropout unless their user asks for it.
NO_DROPOUT = frozenset({"peft", "unsloth", "torchtune", "llama_factory"})
# torchtune's full training of so many parameters shards the embedding and the head apart (custom_sharded_layers in
# recipes/configs/llama3_1/70B_full.yaml). The configurations of LoRA do not, but their published runs of 70B and 405B
# need as little as if they did: they are 3 % above and 11 % below this, and 11 % and 28 % below the other way.
_SPLIT_FROM = 60e9
_FRAMEWORKS = (
    ("unsloth", r"unsloth"), ("torchtitan", r"torchtitan"), ("torchtune", r"torchtune"), ("litgpt", r"litgpt|lit-gpt"),
    ("swift", r"swift"), ("llama_factory", r"llama.?factory"), ("axolotl", r"axolotl"),
    ("foundry", r"foundry|composer"),
    ("fsdp_qlora", r"fsdp_qlora"), ("automodel", r"automodel"), ("nemo", r"nemo|mlperf|megatron"),
    ("qwen", r"qwen_readme|QwenLM/Qwen/"), ("peft", r"peft_metamath|huggingface/peft"), ("anneal", r"anneal"),
    ("plain_loop", r"own loss"), ("loop", r"pytorch loop|(own|custom) (training )?loop"),
)  # fmt: skip


class MeasurementRow(TypedDict, total=False):
    """One line of `measurements.jsonl` or of a file to score.

    What its source does not state is null. The counts are read only after a check that the row states them.
    """

    id: str
    source: str
    source_url: str
    framework: str | None
    published: str | None
    metric: str
    value: float
    unit_note: str
    quality: str
    notes: str | None
    model: str
    method: str
    preference: str | None
    rank: int | None
    targets: str | None
    seq_len: int
    micro_batch: int
    grad_accum: int
    grad_ckpt: bool | str | None
    optimizer: str | None
    precision: str | None
    attention: str | None
    packing: bool | None
    gpu: str
    gpu_key: str | None
    gpu_count: int
    parallelism: str | None


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One row, ready to be predicted. `measured` is bytes of one GPU, or seconds per token of one GPU.

    `counter`: "allocated" and "reserved" are torch's (no CUDA context), "reserved_delta" is reserved less the memory
    before the weights, "device" is the figure of nvidia-smi. A row that names none has its framework's.
    """

    id: str
    source: str
    kind: str
    method: str
    architecture: Architecture
    plan: TrainingPlan
    stack: str
    gpu_key: str
    measured: float
    counter: str = ""
    precision: str = "bf16"


class Excluded(msgspec.Struct, frozen=True):
    id: str
    kind: str
    reason: str


def read_row(row: MeasurementRow, architectures: Mapping[str, Architecture]) -> Job | Excluded:
    """Return the row as a job, or excluded with the first rule that fails as the reason."""
    kind = _METRICS.get(str(row.get("metric")), "")
    if reason := _obstacle(row, architectures, kind):
        return Excluded(str(row.get("id")), kind, reason)
    architecture = architectures[row["model"]]
    try:
        measured = _measured(row, kind)
    except EstimateError as error:
        return Excluded(str(row.get("id")), kind, str(error))
    stack = framework(row)
    return Job(
        id=str(row.get("id")), source=str(row.get("source")), kind=kind, method=row["method"],
        architecture=architecture, stack=stack,
        plan=_plan(row, architecture, stack), measured=measured,
        gpu_key=gpu_key(row.get("gpu_key"), row.get("gpu")), counter=_counter(row) or STACKS[stack].counter,
        precision="fp8" if _LOW_PRECISION.search(str(row.get("precision"))) else "bf16",
    )  # fmt: skip


def framework(row: MeasurementRow) -> str:
    """Return the stack profile that a row was measured with; "hf" if it names none.

    A row without a framework is read by its own text, including its address. An address does not tell the loss: one
    page compares several.
    """
    settings = " ".join(str(row.get(key)) for key in ("framework", "source", "notes", "parallelism", "attention"))
    text = str(row.get("framework") or f"{settings} {row.get('source_url')}")
    found = next((key for key, pattern in _FRAMEWORKS if re.search(pattern, text, re.IGNORECASE)), "hf")
    if "chunked_ce=False" in settings:
        found = f"{found}{WHOLE_SUFFIX}"
    if found == "hf" and "accelerated-peft-bnb" in settings:
        found = "fms"
    if found == "hf" and _holds_fp32(row):
        found = f"{found}{MIXED_SUFFIX}"
    has_liger, is_whole = _LIGER.search(settings) is not None, _WHOLE_LOGITS.search(settings) is not None
    if has_liger and is_whole and f"{found}{LIGER_WHOLE_SUFFIX}" in STACKS:
        return f"{found}{LIGER_WHOLE_SUFFIX}"
    is_tiled = _FUSED_LOSS.search(settings) is not None and not is_whole
    if (
        not is_tiled
        and f"{found}{BEFORE_449_SUFFIX}" in STACKS
        and "0" < str(row.get("published") or "") < _LOSS_OF_449
    ):
        found = f"{found}{BEFORE_449_SUFFIX}"
    suffixes = (LIGER_SUFFIX, TILED_SUFFIX) if has_liger else (TILED_SUFFIX,)
    return next((f"{found}{each}" for each in suffixes if is_tiled and f"{found}{each}" in STACKS), found)


def _holds_fp32(row: MeasurementRow) -> bool:
    """Return whether FSDP trains all weights in mixed precision: the trainer's "bf16", not weights of 16 bits."""
    precision, parallelism = str(row.get("precision")).lower(), str(row.get("parallelism"))
    is_mixed = re.match(r"bf16|bfloat16|amp|mixed", precision) and not re.search(r"pure|true|only", precision)
    is_sharded = re.search(r"fsdp|full_shard", parallelism, re.IGNORECASE)
    return row.get("method") == Method.FULL and is_mixed is not None and is_sharded is not None


def _obstacle(row: MeasurementRow, architectures: Mapping[str, Architecture], kind: str) -> str:
    parallelism, precision = str(row.get("parallelism")), str(row.get("precision"))
    checks = (
        (kind != "", f"metric {row.get('metric')} is neither peak memory nor time"),
        (row.get("quality", "A") in _GRADES, "grade is not A or B"),
        (str(row.get("method")) in (*Method, "dora", "rslora"), "method is not LoRA, QLoRA, DoRA or full"),
        (row.get("model") in architectures, "the model's shape is not known"),
        (bool(row.get("seq_len")), "sequence length is not stated"),
        (bool(row.get("micro_batch")), "micro-batch is not stated"),
        (bool(row.get("gpu_count")), "number of GPUs is not stated"),
        (isinstance(row.get("grad_ckpt"), bool) or row.get("grad_ckpt") in ("full", "unsloth"),
         "gradient checkpointing is not stated as on or off"),
        (row.get("method") == Method.FULL or row.get("rank") is not None, "adapter rank is not stated"),
        (row.get("method") == Method.FULL or row.get("targets") is not None, "adapted modules are not stated"),
        (not _SPLIT_MODEL.search(parallelism), "tensor, pipeline or context parallel: a layer is split over GPUs"),
        ("device_map" not in parallelism, "layers are spread over GPUs in a way the row does not state"),
        (row.get("gpu_count") == 1 or parallelism not in ("None", "none"), "how several GPUs share it is not stated"),
        (kind != MEMORY or not _OTHER_OPTIMIZER.match(str(row.get("optimizer"))), "the optimizer is no AdamW"),
        (kind != TIME or not row.get("preference"), "the time of preference training is not compared"),
        (kind != TIME or not _FP32.match(precision), "the speed of fp32 is not modelled"),
        ("nvfp4" not in precision.lower(), "4-bit arithmetic is not modelled"),
        ("activation" not in parallelism.lower(), "activations offloaded to the host are not modelled"),
    )  # fmt: skip
    return next((reason for holds, reason in checks if not holds), "")


def _measured(row: MeasurementRow, kind: str) -> float:
    value, gpus = float(row["value"]), int(row["gpu_count"])
    if not value > 0:
        raise EstimateError("value", "the value is not positive")
    if kind == MEMORY:
        unit = str(row.get("unit_note"))
        per_gpu = value / gpus if "SUM over all GPUs" in unit else value
        return per_gpu * (GIB if _GIB.search(unit.replace("GB vs GiB unstated", "")) else 1e9)
    tokens = float(row["seq_len"]) * float(row["micro_batch"])
    if row["metric"] == "tokens_per_s_per_gpu":
        return 1 / value
    if row["metric"] == "seconds_per_iter":
        if not row.get("grad_accum"):
            raise EstimateError("grad_accum", "micro-steps per iteration are not stated")
        return value / (tokens * float(row["grad_accum"]))
    samples = _SAMPLES.search(str(row.get("notes")))
    if samples is None:
        raise EstimateError("value", "the number of tokens in the total time is not stated")
    return value * 60 * gpus / (float(samples[1].replace(",", "")) * float(row["seq_len"]))


def _plan(row: MeasurementRow, architecture: Architecture, stack: str) -> TrainingPlan:
    choice, gpus = parse_method(row["method"]), int(row["gpu_count"])
    return TrainingPlan(
        method=choice.method,
        use_dora=choice.use_dora or "-dora" in str(row.get("notes")),
        max_length=int(row["seq_len"]),
        micro_batch_size=int(row["micro_batch"]),
        gradient_accumulation_steps=int(row.get("grad_accum") or 1),
        gradient_checkpointing=bool(row["grad_ckpt"]),
        lora_rank=int(row.get("rank") or 16),
        lora_dropout=0.0 if stack.partition("+")[0] in NO_DROPOUT else 0.05,
        target_modules=target_modules(row, architecture),
        optimizer=_optimizer(row),
        compute_dtype="float32" if _FP32.match(str(row.get("precision"))) else "bfloat16",
        steps_in_backward=bool(re.search(r"in.(bwd|backward)", str(row.get("optimizer")), re.IGNORECASE)),
        offloads_activations="activation_offload=True" in str(row.get("notes")),
        is_packed=_has_fixed_lengths(row) or not _VARYING.search(str(row.get("notes"))),
        splits_root=stack.startswith("torchtune") and parameter_count(architecture) >= _SPLIT_FROM,
        is_compiled=bool(_COMPILED.search(str(row.get("notes")))),
        quantization=_quantization(row),
        attention="eager" if str(row.get("attention")).lower() == "eager" else "flash",
        trains_embeddings="modules_to_save" in str(row.get("targets")),
        is_deepspeed=bool(re.search(r"deepspeed|zero-?[123]", str(row.get("parallelism")), re.IGNORECASE)),
        gpu_count=gpus,
        parallelism=_parallelism(row, gpus),
        is_preference=bool(row.get("preference")),
        has_reference=row.get("preference") != "orpo",  # ORPO has none
        cpu_offload=_OFFLOADED.search(f"{row.get('parallelism')} {row.get('optimizer')}") is not None,
    )


def _optimizer(row: MeasurementRow) -> str:
    text = str(row.get("optimizer")).lower()
    paged, eight, fused = "paged" in text, "8bit" in text, "fused" in text
    return f"{'paged_' if paged else ''}adamw{'_8bit' if eight else '_fused' if fused and not paged else ''}"


def _parallelism(row: MeasurementRow, gpus: int) -> str:
    text = str(row.get("parallelism")).lower()
    if gpus == 1 and "zero" not in text and "deepspeed" not in text:
        return "single"
    for name, pattern in (
        ("ddp", r"ddp|no shard"), ("zero3", r"zero-?3|fsdp|full_shard"), ("zero2", r"zero-?2"), ("zero1", r"zero-?1"),
    ):  # fmt: skip
        if re.search(pattern, text):
            return name
    return "zero2" if "deepspeed" in text else "ddp"


def _counter(row: MeasurementRow) -> str:
    unit = str(row.get("unit_note")).lower()
    if "minus" in unit and "reserved" in unit:
        return "reserved_delta"
    if "reserved" in unit:
        return "reserved"
    if "allocated" in unit or "active" in unit:
        return "allocated"
    return "device" if "nvidia-smi" in unit or "device" in unit else ""


def _has_fixed_lengths(row: MeasurementRow) -> bool:
    text = f"{row.get('notes')}".lower()
    return bool(row.get("packing")) or "right-padded to" in text or "dummy data" in text or "mock data" in text


def _quantization(row: MeasurementRow) -> str:
    text = str(row.get("precision")).lower()
    for name in ("gptq int8", "gptq int4", "int8"):
        if name in text:
            return name.replace("gptq ", "gptq_")
    return "gptq_int4" if "gptq" in text else "nf4"


def target_modules(row: MeasurementRow, architecture: Architecture) -> tuple[str, ...]:
    """Return the row's adapted modules in this family's own names.

    Return all linear layers if the row states that or names no known module.
    """
    text = str(row.get("targets") or "")
    stated = re.findall(r"\w+", text)
    names = {layer.name.rsplit(".", 1)[-1] for layer in linear_layers(architecture)}
    wanted: tuple[str, ...] = _SWIFT_DEFAULT if text.startswith("DEFAULT") else ()
    for name in stated:
        wanted += _SHORT_NAMES.get(name, (name,))
    if not names.isdisjoint(_FUSED_QKV) and not set(wanted).isdisjoint(("q_proj", "k_proj", "v_proj")):
        wanted += _FUSED_QKV
    known = tuple(dict.fromkeys(name for name in wanted if name in names))
    is_all = re.search(r"\ball[ -]linear\b|^all\b(?! att)", text, re.IGNORECASE)
    return known if known and not is_all else DEFAULT_TARGET_MODULES
