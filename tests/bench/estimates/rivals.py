"""Other estimators, run from their own packages: canifinetune, ftuneai, accelerate's and DeepSpeed's estimates.

They live in an environment of their own (requirements/bench.lock), made on first use; those that need torch run in the
engines' environment with DeepSpeed's sources beside it. A rival that cannot be had is named, with the reason.
"""

import json
import os
import shutil
import subprocess
import tarfile
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from apps.estimates.models.names import plain_name
from apps.estimates.models.shapes import shape_of
from apps.estimates.published.predictions import Prepared

REPOSITORY = Path(__file__).resolve().parents[3]
FOLDER = REPOSITORY / ".anneal" / "bench-venv"
LOCK = REPOSITORY / "requirements" / "bench.lock"
ENGINES = REPOSITORY / ".venv-engines" / "bin" / "python"
_WORKER = Path(__file__).with_name("rivals_worker.py")
_SOURCE_ONLY = "deepspeed"  # its estimates are plain functions; building its operators needs a compiler and CUDA


def specification(prepared: Prepared) -> dict[str, Any]:
    """A row in plain words that every rival can be asked in."""
    job, plan, gpu = prepared.job, prepared.job.plan, prepared.gpu
    a = job.architecture  # as published: how one framework holds it is ours to know
    shape = shape_of(a, rank=plan.lora_rank, target_modules=plan.target_modules, use_dora=plan.use_dora)
    return {
        "id": job.id, "kind": job.kind, "method": plan.method, "model": plain_name(a.model_type),
        "family": a.model_type, "parameters": shape.total, "largest_layer": max(shape.layer, shape.head),
        "hidden_size": a.hidden_size, "n_layers": a.n_layers, "n_heads": a.n_heads, "n_kv_heads": a.n_kv_heads,
        "intermediate_size": a.intermediate_size, "vocab_size": a.vocab_size, "tied": a.tie_word_embeddings,
        "max_length": plan.max_length, "micro_batch_size": plan.micro_batch_size,
        "is_all_linear": shape.adapter_modules == shape.active_modules,
        "modules": shape.adapter_modules // max(1, shape.n_layers), "lora_rank": plan.lora_rank,
        "checkpointing": plan.gradient_checkpointing, "optimizer": plan.optimizer, "gpu_count": plan.gpu_count,
        "parallelism": plan.parallelism, "is_deepspeed": plan.is_deepspeed, "offload": plan.cpu_offload,
        "attention": plan.attention, "quantization": plan.quantization, "dora": plan.use_dora,
        "trains_embeddings": plan.trains_embeddings, "gpu": gpu.name,
        "gpu_gib": max(gpu.memory_bytes / 2**30, 8.0), "tflops": (gpu.bf16_flops or 0.0) / 1e12,
        "bandwidth_gb": (gpu.memory_bandwidth_bytes_per_second or 0) / 1e9,
    }  # fmt: skip


def ask(prepared: Sequence[Prepared]) -> tuple[dict[str, dict[str, float]], list[str]]:
    """Predictions by rival and row id, in bytes or seconds per token, and notes on what could not be run."""
    lines = "\n".join(json.dumps(specification(each)) for each in prepared)
    answers: dict[str, dict[str, float]] = {}
    notes: list[str] = []
    folder = _environment(notes)
    if folder is not None:
        _run(folder / "bin" / "python", ("canifinetune", "ftuneai"), lines, answers, notes, path=())
    if ENGINES.exists():
        paths = (str(folder / "source"), *_site_packages(folder)) if folder is not None else ()
        _run(ENGINES, ("accelerate", "deepspeed"), lines, answers, notes, path=paths)
    else:
        notes.append("accelerate, deepspeed: no .venv-engines here (make setup)")
    return answers, notes


def _run(
    python: Path, names: Sequence[str], lines: str, answers: dict[str, dict[str, float]], notes: list[str], *,
    path: Sequence[str],
) -> None:  # fmt: skip
    for name in names:
        environment = dict(os.environ) | {"PYTHONPATH": os.pathsep.join(path), "DS_ACCELERATOR": "cpu"}
        done = subprocess.run(
            [str(python), str(_WORKER), name], input=lines, capture_output=True, text=True, env=environment, check=False
        )
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            notes.append(f"{name}: could not be run: {last}")
            continue
        for line in done.stdout.splitlines():
            if line.startswith("{"):
                answer = json.loads(line)
                answers.setdefault(answer["rival"], {})[answer["id"]] = answer["value"]


def _environment(notes: list[str]) -> Path | None:
    """Install the lock once; DeepSpeed's sources are unpacked, not built."""
    stamp = FOLDER / "lock.txt"
    if stamp.exists() and stamp.read_text() == LOCK.read_text():
        return FOLDER
    shutil.rmtree(FOLDER, ignore_errors=True)
    venv.create(FOLDER, with_pip=True)
    pip = [str(FOLDER / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--quiet"]
    wanted, source = FOLDER / "wanted.txt", FOLDER / "source.txt"
    for path, is_source in ((wanted, False), (source, True)):
        lines = LOCK.read_text().splitlines(keepends=True)
        path.write_text("".join(line for line in lines if line.startswith(_SOURCE_ONLY) is is_source))
    options = ["--no-deps", "--require-hashes", "-r"]
    installed = subprocess.run([*pip, "install", *options, str(wanted)], capture_output=True, text=True, check=False)
    if installed.returncode:
        notes.append(f"canifinetune, ftuneai: not installed: {installed.stderr.strip().splitlines()[-1]}")
        return None
    got = subprocess.run(
        [*pip, "download", "--no-binary", _SOURCE_ONLY, *options, str(source), "--dest", str(FOLDER / "download")],
        capture_output=True, text=True, check=False, env=dict(os.environ) | {"DS_BUILD_OPS": "0"},
    )  # fmt: skip
    if got.returncode:
        notes.append(f"deepspeed: sources not downloaded: {(got.stderr.strip().splitlines() or ['?'])[-1]}")
    for archive in (FOLDER / "download").glob("*.tar.gz"):
        with tarfile.open(archive) as files:
            files.extractall(FOLDER / "download", filter="data")
        shutil.move(str(archive).removesuffix(".tar.gz"), FOLDER / "source")
    stamp.write_text(LOCK.read_text())
    return FOLDER


def _site_packages(folder: Path) -> tuple[str, ...]:
    return tuple(str(path) for path in (folder / "lib").glob("python*/site-packages"))
