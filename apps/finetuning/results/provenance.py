"""The reproducibility file of an adapter version: its origin, and everything needed to train it again."""

import datetime

import msgspec
from django.utils.translation import gettext_noop

from apps.adapters.models import AdapterVersion
from apps.core.money import usd_decimal
from apps.datasets.models import DatasetVersion
from apps.finetuning.models import FineTuningJob
from apps.finetuning.recipes.stored_requests import stored_request

FORMAT = "anneal-reproducibility/1"
BUNDLE_FILE = "reproducibility.json"
_LABELS = {
    "loss": gettext_noop("Loss per token"),
    "token_accuracy": gettext_noop("Token accuracy"),
    "exact_match": gettext_noop("Exact match"),
    "string_check": gettext_noop("String check"),
    "regex": gettext_noop("Regular expression"),
    "json_schema": gettext_noop("Valid JSON"),
    "rouge_l": "ROUGE-L",
    "judge": gettext_noop("Judge's score"),
}


class Energy(msgspec.Struct, frozen=True, kw_only=True):
    """The energy of a job's training. `kwh` and `watts` are None if the hardware's power limit is unknown."""

    kwh: float | None
    watts: float | None
    method: str


def label_of(comparison_name: str) -> str:
    return _LABELS.get(comparison_name, comparison_name)


def reproducibility(*, job: FineTuningJob, version: AdapterVersion) -> dict[str, object]:
    """Return everything needed to train the same weights again, and the cost."""
    base, report = job.base_model, {name: value for name, value in version.report.items() if name != "worse"}
    return {
        "format": FORMAT,
        "job": job.pk,
        "model": version.model_name,
        "created_at": _iso(job.created_at),
        "finished_at": _iso(job.finished_at),
        "base_model": {
            "name": base.name,
            "repo": base.repo or None,
            "revision": base.revision or None,
            "licence": base.licence or None,
            "files_sha256": base.files_sha256,
            "chat_template_sha256": version.chat_template_sha256,
        },
        "training_file": _file(job.training_file),
        "validation_file": _file(job.validation_file) if job.validation_file else None,
        "start_from": msgspec.to_builtins(stored_request(job).start_from) or None,
        "recipe": job.hyperparameters,
        "seed": job.seed,
        "software": version.manifest.get("metadata", {}),
        "hardware": {
            "gpu_type": job.pool.gpu_type.name,
            "gpu_count": job.gpu_count,
            "node_count": job.node_count,
            "pool": job.pool.name,
        }
        if job.pool
        else {},
        "attempts": list(job.runs.order_by("attempt").values("attempt", "status", "durable_step", "billed_gpu_ms")),
        "result": {
            "manifest_sha256": version.manifest_sha256,
            "files": version.manifest["files"],
            "step": version.metrics.get("step"),
            "trained_tokens": job.trained_tokens,
        },
        "cost_usd": usd_decimal(job.cost_nano),
        "billed_gpu_seconds": job.billed_gpu_ms / 1000,
        "energy": msgspec.to_builtins(energy(job=job)),
        "evaluation": report or None,  # without rows: the file goes wherever the model does
        "parity": version.parity or None,
    }


def energy(*, job: FineTuningJob) -> Energy:
    """Return an upper estimate: the GPU's power limit over the billed time."""
    watts = job.pool.gpu_type.specification.get("tdp_w") if job.pool else None
    if watts is None:
        return Energy(kwh=None, watts=None, method="not estimated: the power of this hardware is not known")
    return Energy(
        kwh=round(watts * job.billed_gpu_ms / 3_600_000 / 1000, 6),
        watts=watts,
        method="power limit of the GPU x billed GPU time; host and cooling are not counted",
    )


def _file(version: DatasetVersion) -> dict[str, object]:
    return {
        "id": version.pk,
        "filename": version.filename,
        "sha256": version.sha256,
        "bytes": version.bytes,
        "rows": version.rows,
    }


def _iso(moment: datetime.datetime | None) -> str | None:
    return moment.isoformat() if moment else None
