"""The catalog's own seed files, read once; a small job and a probe of its pool."""

from pathlib import Path

import msgspec
import pytest

from apps.estimates.models.architectures import Architecture
from apps.estimates.physics import gpus
from apps.estimates.physics.gpus import Gpu
from apps.estimates.physics.throughput import ProbeRow, SpeedSource
from apps.estimates.published import sources
from apps.estimates.requests import QuoteRequest

DATA = Path(__file__).resolve().parents[3] / "apps" / "catalog" / "data"


@pytest.fixture(scope="session")
def catalog_rows() -> list[dict]:
    return msgspec.json.decode((DATA / "models.json").read_bytes())["models"]


@pytest.fixture(scope="session")
def models() -> dict[str, Architecture]:
    return sources.load_architectures(DATA)


@pytest.fixture(scope="session")
def gpu_types() -> dict[str, Gpu]:
    return gpus.load(DATA / "gpus.json")


@pytest.fixture(scope="session")
def published_speeds() -> tuple[ProbeRow, ...]:
    return sources.load(DATA)


@pytest.fixture
def small(models):
    return models["SmolLM2-135M"]


@pytest.fixture
def probe(small):
    return ProbeRow(
        gpu_key="cpu",
        architecture=small,
        method="lora",
        tokens_per_second=500.0,
        tokens_per_second_low=480.0,
        tokens_per_second_high=520.0,
        tokens_per_micro_step=1024,
        sequence_length=64,
        trained_share=10_000 / 64_000,  # as in `ask`
        source=SpeedSource(kind="probe", text="Probe of this pool", measured_at="2026-01-01T00:00:00Z"),
    )


@pytest.fixture
def ask(small):
    def build(**changes):
        settings = {
            "architecture": small,
            "method": "lora",
            "max_length": 512,
            "batch_size": 16,
            "epochs": 3,
            "rows": 1000,
            "tokens": 64_000,
            "trained_tokens": 10_000,
            "longest_row_tokens": 128,
            "checkpoints": 0,
        }
        return QuoteRequest(**(settings | changes))

    return build
