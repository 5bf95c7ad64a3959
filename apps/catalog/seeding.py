"""The first content of the catalogue, from apps/catalog/data and the demo folder. Existing rows are not changed."""

import datetime
import json
import os
import re
from pathlib import Path

import msgspec
from django.db import transaction

from apps.catalog.models import BaseModel, GpuType
from apps.catalog.operations import UNKNOWN_CONTEXT_TOKENS, add_base_model, reinstall_base_model, set_price
from apps.catalog.queries import active_price, inference_sku
from apps.core.money import NANO_PER_CENT
from apps.estimates.physics import gpus

DATA = Path(__file__).resolve().parent / "data"
DEMO = Path(__file__).resolve().parents[2] / "demo"
DEMO_MODEL = "anneal-demo"
# The prices of a new installation until its operator sets them: enough to see money move, little enough for a demo.
_MILLION_INPUT_TOKENS_NANO = 10 * NANO_PER_CENT
_MILLION_OUTPUT_TOKENS_NANO = 20 * NANO_PER_CENT
_URL = re.compile(r"https?://\S+")


class SeededCatalog(msgspec.Struct, frozen=True, kw_only=True):
    """The number of new rows."""

    gpu_types: int
    base_models: int
    prices: int
    demo_model: str  # "installed" | "updated" | "unchanged" | "absent"


@transaction.atomic
def seed_catalog(*, by: str, now: datetime.datetime) -> SeededCatalog:
    """Add missing GPU types, base models and first prices; install or update the demo's model if its files exist."""
    return SeededCatalog(
        gpu_types=_seed_gpu_types(),
        base_models=_seed_base_models(),
        demo_model=_install_demo_model(by=by, now=now),
        prices=_seed_prices(by=by, now=now),
    )


def _seed_gpu_types() -> int:
    rows = json.loads((DATA / "gpus.json").read_bytes())["gpus"]
    cards = [_gpu_type(row) for row in rows]
    ram_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cards.append(GpuType(key="cpu", name="CPU", memory_bytes=ram_bytes, specification={"kind": "cpu"}))
    known = set(GpuType.objects.values_list("key", flat=True))
    return len(GpuType.objects.bulk_create([card for card in cards if card.key not in known]))


def _gpu_type(row: gpus.GpuRow) -> GpuType:
    gpu = gpus.from_row(row)
    source_url = next((match.group() for text in gpu.sources if (match := _URL.search(text))), "")
    return GpuType(
        key=gpu.key, name=gpu.name, memory_bytes=gpu.memory_bytes, specification=row, source_url=source_url[:400]
    )


def _seed_base_models() -> int:
    rows = json.loads((DATA / "models.json").read_bytes())["models"]
    known = set(BaseModel.objects.values_list("name", flat=True))
    new = [
        BaseModel(
            name=row["name"].lower(),
            display_name=row["name"],
            repo=row["hf_repo"],
            licence=row["license"],
            config=row,
            parameter_count=row["params_computed"],
            context_length=row["max_position_embeddings"] or UNKNOWN_CONTEXT_TOKENS,
            source_url=row["source_url"],
        )
        for row in rows
        if row["name"].lower() not in known
    ]
    _rename_licences({row["name"].lower(): row["license"] for row in rows})
    return len(BaseModel.objects.bulk_create(new))


def _rename_licences(named: dict[str, str]) -> None:
    """Update the licence names of rows from an older seed that no operator has changed or installed."""
    untouched = BaseModel.objects.filter(
        name__in=named, added_by="system", is_installed=False, install_requested_at=None
    )
    for base_model in untouched:
        if base_model.licence != named[base_model.name]:
            BaseModel.objects.filter(pk=base_model.pk).update(licence=named[base_model.name])


def _install_demo_model(*, by: str, now: datetime.datetime) -> str:
    folder = DEMO / "base_model"
    if not (folder / "model.safetensors").exists():
        return "absent"
    recipe = DEMO / "recipe.json"
    found = BaseModel.objects.filter(name=DEMO_MODEL, is_installed=True).first()
    if found:
        return "updated" if reinstall_base_model(base_model=found, by=by) else "unchanged"
    add_base_model(
        name=DEMO_MODEL,
        display_name="Anneal demo, 6M",
        path=folder,
        licence="Apache-2.0",
        default_recipe=json.loads(recipe.read_bytes()) if recipe.exists() else {},
        by=by,
        now=now,
    )
    return "installed"


def _seed_prices(*, by: str, now: datetime.datetime) -> int:
    wanted: dict[str, tuple[str, int, int]] = {}
    for model in BaseModel.objects.filter(is_installed=True, retired_at=None):
        wanted[inference_sku(model, direction="input")] = ("tokens", _MILLION_INPUT_TOKENS_NANO, 1_000_000)
        wanted[inference_sku(model, direction="output")] = ("tokens", _MILLION_OUTPUT_TOKENS_NANO, 1_000_000)
    missing = {sku: price for sku, price in wanted.items() if active_price(sku=sku) is None}
    for sku, (unit, price_nano, per) in missing.items():
        set_price(sku=sku, unit=unit, price_nano=price_nano, per=per, by=by, now=now)
    return len(missing)
