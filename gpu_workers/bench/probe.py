"""`python -m gpu_workers.bench.probe SPEC.json WORK_DIR`: time the real training loop for some seconds.

The loop is the trainer's own, on made-up rows of one length, so a figure measured here holds for a job. The model is an
installed one, or one of a given shape with made-up weights. The program reads the hub token from standard input, like
the training child, and writes probe.json.
"""

import contextlib
import itertools
import json
import math
import statistics
import sys
import time
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from transformers import AutoConfig, TrainerCallback, TrainerControl, TrainerState, TrainingArguments, set_seed

from apps.contracts.adapter_files import adapted_modules
from apps.contracts.chat import RenderedRow
from apps.contracts.hyperparameters import Hyperparameters, Method
from apps.contracts.runs import BaseModelRef, DatasetRef, RunSpec
from apps.contracts.worker_api import PROBE_TRAINED_SHARE, ProbeReport, ProbeRequest
from gpu_workers.bench import made_up
from gpu_workers.common.events import EVENTS_FILE, EventWriter
from gpu_workers.common.files import replace_file
from gpu_workers.common.preflight import inspect_machine
from gpu_workers.common.pulse import open_pulse
from gpu_workers.train.data.encoding import Encoded
from gpu_workers.train.loop.base_trainer import RunTrainer
from gpu_workers.train.loop.callbacks import StopFlag
from gpu_workers.train.loop.sft import build_trainer
from gpu_workers.train.model.attention import attention_of
from gpu_workers.train.model.base_model import fetch_base_model
from gpu_workers.train.model.hardware import choose_engine, detect
from gpu_workers.train.model.loading import adapt, load_model
from gpu_workers.train.model.memory import peak_allocated_bytes, peak_memory_bytes
from gpu_workers.trainer.idle.probes import PROBE_FILE

WARM_UP_STEPS = 8  # the number of batches: each shape has been seen
QUIET_SHARE = 0.02
REPEATS = 5
MIN_REPEATS = 3
_BATCHES = 8
_MAX_STEPS = 4_000
_LENGTH_SPREAD = 0.75  # of the mean length; as many rows are longer as are shorter


class Window(NamedTuple):
    """How long a loop is measured, in seconds: `measured` with at most QUIET_SHARE of waiting for a core.

    If other programs never leave that much time, the whole `longest` time counts, because their load is permanent.
    """

    measured: float
    longest: float


GPU_WINDOW = Window(measured=6.0, longest=20.0)
CPU_WINDOW = Window(measured=20.0, longest=40.0)  # a quiet CPU's speed over two seconds differs by up to a fifth


class StepEnd(NamedTuple):
    """The end of a step: `at` on the clock, and `waited`, the time when the process was ready but had no free core.

    Both are in seconds.
    """

    at: float
    waited: float
    tokens: float


class Stopwatch(TrainerCallback):
    """Records the end of each step, and ends the training once there are enough steps to measure the spread."""

    def __init__(self, window: Window) -> None:
        self.ends: list[StepEnd] = []
        self.trainer: RunTrainer
        self._window = window
        self._first = WARM_UP_STEPS - 1  # index of the end before the first step that counts
        self._latest = self._first  # the same of the shortest measurement that ends now

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        progress = self.trainer.progress
        tokens = (progress.tokens or 0) + float(progress.window.n_tokens)
        if self.add(StepEnd(time.perf_counter(), _seconds_waited(), tokens)):
            control.should_training_stop = True

    def add(self, end: StepEnd) -> bool:
        """Record the end of a step; return whether the measurement is over."""
        self.ends.append(end)
        if not self._has_enough_after(self._first):
            return False
        while self._has_enough_after(self._latest + 1):
            self._latest += 1
        since = self.ends[self._latest]
        if end.waited - since.waited <= QUIET_SHARE * (end.at - since.at):
            self._first = self._latest
            return True
        return end.at - self.ends[self._first].at >= self._window.longest

    def _has_enough_after(self, index: int) -> bool:
        steps = len(self.ends) - 1 - index
        return steps > MIN_REPEATS and self.ends[-1].at - self.ends[index].at >= self._window.measured

    def steps(self) -> list[StepEnd]:
        """Return the duration of each measured step."""
        pairs = itertools.pairwise(self.ends[self._first :])
        return [StepEnd(b.at - a.at, b.waited - a.waited, b.tokens - a.tokens) for a, b in pairs]


