"""A training child without torch: the same files and outcomes as the real one, as the first argument says.

Of several behaviours, "hang,beat", the first attempt takes the first one, and so on.
"""

import os
import shutil
import signal
import sys
import time
from pathlib import Path

import msgspec

from apps.contracts.failures import FailureCode
from apps.contracts.runs import (
    Failed,
    LogLine,
    Manifest,
    Phase,
    PhaseChanged,
    RunSpec,
    StepCompleted,
    Stopped,
    TrainingStarted,
)
from gpu_workers.common.artifacts import folder_bytes, read_manifest, seal_folder
from gpu_workers.common.events import AdapterReady, CheckpointReady, EventWriter, write_outcome
from gpu_workers.common.pulse import beat, open_pulse

behaviours, spec_path, work_dir = sys.argv[1].split(","), Path(sys.argv[2]), Path(sys.argv[3])
spec = msgspec.json.decode(spec_path.read_bytes(), type=RunSpec)
behaviour = behaviours[(spec.attempt - 1) % len(behaviours)]
secrets = sys.stdin.readline()
events = EventWriter(work_dir / "events.jsonl")
is_stopping = False


def on_sigterm(*_: object) -> None:
    global is_stopping
    is_stopping = True


def seal(kind: str, folder: str, step: int) -> tuple[str, int]:
    temporary, final = work_dir / f"tmp-{kind}", work_dir / folder
    shutil.rmtree(temporary, ignore_errors=True)
    final.parent.mkdir(parents=True, exist_ok=True)
    temporary.mkdir()
    (temporary / "adapter_model.safetensors").write_bytes(f"weights at {step}".encode())
    (temporary / "adapter_config.json").write_text("{}")
    digest = seal_folder(
        temporary,
        final,
        lambda files: Manifest(kind=kind, run_id=spec.run_id, attempt=spec.attempt, step=step, files=files),
    )
    return digest, folder_bytes(read_manifest(final))


def checkpoint(step: int) -> None:
    folder = f"checkpoints/checkpoint-{step}"
    digest, size = seal("checkpoint", folder, step)
    events.write(
        CheckpointReady(
            sequence=0,
            step=step,
            folder=folder,
            manifest_sha256=digest,
            bytes=size,
            trained_tokens=step * 10,
            training_seconds=step / 10,
        )
    )


def step(number: int) -> None:
    events.write(
        StepCompleted(
            sequence=0,
            step=number,
            total_steps=20,
            epoch=number / 20,
            train_loss=1.0,
            learning_rate=1e-3,
            grad_norm=1.0,
            trained_tokens=number * 10,
            tokens_per_second=100.0,
            training_seconds=number / 10,
        )
    )


def finish(number: int) -> None:
    digest, size = seal("adapter", "adapter", number)
    write_outcome(
        work_dir,
        AdapterReady(
            folder="adapter",
            manifest_sha256=digest,
            bytes=size,
            step=number,
            training_seconds=number / 10,
            trained_tokens=number * 10,
        ),
    )


signal.signal(signal.SIGTERM, signal.SIG_IGN if behaviour == "stubborn" else on_sigterm)
events.write(PhaseChanged(sequence=0, phase=Phase.TRAINING))
events.write(TrainingStarted(sequence=0, total_steps=20, start_step=0, rows=1, trained_tokens_per_epoch=10))
(work_dir.parent.parent / "secrets").write_text(secrets + spec_path.read_text() + repr(dict(os.environ)))
if behaviour == "succeed":
    for number in range(1, 21):
        step(number)
        if number == 10:
            checkpoint(number)
    finish(20)
elif behaviour == "fail":
    step(1)
    write_outcome(work_dir, Failed(code=FailureCode.NO_TRAINABLE_TOKENS, message="Nothing to train."))
elif behaviour == "hang":
    checkpoint(5)
    time.sleep(600)
elif behaviour.startswith("hang-in-"):  # a phase; words in its log and in its events are no progress
    events.write(PhaseChanged(sequence=0, phase=Phase(behaviour.removeprefix("hang-in-"))))
    while True:
        time.sleep(0.2)
        events.write(LogLine(sequence=0, level="info", message="Still waiting."))
        sys.stderr.write("still waiting\n")
elif behaviour == "stand-still":  # what a debugger or a lost GPU does to it
    os.kill(os.getpid(), signal.SIGSTOP)
elif behaviour in ("beat", "read"):  # slow, and without an event
    open_pulse(work_dir)
    ends = time.monotonic() + 6.0
    while time.monotonic() < ends:
        time.sleep(0.1)
        if behaviour == "beat":
            beat()
        else:
            os.read(os.open("/dev/zero", os.O_RDONLY), 2**20)
    finish(20)
else:  # wait, stubborn: train until told to stop
    number = 0
    while not is_stopping:
        number += 1
        step(number)
        time.sleep(0.05)
    checkpoint(number)
    write_outcome(work_dir, Stopped(reason="stopped", step=number, training_seconds=number / 10))
