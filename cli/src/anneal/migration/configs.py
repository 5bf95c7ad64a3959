"""Configurations of Together, Fireworks, Axolotl and LLaMA-Factory as plans, with a line for each of their keys."""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

import yaml

from anneal.failures import ExitCode, Failure
from anneal.migration.base_models import suggest
from anneal.migration.config_files import ROW_TYPES, Columns, columns_of, is_text, local, placed, registered, row_type
from anneal.migration.config_keys import BATCHES, IGNORED, MODEL, NAMES, NO_SUCH, OF_A_JOB_THERE, OFF, SHAPES
from anneal.migration.plans import Plan, Setting, suffix_of
from anneal.texts import text_of
from anneal.transfers import hash_of

_RANKS = (8, 16, 32, 64)
_SCHEDULERS = ("cosine", "linear", "constant", "constant_with_warmup")
_STAGES = {"sft": "supervised", "dpo": "dpo", "orpo": "orpo", "pt": "text", "text": "text"}
_LARGEST_BYTES = 1024**2
_TRAINERS_BATCH = 8  # of transformers' TrainingArguments, if per_device_train_batch_size is left out
_SECRET = re.compile(r"(\b|_)(api_?)?key$|token$|secret|password|credential|webhook", re.IGNORECASE)
_MODULE = re.compile(r"\w+")
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
_OPTIONS = {"training_file": "--data", "validation_file": "--validation-data"}


class _Loader(yaml.SafeLoader):
    """Reads 2e-4 as a number, as YAML 1.2 does, and not as text."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+(?:\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def read_config(path: Path) -> dict[str, Any]:
    """Return a file of YAML or JSON. Raises Failure."""
    if path.stat().st_size > _LARGEST_BYTES:
        raise Failure(f"{path} is too large for a configuration: at most 1 MiB.", ExitCode.USAGE)
    text_of(path.read_bytes(), str(path))
    try:
        with path.open(encoding="utf-8") as file:  # its name is in the errors
            found = yaml.load(file, Loader=_Loader)  # noqa: S506 - a SafeLoader
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise Failure(f"{path} is neither YAML nor JSON: {error}.", ExitCode.USAGE) from error
    if not isinstance(found, dict):
        raise Failure(f"{path} has no keys at its top.", ExitCode.USAGE)
    return {str(key): value for key, value in found.items()}


def plan_of_config(
    tool: str,
    path: Path,
    *,
    data: Path | None,
    catalogue: Sequence[str],
    chosen: Mapping[str, str],
    validation_data: Path | None = None,
) -> Plan:
    """Return the plan of a tool's configuration."""
    given = _flat(_snakes(read_config(path)))
    reader = _Reader(tool, given)
    source = str(reader.take(MODEL[tool], "mapped", "It chooses the base model.") or "")
    version = hash_of(path)[:12]  # a changed configuration is another job
    plan = Plan(f"{tool}:{path.name[:200]}:{version}", source, settings=reader.lines)
    found = suggest(source, catalogue=catalogue, chosen=chosen)
    plan.base_model, plan.base_reason = found.model, found.reason
    if not source:
        plan.obstacle = f"{path} has no {MODEL[tool]}."
    elif found.model is None:
        plan.obstacle = f"{found.reason[0].upper()}{found.reason[1:]}."
    try:
        kind = reader.method()
        recipe = reader.recipe(kind)
        by_option = {"training_file": data, "validation_file": validation_data}
        plan.files, plan.mappings = reader.files(path.parent, by_option, kind)
    except Failure as failure:
        plan.obstacle = plan.obstacle or failure.message
        return plan
    plan.key = ":".join([plan.key, *(hash_of(file)[:12] for file in plan.files.values())])  # other rows: another job
    suffix = reader.take("suffix", "mapped", "It is part of the model's name.")
    if tool == "fireworks":
        named = reader.take("output_model", "mapped", "Its end is part of the model's name.")
        suffix = str(named or "").rpartition("/")[2]
    reader.rest()
    plan.request = {
        "model": found.model,
        "method": {"type": kind},
        "recipe": recipe,
        "suffix": suffix_of(str(suffix or "")) or None,
    }
    plan.request = {name: value for name, value in plan.request.items() if value is not None}
    return plan


