"""The catalog's own seed files, read once."""

from pathlib import Path

import msgspec
import pytest

from apps.estimates import gpus, published
from apps.estimates.architectures import Architecture
from apps.estimates.gpus import Gpu
from apps.estimates.throughput import ProbeRow

DATA = Path(__file__).resolve().parents[3] / "apps" / "catalog" / "data"


@pytest.fixture(scope="session")
def catalog_rows() -> list[dict]:
    return msgspec.json.decode((DATA / "models.json").read_bytes())["models"]


@pytest.fixture(scope="session")
def models() -> dict[str, Architecture]:
    return published.load_architectures(DATA)


@pytest.fixture(scope="session")
def gpu_types() -> dict[str, Gpu]:
    return gpus.load(DATA / "gpus.json")


@pytest.fixture(scope="session")
def published_speeds() -> tuple[ProbeRow, ...]:
    return published.load(DATA)
