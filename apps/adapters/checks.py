"""Checks of uploaded files by names, headers and configurations. No tensor is loaded here."""

from collections.abc import Mapping
from typing import Any

from apps.catalog.models import BaseModel
from apps.contracts.adapter_files import (
    AdapterFileError,
    Problem,
    base_reference,
    check_adapter,
    check_origin,
    check_unserved_config,
    header_of,
    parse_config,
)
from apps.contracts.result_files import MODEL_CONFIG, problem_of_config, problem_of_start, unexpected
from apps.core.objects.store import read_object, store

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def problems_of(
    *, object_prefix: str, manifest: dict[str, Any], base_model: BaseModel, rank: int, target_modules: list[str]
) -> list[str]:
    """Return why the adapter cannot be served; empty when it can."""
    sizes = {file["name"]: file["bytes"] for file in manifest["files"]}
    if missing := {WEIGHTS, CONFIG} - set(sizes):
        return [f"{name} is missing" for name in sorted(missing)]
    try:
        config = parse_config(read_object(f"{object_prefix}/{CONFIG}"))
        with store().open_stream(f"{object_prefix}/{WEIGHTS}") as stream:
            header = header_of(stream, file_bytes=sizes[WEIGHTS])
    except AdapterFileError as error:
        return [str(error)]
    modules = config.get("target_modules")
    if config.get("r") != rank or not isinstance(modules, list) or set(map(str, modules)) != set(target_modules):
        return ["the adapter's rank or target modules are not those of the job"]
    found = check_adapter(header, config, base_model.config) + _check_origin(config, base_model)
    return [problem.message for problem in found]


def problems_of_files(*, object_prefix: str, manifest: dict[str, Any], base_model: BaseModel) -> list[str]:
    """Return why the files cannot be delivered to a customer; empty when they can.

    For a whole model, or an adapter that no engine loads: file names, first bytes, no code, and no other base model.
    """
    kind, names = manifest["kind"], [file["name"] for file in manifest["files"]]
    if strange := unexpected(kind, names):
        return [f"no {kind} has a file named {name}" for name in strange]
    if not names:
        return ["there are no files"]
    found = [problem_of_start(name, _start(f"{object_prefix}/{name}")) for name in names]
    for name in {MODEL_CONFIG, "tokenizer_config.json"} & set(names):
        found.append(problem_of_config(name, read_object(f"{object_prefix}/{name}")))
    if CONFIG in names:
        found += _problems_of_unserved(f"{object_prefix}/{CONFIG}", base_model)
    return [problem for problem in found if problem]


def _problems_of_unserved(key: str, base_model: BaseModel) -> list[str]:
    try:
        config = parse_config(read_object(key))
    except AdapterFileError as error:
        return [str(error)]
    return [problem.message for problem in check_unserved_config(config) + _check_origin(config, base_model)]


def _check_origin(config: Mapping[str, Any], base_model: BaseModel) -> list[Problem]:
    base = base_reference(repo=base_model.repo, name=base_model.name)
    return check_origin(config, base=base, revision=base_model.revision)


def _start(key: str) -> bytes:
    with store().open_stream(key) as stream:
        return stream.read(9)