class _Reader:
    """Takes keys out of a configuration, and keeps a line for each."""

    def __init__(self, tool: str, given: dict[str, Any]) -> None:
        self.tool = tool
        self.left = {key: value for key, value in given.items() if value is not None}
        self.lines: list[Setting] = []

    def take(self, key: str, outcome: str, reason: str) -> Any:
        if key not in self.left:
            return None
        value = self.left.pop(key)
        self.lines.append(Setting(key, _shown(key, value), outcome, reason))
        return value

    def method(self) -> str:
        """Return the method's type. Raises Failure for one that is not offered."""
        stage = self.take("stage", "mapped", "It chooses the method.") or self.take("rl", "mapped", "It is the method.")
        stage = stage or self.take("training_method", "mapped", "It chooses the method.")
        stage = stage or ("text" if self.tool == "axolotl" and is_text(self.left) else "sft")
        loss = self.take("pref_loss", "mapped", "It chooses the method.")
        if loss not in (None, "sigmoid", "orpo"):
            raise Failure(f"The loss {loss} is not offered: dpo and orpo are.", ExitCode.REFUSED)
        stage = loss if loss == "orpo" else str(stage).lower()
        if stage not in _STAGES:
            raise Failure(f"The method {stage} is not offered: {', '.join(_STAGES)} are.", ExitCode.REFUSED)
        return _STAGES[stage]

    def recipe(self, kind: str) -> dict[str, Any]:
        found: dict[str, Any] = {"method": self._adapter()}
        if self.tool == "together":
            found |= self._stopping()
        factor = self._alpha_factor()
        if kind in ("dpo", "orpo"):
            self.take("lora_dropout", "ignored", "Anneal trains preferences without dropout.")
        for key, name in NAMES[self.tool].items():
            if key in self.left:
                # The tools have one beta for both methods.
                name = "orpo_beta" if name == "dpo_beta" and kind == "orpo" else name
                value, outcome, reason = _converted(name, self.left[key])
                if name == "lora_alpha" and _is_number(value) and factor != 1:
                    value, reason = max(1, round(value * factor)), "It changes with the rank, so the scale stays."
                self.take(key, outcome, f"{name}: {value}. {reason}".strip() if outcome == "mapped" else reason)
                if outcome == "mapped":
                    found[name] = value
        self.take("lora_target_linear", "mapped", "Anneal trains all linear layers if none are named.")
        if (size := self._batch()) is not None:
            found["batch_size"] = size
        inputs = self.take("train_on_inputs", "mapped", "train_on: all or assistant.")
        inputs = self.take("train_on_prompt", "mapped", "train_on: all or assistant.") if inputs is None else inputs
        if isinstance(inputs, bool):
            found["train_on"] = "all" if inputs else "assistant"
        return found

    def _stopping(self) -> dict[str, Any]:
        """Take Together's switch of early stopping, and the patience unless it is on."""
        switch = self.take("early_stopping_enabled", "mapped", "It turns early stopping on or off.")
        if switch:
            return {}
        self.take("early_stopping_patience", "ignored", "Early stopping is off.")
        return {"early_stopping_patience": None} if switch is False else {}

    def _alpha_factor(self) -> float:
        """Return by what alpha is multiplied so that a rank that is served has the same scale."""
        rank = self.left.get("lora_r", self.left.get("lora_rank"))
        if not _is_number(rank) or rank <= 0:
            return 1
        factor = _served_rank(rank) / rank
        is_root = self.left.get("use_rslora") or self.left.get("peft_use_rslora")
        return math.sqrt(factor) if is_root else factor

    def _adapter(self) -> str:
        kind = self.take("adapter", "mapped", "It chooses LoRA or QLoRA.")
        kind = kind or self.take("finetuning_type", "mapped", "It chooses LoRA, QLoRA or full fine-tuning.")
        kind = kind or self.take("training_type", "mapped", "It chooses LoRA or full fine-tuning.")
        if self.take("lora", "mapped", "It chooses LoRA or full fine-tuning.") is False:
            kind = "full"
        is_4_bit = self.take("load_in_4bit", "mapped", "4 bits are QLoRA.")
        if self.left.get("quantization_bit") in (4, "4"):
            is_4_bit = self.take("quantization_bit", "mapped", "4 bits are QLoRA.")
        kind = str(kind or ("full" if self.tool == "axolotl" else "lora")).lower()
        if kind not in ("lora", "qlora", "full"):
            raise Failure(f"The type {kind} is not offered: lora, qlora and full are.", ExitCode.REFUSED)
        return "qlora" if is_4_bit and kind == "lora" else kind

    def _batch(self) -> int | None:
        reason = "batch_size is their product, the rows of a step on one GPU."
        if self.tool == "axolotl" and self.left.get("batch_size") and not self.left.get(BATCHES["axolotl"][1]):
            whole = self.take("batch_size", "mapped", "It is the rows of a step on one GPU.")
            self.take(BATCHES["axolotl"][0], "ignored", "batch_size says the rows of a step.")
            return whole if isinstance(whole, int) and whole > 0 else None
        sizes = [self.take(key, "mapped", reason) for key in BATCHES.get(self.tool, ())]
        if self.tool == "llama-factory" and sizes[0] is None and sizes[1] is not None:
            sizes[0] = _TRAINERS_BATCH
        if not sizes or not all(isinstance(size, int) and size > 0 for size in sizes if size is not None):
            return None
        return math.prod(size for size in sizes if size is not None) if any(sizes) else None

    def files(
        self, folder: Path, by_option: Mapping[str, Path | None], kind: str
    ) -> tuple[dict[str, Path], dict[str, Any]]:
        """Return the files, and the columns of those that name their own. Raises Failure if a file is not here."""
        named = {
            "training_file": self._first(
                ("training_file", "datasets", "dataset", "pretraining_dataset"), by_option["training_file"]
            ),
            "validation_file": self._first(
                ("validation_file", "test_datasets", "eval_dataset", "evaluation_dataset"), by_option["validation_file"]
            ),
        }
        if not named["training_file"] and not by_option["training_file"]:
            raise Failure("The configuration names no data to train on. Give it by --data.", ExitCode.NOT_FOUND)
        registry = None
        if self.tool == "llama-factory":
            place = str(self.take("dataset_dir", "mapped", "It has dataset_info.json.") or "data")
            registry = placed(folder, f"{place}/dataset_info.json").parent
        found: dict[str, tuple[Path, Columns]] = {}
        for member, option in _OPTIONS.items():
            value, path = named[member], by_option[member]
            if path:
                found[member] = (path, columns_of(value) if registry is None else None)
            elif value and registry is None:
                found[member] = local(folder, value, option=option)
            elif value and registry is not None:
                found[member] = registered(registry, value, kind=kind, option=option)
        mappings = {member: columns for member, (_, columns) in found.items() if columns}
        return {member: path for member, (path, _) in found.items()}, mappings

    def _first(self, keys: Sequence[str], given: Path | None) -> Any:
        """Return the first value that is not empty, and leave the members of data sets for lines of their own."""
        present = [key for key in keys if self.left.get(key)]
        values = [
            self.take(key, "mapped", f"{given} takes its place." if given else "It names the file.") for key in present
        ]
        for key, value in zip(present, values, strict=True):
            for entry in value if isinstance(value, list) else [value]:
                if isinstance(entry, dict):
                    self._keep_members(key, entry)
        return next(iter(values), None)

    def _keep_members(self, key: str, entry: dict[Any, Any]) -> None:
        """Leave the other members of a data set for lines of their own."""
        members = {name: value for name, value in entry.items() if name != "path" and value is not None}
        self.left |= {f"{key}.{name}": value for name, value in members.items()}
        self.take(f"{key}.data_files", "mapped", "It names the file.")
        if isinstance(members.get("type"), dict):
            self.take(f"{key}.type", "mapped", "It names the columns. Its formats and system prompt are not used.")
        elif row_type(entry) in ROW_TYPES:
            self.take(f"{key}.type", "ignored", SHAPES)
        if row_type(entry) in ("completion", "pretrain"):
            self.take(f"{key}.field", "mapped", "It names the column.")
            self.take(f"{key}.text_column", "mapped", "It names the column.")
        if members.get("field_messages"):
            for name in ("field_messages", "field_chosen", "field_rejected"):
                self.take(f"{key}.{name}", "mapped", "It names the column.")
        if members.get("split") == "train":
            self.take(f"{key}.split", "ignored", "All rows of the file are used.")

    def rest(self) -> None:
        for key in list(self.left):
            name = key.rpartition(".")[2]
            reason = next((why for why, pattern in IGNORED.items() if pattern.fullmatch(name)), None)
            if self.tool in ("together", "fireworks") and OF_A_JOB_THERE.fullmatch(name):
                reason = "It is about the job there."
            if not self.left[key]:
                reason = reason or OFF
            self.take(key, "ignored" if reason else "unsupported", reason or NO_SUCH)


