"""Messages from a training child to its agent: events as JSON lines in a file, then one outcome.

It is a file and not a pipe, because a file survives a killed agent, cannot block the training loop, and can be read by
a person.
"""

import contextlib
import os
from pathlib import Path

import msgspec

from apps.contracts.runs import Event, Failed, RunEvent, Stopped, Struct
from gpu_workers.common.files import replace_file

EVENTS_FILE = "events.jsonl"
OUTCOME_FILE = "outcome.json"
SPEC_FILE = "spec.json"
LOG_FILE = "child.log"
TRAINING_FILE = "train.jsonl"
VALIDATION_FILE = "validation.jsonl"
RESUME_FOLDER = "resume"
START_FOLDER = "start"
CHECKPOINTS_FOLDER = "checkpoints"
ADAPTER_FOLDER = "adapter"

# The child writes this number; the agent assigns the real one, because numbers belong to the attempt.
UNNUMBERED = 0


class CheckpointReady(Event, frozen=True, kw_only=True, tag="checkpoint_ready"):
    """A whole checkpoint with its manifest is in `folder` (below the work folder)."""

    step: int
    folder: str
    manifest_sha256: str
    bytes: int
    trained_tokens: int
    training_seconds: float
    train_loss: float | None = None


class AdapterReady(Struct, frozen=True, kw_only=True, tag_field="type", tag="adapter_ready"):
    """Training ended at its last step; the adapter and its manifest are in `folder`."""

    folder: str
    manifest_sha256: str
    bytes: int
    step: int
    training_seconds: float
    trained_tokens: int
    tokens: int | None = None
    train_loss: float | None = None
    valid_loss: float | None = None
    peak_memory_bytes: int | None = None
    is_stopped_early: bool = False
    best_step: int | None = None
    base_bytes: int = 0  # size of the base model's weights on disk


ChildEvent = RunEvent | CheckpointReady
ChildOutcome = AdapterReady | Failed | Stopped


class EventWriter:
    """Appends events to the file, each visible at once."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)

    def write(self, event: ChildEvent) -> None:
        self._file.write(msgspec.json.encode(event) + b"\n")

    def close(self) -> None:
        self._file.close()


class EventTail:
    """Reads lines appended since the last call; an unfinished line waits for the next call."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read(self) -> list[ChildEvent]:
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [msgspec.json.decode(line, type=ChildEvent) for line in whole.splitlines()]


def write_outcome(folder: Path, outcome: ChildOutcome) -> None:
    """Store how the child ended; the file appears whole or not at all.

    Of several processes, the first one that fails is the cause: a failure replaces nothing.
    """
    content = msgspec.json.encode(outcome)
    if not isinstance(outcome, Failed):
        return replace_file(folder / OUTCOME_FILE, content)
    temporary = folder / f"{OUTCOME_FILE}.{os.getpid()}"
    replace_file(temporary, content)
    with contextlib.suppress(FileExistsError):
        os.link(temporary, folder / OUTCOME_FILE)
    return temporary.unlink()


def forget_failure(folder: Path) -> None:
    """Remove the outcome if it is a failure."""
    if isinstance(read_outcome(folder), Failed):
        (folder / OUTCOME_FILE).unlink()


def read_outcome(folder: Path) -> ChildOutcome | None:
    """Return how the child ended, or None if it died before it wrote its outcome."""
    try:
        return msgspec.json.decode((folder / OUTCOME_FILE).read_bytes(), type=ChildOutcome)
    except (FileNotFoundError, msgspec.DecodeError):
        return None
