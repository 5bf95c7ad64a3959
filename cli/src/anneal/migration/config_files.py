"""The files that a configuration of another tool names, and the meaning of their columns."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from anneal.failures import ExitCode, Failure
from anneal.texts import text_of

Columns = dict[str, Any] | None  # a mapping of columns, or None where the rows are recognized

# Types of rows in Axolotl's configurations, up to the first dot or colon, that are recognized by their columns.
ROW_TYPES = ("alpaca", "alpaca_chat", "chat_template", "sharegpt", "chatml", "llama3", "completion", "pretrain")
_TEXT_TYPES = ("completion", "pretrain")
_LOADERS = ("json", "csv", "parquet", "text")  # Axolotl gives these as paths, with the file in data_files
_CONVERSATIONS = ("messages", "conversations", "conversation")
_OTHER_NAMES = {"prompt": "instruction", "query": "input", "response": "output", "system": "system"}


def row_type(entry: Mapping[Any, Any]) -> str:
    """Return the type of a data set's rows, without its variant."""
    return str(entry.get("type") or "").partition(".")[0].partition(":")[0]


def is_text(given: Mapping[str, Any]) -> bool:
    """Return whether an Axolotl configuration trains on running text."""
    if given.get("pretraining_dataset"):
        return True
    entries = given.get("datasets")
    entries = [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
    return bool(entries) and all(row_type(entry) in _TEXT_TYPES for entry in entries)


def local(folder: Path, named: object, *, option: str) -> tuple[Path, Columns]:
    """Return the one file that a configuration names, and its columns. Raises Failure."""
    entry = _one(named if isinstance(named, list) else [named], option)
    columns = _columns(entry) if isinstance(entry, dict) else None
    return _file(folder, entry, option), columns


def columns_of(named: object) -> Columns:
    """Return the columns of a data set whose file is given by an option."""
    entries = named if isinstance(named, list) else [named]
    return _columns(entries[0]) if len(entries) == 1 and isinstance(entries[0], dict) else None


def placed(folder: Path, name: str) -> Path:
    """Return a path from the configuration's folder, or from the working directory if it is only there."""
    path = folder / name
    return Path(name) if not path.exists() and Path(name).exists() else path


def registered(folder: Path, named: object, *, kind: str, option: str) -> tuple[Path, Columns]:
    """Return a data set of LLaMA-Factory's `dataset_info.json`. Raises Failure."""
    names = named if isinstance(named, list) else [part.strip() for part in str(named).split(",")]
    name = str(_one([each for each in names if each], option))
    try:
        entry = json.loads(text_of((folder / "dataset_info.json").read_bytes(), f"{folder}/dataset_info.json"))[name]
        file = entry["file_name"]
        columns = dict(entry.get("columns") or {})
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        text = f"{folder}/dataset_info.json has no file for {name[:100]!r}. Give the file by {option}."
        raise Failure(text, ExitCode.NOT_FOUND) from error
    return _file(folder, file, option), _registered_columns(entry, columns, kind)


def _registered_columns(entry: Mapping[str, Any], columns: dict[str, str], kind: str) -> Columns:
    if not columns:
        return None
    system = {"system": columns["system"]} if "system" in columns else {}
    if kind == "text":
        return {"format": "text", "columns": {"text": columns.get("prompt", "text")}}
    is_sharegpt = entry.get("formatting") == "sharegpt"
    if entry.get("ranking"):
        asked = columns.get("messages", "conversations") if is_sharegpt else columns.get("prompt", "instruction")
        more = {"input": columns["query"]} if "query" in columns else {}
        answers = {name: columns.get(name, name) for name in ("chosen", "rejected")}
        return {"format": "preference_pairs", "columns": {"prompt": asked} | answers | more | system}
    if is_sharegpt:
        messages = columns.get("messages", "conversations")
        if messages in _CONVERSATIONS:
            return None
        tools = {"tools": columns["tools"]} if "tools" in columns else {}
        return {"format": "sharegpt", "columns": {"conversations": messages} | tools | system}
    ours = {ours: columns[theirs] for theirs, ours in _OTHER_NAMES.items() if theirs in columns}
    return {"format": "instruction", "columns": {"instruction": "instruction", "output": "output"} | ours}


def _one(entries: Sequence[Any], option: str) -> Any:
    if len(entries) != 1:
        text = f"It names {len(entries)} data sets. Put their rows into one file and give it by {option}."
        raise Failure(text, ExitCode.REFUSED)
    return entries[0]


def _file(folder: Path, entry: object, option: str) -> Path:
    name = entry
    if isinstance(entry, dict):
        name = entry.get("path")
        if files := entry.get("data_files"):
            file = str(_one(files if isinstance(files, list) else [files], option))
            inside = placed(folder, str(name or "")) / file
            name = file if name in (None, *_LOADERS) or not inside.is_file() else str(inside.absolute())
    path = placed(folder, str(name))
    if not path.is_file():
        text = f"The data set {str(name)[:200]!r} is no file on this machine. Download it and give it by {option}."
        raise Failure(text, ExitCode.NOT_FOUND)
    return path


def _columns(entry: Mapping[Any, Any]) -> Columns:
    """Return the columns that a data set of Axolotl names."""
    kind, messages = entry.get("type"), entry.get("field_messages")
    if messages and (entry.get("field_chosen") or entry.get("field_rejected")):
        answers = {name: entry.get(f"field_{name}") or name for name in ("chosen", "rejected")}
        return {"format": "preference_pairs", "columns": {"prompt": messages} | answers}
    if isinstance(kind, dict):
        names = {name.removeprefix("field_"): column for name, column in kind.items() if name.startswith("field_")}
        columns = {"instruction": "instruction", "input": "input", "output": "output"} | {
            name: column for name, column in names.items() if name in ("instruction", "input", "output", "system")
        }
        return {"format": "instruction", "columns": columns}
    if row_type(entry) in _TEXT_TYPES and (field := entry.get("field", entry.get("text_column"))):
        return {"format": "text", "columns": {"text": field}}
    if messages is None or messages in _CONVERSATIONS or entry.get("field_chosen"):
        return None
    return {"format": "sharegpt", "columns": {"conversations": messages}}