def _converted(name: str, value: Any) -> tuple[Any, str, str]:
    """Return the value here, the outcome and the reason."""
    if name not in ("lr_scheduler", "target_modules") and isinstance(value, str) and _NUMBER.fullmatch(value):
        value = float(value) if re.search(r"[.eE]", value) else int(value)
    is_number = _is_number(value)
    match name:
        case "epochs" if is_number:
            return math.ceil(value), "mapped", "" if value == int(value) else "Epochs are whole here."
        case "lora_rank" if is_number:
            rank = _served_rank(value)
            return rank, "mapped", "" if rank == value else "Ranks that are served: 8, 16, 32 and 64."
        case "lr_scheduler":
            offered = f"Offered: {', '.join(_SCHEDULERS)}."
            return value, "mapped" if value in _SCHEDULERS else "unsupported", offered
        case "target_modules" if value in ("all", "all-linear", ["all"]):
            return value, "ignored", "Anneal trains all linear layers if none are named."
        case "target_modules":
            modules = [each.strip() for each in value.split(",")] if isinstance(value, str) else value
            if not isinstance(modules, list) or not all(_MODULE.fullmatch(str(module)) for module in modules):
                return value, "unsupported", "It is a pattern. Anneal trains all linear layers if none are named."
            return modules, "mapped", ""
        case "validation_share" if not is_number or value >= 1:
            return value, "unsupported", "Anneal takes a share below 1, not a number of rows."
        case "batch_size" | "learning_rate" if value in ("max", "auto"):
            return value, "ignored", "Anneal chooses it."
    return value, "mapped", ""


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 2**53


