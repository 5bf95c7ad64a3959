"""`python -m gpu_workers.bench.probe SPEC.json WORK_DIR`: time the real training loop for some seconds.

The loop is the trainer's own, on made-up rows of one length, so that a figure measured here holds for a job. The model
is an installed one, or one of a given shape with made-up weights. Reads the hub token from standard input like the
training child and writes probe.json.
"""

import itertools
import math
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from transformers import AutoConfig, TrainerCallback, TrainerControl, TrainerState, TrainingArguments, set_seed

from apps.contracts.chat import RenderedRow
from apps.contracts.runs import BaseModelRef, DatasetRef, Hyperparameters, Method, RunSpec
from apps.contracts.worker_api import ProbeReport, ProbeRequest
from gpu_workers.bench import made_up
from gpu_workers.events import EVENTS_FILE, EventWriter, replace_file
from gpu_workers.preflight import inspect_machine
from gpu_workers.probing import PROBE_FILE
from gpu_workers.train.attention import attention_of
from gpu_workers.train.callbacks import StopFlag
from gpu_workers.train.data import Encoded
from gpu_workers.train.hardware import choose_engine, detect
from gpu_workers.train.memory import peak_allocated_bytes, peak_memory_bytes
from gpu_workers.train.model import adapt, fetch_base_model, load_model
from gpu_workers.train.sft import build_trainer

WARM_UP_STEPS = 3
MEASURED_SECONDS = 6.0
REPEATS = 5
MIN_REPEATS = 3
_BATCHES = 8
_MAX_STEPS = 400
_TRAINED_SHARE = 0.5


class Stopwatch(TrainerCallback):
    """Notes when each step ended, and ends the training once there is enough to tell a spread."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.ends.append(time.perf_counter())
        measured = self.ends[WARM_UP_STEPS:]
        if len(measured) > MIN_REPEATS and measured[-1] - measured[0] >= MEASURED_SECONDS:
            control.should_training_stop = True

    def step_seconds(self) -> list[float]:
        return [later - earlier for earlier, later in itertools.pairwise(self.ends[WARM_UP_STEPS - 1 :])]


def main(spec_path: Path, work_dir: Path) -> int:
    """Measure and write the report; returns the exit code."""
    torch.set_num_interop_threads(1)
    request = msgspec.json.decode(spec_path.read_bytes(), type=ProbeRequest)
    secrets = msgspec.json.decode(sys.stdin.buffer.readline() or b"{}", type=dict[str, str | None])
    report = measure(request, work_dir, hub_token=secrets.get("hub_token"))
    replace_file(work_dir / PROBE_FILE, msgspec.json.encode(report))
    return 0


def measure(request: ProbeRequest, work_dir: Path, *, hub_token: str | None) -> ProbeReport:
    spec = _run_spec(request)
    recipe = spec.hyperparameters
    set_seed(recipe.seed)
    watch = Stopwatch()
    if request.config is None:
        folder = fetch_base_model(request.base_model, hub_token=hub_token)
    else:
        folder = made_up.write_folder(work_dir / "shape", request.config)
    engine = choose_engine(detect(), recipe, attention=attention_of(folder))
    if request.config is None:
        model = load_model(folder, recipe, engine=engine)
    else:
        model = adapt(made_up.build_base(folder, method=recipe.method, engine=engine), recipe, engine)
    trainer = build_trainer(
        model=model,
        folder=folder,
        training=_made_up_rows(folder, request),
        validation=None,
        spec=spec,
        work_dir=work_dir,
        events=EventWriter(work_dir / EVENTS_FILE),
        stop=StopFlag(),
        engine=engine,
    )
    trainer.add_callback(watch)
    startup_seconds = _seconds_since_start()
    trainer.train()
    return _report(request, watch.step_seconds(), startup_seconds, work_dir)


def _report(request: ProbeRequest, steps: list[float], startup_seconds: float, work_dir: Path) -> ProbeReport:
    tokens = request.micro_batch_size * request.sequence_length
    repeats = np.array_split(np.array(steps), min(REPEATS, len(steps)))
    rates = sorted(tokens * len(part) / float(part.sum()) for part in repeats)
    return ProbeReport(
        base_model_id=request.base_model.id,
        method=request.method,
        gpu_key="",  # the agent knows the machine
        micro_batch_size=request.micro_batch_size,
        sequence_length=request.sequence_length,
        lora_rank=request.lora_rank,
        threads=torch.get_num_threads(),
        tokens_per_second=statistics.median(rates),
        tokens_per_second_low=rates[0],
        tokens_per_second_high=rates[-1],
        seconds_per_micro_step=statistics.median(steps),
        peak_memory_bytes=peak_memory_bytes(),
        startup_seconds=startup_seconds,
        software=inspect_machine(work_dir).software,
        shape=request.shape,
        config=request.config,
        gradient_checkpointing=request.gradient_checkpointing,
        peak_allocated_bytes=peak_allocated_bytes(),
        device=torch.cuda.get_device_name() if torch.cuda.is_available() else _processor_name(),
        measured_steps=len(steps),
    )


def _made_up_rows(folder: Path, request: ProbeRequest) -> Encoded:
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    length = request.sequence_length
    tokens = np.random.default_rng(0).integers(
        0, config.get_text_config().vocab_size, (request.micro_batch_size * _BATCHES, length)
    )
    trained = ((math.ceil(length * (1 - _TRAINED_SHARE)), length),)
    rows = [RenderedRow(text="", spans=(), token_ids=row.tolist(), trained=trained) for row in tokens]
    return Encoded(rows, n_dropped=0, n_truncated=0)


def _run_spec(request: ProbeRequest) -> RunSpec:
    nothing = DatasetRef(id="", sha256="", bytes=0, rows=0, url="")
    return RunSpec(
        run_id="probe",
        job_id="probe",
        organization_id="",
        attempt=1,
        base_model=BaseModelRef(id=request.base_model.id, name=request.base_model.name),
        training=nothing,
        checkpoint_interval_seconds=10**9,
        hyperparameters=Hyperparameters(
            method=Method(request.method),
            epochs=_MAX_STEPS // _BATCHES,
            batch_size=request.micro_batch_size,
            max_length=request.sequence_length,
            lora_rank=request.lora_rank,
            lora_alpha=2 * request.lora_rank,
            lora_dropout=0.0,
            gradient_checkpointing=request.gradient_checkpointing,
        ),
    )


def _processor_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def _seconds_since_start() -> float:
    """Return how long ago this process began, interpreter and imports included."""
    started_ticks = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    return uptime - started_ticks / 100


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
