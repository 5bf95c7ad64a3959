"""Pools, workers and jobs ready to be claimed, and an adapter's files as a trainer uploads them."""

import hashlib
import json
import struct
from typing import Any

import msgspec

from apps.accounts.models import Organization, default_project_id, home_region
from apps.catalog.models import BaseModel, GpuType
from apps.catalog.operations import set_price
from apps.contracts import worker_api as wire
from apps.contracts.adapter_files import base_reference, expected_tensors
from apps.contracts.hyperparameters import Hyperparameters
from apps.contracts.runs import Manifest, ManifestFile
from apps.core.database.clock import db_now
from apps.core.ids import new_id
from apps.core.objects.store import object_key, store
from apps.datasets.models import Dataset, DatasetVersion, TokenCount
from apps.finetuning.jobs.creation import create_job
from apps.finetuning.jobs.requests import JobRequest
from apps.finetuning.models import Checkpoint, FineTuningJob, GpuPool, Run, RunUpload, Worker
from apps.finetuning.pools.operations import record_probe
from apps.finetuning.runs.leases import sha256_hex
from tests.factories.catalog import make_base_model
from tests.factories.money import give_credit

GIB = 2**30
PRICE_NANO_PER_HOUR = 3_600_000_000  # $3.60 an hour: one milli-dollar a second
CREDENTIAL = "annw_test-credential"


def make_pool(name: str = "local-cpu", *, memory_bytes: int = 8 * GIB) -> GpuPool:
    gpu_type, _ = GpuType.objects.get_or_create(key="cpu", defaults={"name": "CPU", "memory_bytes": memory_bytes})
    place = {"region_id": home_region(), "memory_bytes": memory_bytes}
    pool = GpuPool.objects.create(name=name, gpu_type=gpu_type, **place)
    set_price(
        sku=f"training:{name}", unit="gpu_ms", price_nano=PRICE_NANO_PER_HOUR, per=3_600_000, by="system", now=db_now()
    )
    return pool


def find_pool() -> GpuPool | None:
    """Return the pool that another test has made: all tests of the gateway share their rows."""
    return GpuPool.objects.filter(name="local-cpu").first()


def make_worker(
    pool: GpuPool, *, credential: str = CREDENTIAL, base_model: BaseModel | None = None, gpus: int = 1
) -> Worker:
    gpu = {"key": pool.gpu_type_id, "name": "one", "memory_bytes": pool.memory_bytes}
    worker = Worker.objects.create(
        pool=pool,
        hostname="here",
        credential_sha256=sha256_hex(credential),
        last_seen_at=db_now(),
        gpus=[gpu] * gpus,
    )
    if base_model is not None:
        for method in ("lora", "qlora"):
            report = probe_report(base_model, method)
            record_probe(worker=worker, base_model=base_model, method=method, report=msgspec.to_builtins(report))
    return worker


def probe_report(base_model: BaseModel, method: str = "lora") -> wire.ProbeReport:
    return wire.ProbeReport(
        base_model_id=base_model.pk,
        method=method,
        gpu_key="cpu",
        micro_batch_size=16,
        sequence_length=32,
        lora_rank=16,
        threads=2,
        tokens_per_second=4000.0,
        tokens_per_second_low=3800.0,
        tokens_per_second_high=4200.0,
        seconds_per_micro_step=0.128,
        peak_memory_bytes=GIB,
        startup_seconds=3.0,
    )