def _served_rank(rank: float) -> int:
    return next((each for each in _RANKS if each >= rank), _RANKS[-1])


def _shown(key: str, value: Any) -> str:
    """Return a value for people. Nested values are not shown, because they may have secrets."""
    if _SECRET.search(key):
        return "***"
    each = value if isinstance(value, list) else [value]
    return "{…}" if any(isinstance(member, dict | list) for member in each) else str(value)[:60]


def _snakes(given: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the members under names such as learning_rate."""
    return {re.sub(r"(?<=[a-z0-9])([A-Z])", lambda found: f"_{found[1].lower()}", str(k)): v for k, v in given.items()}


def _flat(given: dict[str, Any]) -> dict[str, Any]:
    """Return the members of nested objects of Together and Fireworks beside their names."""
    flat = dict(given)
    if isinstance(training := flat.get("training_config"), dict):  # Fireworks's jobs with preferences
        flat |= _snakes(training)
        del flat["training_config"]
        if isinstance(loss := flat.pop("loss_config", None), dict):
            flat |= {"training_method": _snakes(loss)}
    if isinstance(of_type := flat.get("training_type"), dict):
        flat |= {key: value for key, value in of_type.items() if key != "type"} | {"training_type": of_type.get("type")}
    if isinstance(method := flat.get("training_method"), dict):
        flat |= {k: v for k, v in method.items() if k != "method"} | {"training_method": method.get("method")}
    if isinstance(scheduler := flat.get("lr_scheduler"), dict):
        del flat["lr_scheduler"]
        flat |= scheduler
    return flat
