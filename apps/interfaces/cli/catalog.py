"""The tables that come with the repository: models, GPUs, and default prices of a GPU-hour."""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from apps.estimates.errors import EstimateError
from apps.estimates.models import architectures
from apps.estimates.models.architectures import Architecture
from apps.estimates.physics import gpus
from apps.estimates.physics.gpus import Gpu
from apps.estimates.physics.throughput import ProbeRow
from apps.estimates.published import sources
from apps.interfaces.cli.errors import BadOption, near_names

_DATA = Path(__file__).resolve().parents[2] / "catalog" / "data"
ALL = "all"


@dataclass(frozen=True, kw_only=True)
class Model:
    """A decoder model to train, named in the table or read from a file."""

    name: str
    architecture: Architecture


@dataclass(frozen=True, kw_only=True)
class HourlyPrice:
    """The dollars for an hour of one GPU, and their source."""

    usd_per_hour: float
    origin: str


class _PublishedPrice(msgspec.Struct):
    kind: str
    usd_per_gpu_hour: float | None


class _GpuRow(msgspec.Struct):
    key: str
    prices: tuple[_PublishedPrice, ...] = ()


class _GpuTable(msgspec.Struct):
    gpus: tuple[_GpuRow, ...]


def find_model(name: str) -> Model:
    """Return a model of the table, or of a config.json file or its folder. Raises BadOption."""
    rows = _models()
    found = rows.get(name.lower()) or rows.get(name.rpartition("/")[2].lower())
    if found:
        return Model(name=found["name"], architecture=architectures.from_catalog_row(found))
    path = Path(name)
    if path.is_dir():
        path = path / "config.json"
    if path.is_file():
        return Model(name=name, architecture=_from_file(path))
    if path.suffix == ".json" or name.startswith((".", "/", "~")):
        raise BadOption("--model", f"no file {name!r}")
    near = near_names(name, (row["name"] for row in rows.values()))
    raise BadOption("--model", f"{name!r} is neither a model of the table nor a config.json", near=near)


def find_gpus(name: str) -> list[Gpu]:
    """Return the GPU type with this key, the table's first whose key begins so, or all. Raises BadOption."""
    types, keys = gpu_types(), matching(name)
    if keys:
        return [types[key] for key in (keys if name.lower() == ALL else keys[:1])]
    raise BadOption("--gpu", f"{name!r} is not a GPU of the table; --gpu all lists them", near=near_names(name, types))


def matching(name: str) -> list[str]:
    """Return the keys that a name may mean, with the chosen one first."""
    wanted = name.lower().replace("_", "-").replace(" ", "-")
    keys = list(gpu_types())
    if wanted in keys:
        return [wanted]
    return keys if wanted == ALL else [key for key in keys if key.startswith(f"{wanted}-")]


def list_price(gpu: Gpu) -> HourlyPrice | None:
    """Return the median published on-demand price of a GPU type; return None if no price is published."""
    prices = [
        each.usd_per_gpu_hour
        for each in _published_prices()[gpu.key]
        if each.kind == "on_demand" and each.usd_per_gpu_hour
    ]
    if not prices:
        return None
    text = f"median of {len(prices)} published on-demand prices" if len(prices) > 1 else "a published on-demand price"
    return HourlyPrice(usd_per_hour=statistics.median(prices), origin=text)


@cache
def gpu_types() -> dict[str, Gpu]:
    return gpus.load(_DATA / "gpus.json")


@cache
def published_speeds() -> tuple[ProbeRow, ...]:
    return sources.load(_DATA)


@cache
def _published_prices() -> dict[str, tuple[_PublishedPrice, ...]]:
    table = msgspec.json.decode((_DATA / "gpus.json").read_bytes(), type=_GpuTable)
    return {row.key: row.prices for row in table.gpus}


@cache
def _models() -> dict[str, Mapping[str, Any]]:
    """Return the table's rows by lower-case name, and by the last part of their repository's name."""
    rows = msgspec.json.decode((_DATA / "models.json").read_bytes())["models"]
    by_repo = {row["hf_repo"].rpartition("/")[2].lower(): row for row in rows if row.get("hf_repo")}
    return by_repo | {row["name"].lower(): row for row in rows}


def _from_file(path: Path) -> Architecture:
    try:
        config = msgspec.json.decode(path.read_bytes())
    except (msgspec.DecodeError, UnicodeDecodeError, OSError) as error:
        raise BadOption("--model", f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(config, dict):
        raise BadOption("--model", f"{path} holds no JSON object")
    try:
        return architectures.from_config(config)
    except EstimateError as error:
        raise BadOption("--model", f"{path}: {error.field}: {error}") from error
