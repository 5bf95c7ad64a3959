"""Is an uploaded adapter what the base model can serve? Read from its headers; no tensor is loaded here."""

import json
from typing import Any

from apps.catalog.models import BaseModel
from apps.contracts.adapter_files import HEADER_LIMIT_BYTES, SafetensorsError, check_adapter, parse_header
from apps.core.object_store import read_object, store

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def problems_of(
    *, object_prefix: str, manifest: dict[str, Any], base_model: BaseModel, rank: int, target_modules: list[str]
) -> list[str]:
    """Return what keeps the adapter from being served, empty when nothing does."""
    sizes = {file["name"]: file["bytes"] for file in manifest["files"]}
    if missing := {WEIGHTS, CONFIG} - set(sizes):
        return [f"{name} is missing" for name in sorted(missing)]
    config = json.loads(read_object(f"{object_prefix}/{CONFIG}"))
    if config.get("r") != rank or set(config.get("target_modules", [])) != set(target_modules):
        return ["the adapter's rank or target modules are not those of the job"]
    with store().open_stream(f"{object_prefix}/{WEIGHTS}") as stream:
        head = stream.read(HEADER_LIMIT_BYTES + 8)
    try:
        header = parse_header(head, file_bytes=sizes[WEIGHTS])
    except SafetensorsError as error:
        return [str(error)]
    return [str(problem) for problem in check_adapter(header, config, base_model.config)]