def make_training_file(organization: Organization, base_model: BaseModel, *, rows: int = 100) -> DatasetVersion:
    """A validated file with its tokens counted."""
    row = {"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]}
    body = (json.dumps(row) + "\n").encode() * rows
    key = object_key(organization.pk, "datasets", new_id("file", "-"), "data.jsonl")
    stored = store().put_stream(key, [body])
    dataset = Dataset.objects.create(
        organization=organization, project_id=default_project_id(organization), name=new_id("rows"), created_by="system"
    )
    version = DatasetVersion.objects.create(
        organization=organization,
        dataset=dataset,
        number=1,
        filename="rows.jsonl",
        object_key=key,
        bytes=stored.bytes,
        sha256=stored.sha256,
        rows=rows,
        kind="chat",
        created_by="system",
    )
    DatasetVersion.objects.filter(pk=version.pk).update(status="validating")
    DatasetVersion.objects.filter(pk=version.pk).update(status="ready")
    TokenCount.objects.create(
        organization=organization,
        version=version,
        base_model=base_model,
        chat_template_sha256=base_model.chat_template_sha256,
        tokens=rows * 20,
        trained_tokens=rows * 5,
        longest_row_tokens=20,
        histogram=[[20, rows]],
        starts=[[16, 16, rows]],
    )
    version.refresh_from_db()
    return version


def make_job(organization: Organization, base_model: BaseModel, *, rows: int = 100, **request: Any) -> FineTuningJob:
    """A queued job of an organization that can pay; its pool has a live, measured worker."""
    version = make_training_file(organization, base_model, rows=rows)
    asked = JobRequest(base_model=base_model.name, training_file=version.pk, **request)
    return create_job(organization=organization, request=asked, by="key_test", now=db_now())


def make_checkpoint(organization: Organization, base_model: BaseModel, *, step: int) -> Checkpoint:
    """A checkpoint of a job that does not run; its files do not exist."""
    job = FineTuningJob.objects.create(
        organization=organization,
        project_id=default_project_id(organization),
        base_model=base_model,
        training_file=make_training_file(organization, base_model),
        suffix="bot",
        method="lora",
        hyperparameters=msgspec.to_builtins(Hyperparameters()),
        seed=1,
        created_by="key_test",
    )
    pool = find_pool() or make_pool()
    run = Run.objects.create(organization=organization, job=job, attempt=1, pool=pool)
    upload = RunUpload.objects.create(
        organization=organization, run=run, kind="checkpoint", manifest={"files": []}, manifest_sha256="0" * 64
    )
    return Checkpoint.objects.create(organization=organization, job=job, run=run, upload=upload, step=step, bytes=1)


class TrainingSetup:
    """A platform with one pool, one worker and one base model, and an organization with credit.

    The worker takes several runs at once.
    """

    def __init__(self, organization: Organization) -> None:
        self.organization = organization
        self.base_model = make_base_model()
        self.pool = find_pool() or make_pool()
        self.worker = make_worker(self.pool, base_model=self.base_model, gpus=4)
        give_credit(organization)

    def job(self, **request: Any) -> FineTuningJob:
        return make_job(self.organization, self.base_model, **request)


# --- what a trainer uploads -------------------------------------------------------------------------------------


def checkpoint_files() -> dict[str, bytes]:
    return {"optimizer.pt": b"state", "adapter_model.safetensors": b"weights"}


def adapter_files(base_model: BaseModel, *, rank: int = 16) -> dict[str, bytes]:
    """A whole adapter of zeros whose names and shapes are those the base model asks for."""
    targets = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    header: dict[str, Any] = {}
    offset = 0
    for name, shape in expected_tensors(base_model.config, rank=rank, target_modules=targets).items():
        size = 2 * shape[0] * shape[1]
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 32,
        "lora_dropout": 0.05,
        "target_modules": list(targets),
        "bias": "none",
        "base_model_name_or_path": base_reference(repo=base_model.repo, name=base_model.name),
    }
    return {
        "adapter_model.safetensors": struct.pack("<Q", len(head)) + head + bytes(offset),
        "adapter_config.json": json.dumps(config).encode(),
    }


def model_files() -> dict[str, bytes]:
    """A whole model as merging leaves it: of one tensor."""
    header = json.dumps({"a": {"dtype": "BF16", "shape": [1], "data_offsets": [0, 2]}}).encode()
    weights = struct.pack("<Q", len(header)) + header + b"ab"
    return {"config.json": b'{"model_type":"qwen3"}', "model.safetensors": weights, "tokenizer.json": b"{}"}


def manifest_of(kind: str, run_id: str, attempt: int, step: int, files: dict[str, bytes]) -> Manifest:
    return Manifest(
        kind=kind,
        run_id=run_id,
        attempt=attempt,
        step=step,
        files=tuple(
            ManifestFile(name=name, sha256=hashlib.sha256(body).hexdigest(), bytes=len(body))
            for name, body in files.items()
        ),
    )
