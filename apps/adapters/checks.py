"""Is an uploaded adapter what the base model can serve? Read from its headers; no tensor is loaded here."""

from typing import Any

from apps.catalog.models import BaseModel
from apps.contracts.adapter_files import (
    AdapterFileError,
    check_adapter,
    get_header_bytes,
    parse_config,
    parse_header,
)
from apps.core.object_store import read_object, store

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def problems_of(
    *, object_prefix: str, manifest: dict[str, Any], base_model: BaseModel, rank: int, target_modules: list[str]
) -> list[str]:
    """Return what keeps the adapter from being served, empty when nothing does."""
    sizes = {file["name"]: file["bytes"] for file in manifest["files"]}
    if missing := {WEIGHTS, CONFIG} - set(sizes):
        return [f"{name} is missing" for name in sorted(missing)]
    try:
        config = parse_config(read_object(f"{object_prefix}/{CONFIG}"))
        header = parse_header(_head(f"{object_prefix}/{WEIGHTS}"), file_bytes=sizes[WEIGHTS])
    except AdapterFileError as error:
        return [str(error)]
    if config.get("r") != rank or set(config.get("target_modules", [])) != set(target_modules):
        return ["the adapter's rank or target modules are not those of the job"]
    return [problem.message for problem in check_adapter(header, config, base_model.config)]


def _head(key: str) -> bytes:
    with store().open_stream(key) as stream:
        start = stream.read(8)
        return start + stream.read(get_header_bytes(start) - 8)
