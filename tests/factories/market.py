"""A platform with pools of real cards and a model of ordinary size, for what a table of one CPU cannot show."""

from pathlib import Path

import msgspec

from apps.accounts.models import Organization, Region
from apps.catalog.models import BaseModel, GpuType
from apps.catalog.operations import set_price
from apps.core.database.clock import db_now
from apps.datasets.models import DatasetVersion, TokenCount
from apps.finetuning.models import GpuPool, Worker
from apps.finetuning.runs.leases import sha256_hex
from tests.factories.catalog import make_base_model
from tests.factories.finetuning import give_credit, make_training_file

DATA = Path(__file__).resolve().parents[2] / "apps/catalog/data"
# GPU type, price of an hour in dollars, region, GPUs of a worker (0: no worker is online).
POOLS = (
    ("h100-sxm-80", 2.69, "us-east", 1),
    ("b200-sxm-180", 5.49, "us-west", 1),
    ("h200-sxm-141", 3.49, "us-east", 8),
    ("a100-sxm-80", 1.49, "eu-north", 1),
    ("l40s-48", 1.10, "us-east", 1),
    ("l4-24", 0.55, "us-east", 1),
)
# The report of a worker that may train with others, on any base model.
MACHINE_OFFER = {"address": "10.0.0.1", "port": 29_500, "free_gpus": None, "base_models": None}


class Market:
    """Six pools, one installed model of 14.8 billion parameters, and a file of 18,240 rows counted for it."""

    def __init__(self, organization: Organization, *, copies: int = 1) -> None:
        self.organization = organization
        self.base_model = make_installed_model("Qwen3-14B")
        self.pools = [make_gpu_pool(key, *facts, copy=copy) for copy in range(copies) for key, *facts in POOLS]
        self.version = make_counted_file(organization, self.base_model)
        give_credit(organization)

    @property
    def wizard(self) -> str:
        chosen = f"dataset={self.version.pk}&model={self.base_model.name}"
        return f"/jobs/new?{chosen}&method=lora&batch_size=32&max_length=4096"


def make_installed_model(name: str) -> BaseModel:
    """A model of the seeded table, with the demonstration's tokenizer in place of its own."""
    rows = msgspec.json.decode((DATA / "models.json").read_bytes())["models"]
    row = next(row for row in rows if row["name"] == name)
    model = make_base_model(name.lower())
    model.display_name, model.config, model.parameter_count = name, row, row["params_computed"]
    model.context_length, model.default_recipe = 8192, {}
    model.save()
    return model


def make_gpu_pool(key: str, usd_per_hour: float, region: str, gpus: int, *, copy: int = 0) -> GpuPool:
    rows = msgspec.json.decode((DATA / "gpus.json").read_bytes())["gpus"]
    row = next(row for row in rows if row["key"] == key)
    memory_bytes = int((row["usable_gib_observed"] or row["memory_gb_label"] * 0.95) * 2**30)
    gpu_type, _ = GpuType.objects.get_or_create(key=key, defaults={"name": row["name"], "memory_bytes": memory_bytes})
    name = key.split("-")[0] + (f"-{copy}" if copy else "")
    place, _ = Region.objects.get_or_create(name=region)
    pool = GpuPool.objects.create(name=name, gpu_type=gpu_type, memory_bytes=memory_bytes, region=place)
    price_nano = round(usd_per_hour * 1e9)
    set_price(sku=f"training:{name}", unit="gpu_ms", price_nano=price_nano, per=3_600_000, by="system", now=db_now())
    if gpus:
        card = {"key": key, "name": row["name"], "memory_bytes": memory_bytes}
        Worker.objects.create(
            pool=pool, hostname=name, credential_sha256=sha256_hex(name), last_seen_at=db_now(), gpus=[card] * gpus
        )
    return pool


def join_machines(pool: str = "h200") -> None:
    """Make the pool two machines with four GPUs each that reach each other."""
    first = Worker.objects.get(pool__name=pool)
    Worker.objects.create(
        pool=first.pool, hostname="two", credential_sha256=sha256_hex("two"), last_seen_at=db_now(), gpus=first.gpus
    )
    Worker.objects.filter(pool=first.pool).update(gpus=first.gpus[:4], offer=MACHINE_OFFER)


def make_counted_file(organization: Organization, base_model: BaseModel) -> DatasetVersion:
    version = make_training_file(organization, base_model, rows=100)
    DatasetVersion.objects.filter(pk=version.pk).update(rows=18_240)
    TokenCount.objects.filter(version=version).update(
        tokens=9_420_000,
        trained_tokens=4_100_000,
        longest_row_tokens=4_096,
        histogram=[[256, 6_000], [512, 7_000], [1_024, 3_800], [2_048, 1_200], [4_096, 240]],
        starts=[[16, 128, 18_240]],
    )
    return DatasetVersion.objects.get(pk=version.pk)