def main(spec_path: Path, work_dir: Path) -> int:
    """Measure and write the report; return the exit code."""
    torch.set_num_interop_threads(1)
    request = msgspec.json.decode(spec_path.read_bytes(), type=ProbeRequest)
    secrets = msgspec.json.decode(sys.stdin.buffer.readline() or b"{}", type=dict[str, str | None])
    open_pulse(work_dir)
    report = measure(request, work_dir, hub_token=secrets.get("hub_token"))
    replace_file(work_dir / PROBE_FILE, msgspec.json.encode(report))
    return 0


def measure(request: ProbeRequest, work_dir: Path, *, hub_token: str | None) -> ProbeReport:
    spec = _run_spec(request)
    recipe = spec.hyperparameters
    set_seed(recipe.seed)
    watch = Stopwatch(GPU_WINDOW if torch.cuda.is_available() else CPU_WINDOW)
    if request.config is None:
        folder = fetch_base_model(request.base_model, hub_token=hub_token)
    else:
        folder = made_up.write_folder(work_dir / "shape", request.config)
    modules = adapted_modules(json.loads((folder / "config.json").read_bytes()))
    recipe = msgspec.structs.replace(recipe, target_modules=modules)
    spec = msgspec.structs.replace(spec, hyperparameters=recipe)
    engine = choose_engine(detect(), recipe, attention=attention_of(folder))
    if request.config is None:
        model = load_model(folder, recipe, engine=engine)
    else:
        model = adapt(made_up.build_base(folder, method=recipe.method, engine=engine), recipe, engine)
    with contextlib.closing(EventWriter(work_dir / EVENTS_FILE)) as events:
        trainer = build_trainer(
            model=model,
            folder=folder,
            training=_made_up_rows(folder, request),
            validation=None,
            spec=spec,
            work_dir=work_dir,
            events=events,
            stop=StopFlag(),
            engine=engine,
        )
        watch.trainer = trainer
        trainer.add_callback(watch)
        startup_seconds = _seconds_since_start()
        trainer.train()
    return _report(request, watch.steps(), startup_seconds, work_dir)


def _report(request: ProbeRequest, steps: list[StepEnd], startup_seconds: float, work_dir: Path) -> ProbeReport:
    """Return the report. Waiting for a core is temporary, so it affects only the lowest speed, not the speed."""
    table = np.array(steps)
    repeats = np.array_split(table, min(REPEATS, len(steps)))
    rates = sorted(float(part[:, 2].sum() / (part[:, 0] - part[:, 1]).sum()) for part in repeats)
    seconds, waited, tokens = table.sum(axis=0)
    return ProbeReport(
        base_model_id=request.base_model.id,
        method=request.method,
        gpu_key="",  # the agent knows the machine
        micro_batch_size=request.micro_batch_size,
        sequence_length=request.sequence_length,
        lora_rank=request.lora_rank,
        threads=torch.get_num_threads(),
        tokens_per_second=statistics.median(rates),
        tokens_per_second_low=min(rates[0], float(tokens / seconds)),
        tokens_per_second_high=rates[-1],
        seconds_per_micro_step=float(np.median(table[:, 0] - table[:, 1])),
        waited_share=float(waited / seconds),
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
    """Return rows whose lengths vary like a customer's around the requested mean; for a shape, rows of equal length."""
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False).get_text_config()
    length, count = request.sequence_length, request.micro_batch_size * _BATCHES
    random = np.random.default_rng(0)
    lengths = np.full(count, length)
    if not request.shape:
        room = getattr(config, "max_position_embeddings", 2 * length) - length
        spread = random.integers(0, min(int(length * _LENGTH_SPREAD), room), count // 2, endpoint=True)
        lengths[: 2 * len(spread)] += np.concatenate([spread, -spread])
    rows = [
        RenderedRow(
            text="",
            spans=(),
            token_ids=random.integers(0, config.vocab_size, n).tolist(),
            trained=((math.ceil(n * (1 - PROBE_TRAINED_SHARE)), n),),
        )
        for n in lengths.tolist()
    ]
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
            max_length=2 * request.sequence_length,
            lora_rank=request.lora_rank,
            lora_alpha=2 * request.lora_rank,
            lora_dropout=0.0,
            gradient_checkpointing=request.gradient_checkpointing,
        ),
    )


def _processor_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def _seconds_waited() -> float:
    """Return how long this thread was ready to run while its core ran something else (proc_pid_schedstat(5))."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9


def _seconds_since_start() -> float:
    """Return the seconds since this process began, interpreter start and imports included."""
    started_ticks = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    return uptime - started_ticks / 100


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
