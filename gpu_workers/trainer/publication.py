"""The parts after training, made from the exported adapter, each by a separate child.

Parts are the evaluation (the comparison with the base, and the probe of the parity certificate) and each export. The
result of one part affects neither the others nor the adapter. A failed part is repeated once, alone; if it fails again,
it is reported as missing with its cause.
"""

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from apps.contracts.evaluation import EvaluationReport
from apps.contracts.runs import MissingPart, RunSpec
from apps.contracts.struct import Struct
from apps.contracts.worker_api import JudgeAccess
from gpu_workers.common.events import AdapterReady
from gpu_workers.common.redaction import tail_of_log
from gpu_workers.trainer.children.executor import Child, SubprocessExecutor
from gpu_workers.trainer.progress_watch import ChildActivity, ProgressWatch

log = logging.getLogger(__name__)

EVALUATION = "evaluation"
MERGED_EXPORT = "merged_16bit"
GGUF_EXPORT = "gguf"
MODULE = "gpu_workers.train.after.publish"
_TRIES = 2
_LIMIT_SECONDS = 1_800.0
_PASSES = 6  # over the base model's files, at most: read for base and tuned, merged, hashed, converted, counted
_BYTES_A_SECOND = 50e6  # of a slow disk
_POLL_SECONDS = 0.1


class SealedFolder(Struct, frozen=True, kw_only=True):
    """A folder below the work folder, with its manifest."""

    folder: str
    manifest_sha256: str
    bytes: int


class Made(Struct, frozen=True, kw_only=True):
    """The result of a part's child: the sealed folder, or the `problem` that prevented it.

    The evaluation's folder is the adapter with its probe. `is_lasting` means that a repeat would not help.
    """

    sealed: SealedFolder | None = None
    report: EvaluationReport | None = None
    problem: str = ""
    is_lasting: bool = False


class Published(Struct, frozen=True, kw_only=True):
    """All results after training; `missing` names each part that failed, and `lasting` those that would fail again."""

    adapter: SealedFolder
    exports: dict[str, SealedFolder] = {}
    report: EvaluationReport | None = None
    missing: tuple[MissingPart, ...] = ()
    lasting: tuple[str, ...] = ()


class PublishSecrets(Struct, frozen=True, kw_only=True):
    """The child's standard input. No file contains it. Without `judge`, `judge_refusal` has the reason."""

    part: str = EVALUATION
    hub_token: str | None = None
    judge: JudgeAccess | None = None
    judge_refusal: str = ""


class Publisher:
    """Runs the children of one run, one after the other.

    `begun` is called with each child, so that its memory can be watched.
    """

    def __init__(self, executor: SubprocessExecutor) -> None:
        self._executor = executor

    def publish(
        self,
        spec: RunSpec,
        ready: AdapterReady,
        work_dir: Path,
        *,
        devices: Sequence[str],
        secrets: Callable[[str], PublishSecrets],
        should_stop: Callable[[], bool],
        begun: Callable[[Child], None],
        watch: ProgressWatch,
        parts: Sequence[str] | None = None,
    ) -> Published:
        """Make every part that `spec` promises, or only these `parts`, on the run's `devices`.

        Call `secrets` before each child for the secrets it may receive.
        """
        made: dict[str, Made] = {}
        for part in (EVALUATION, *spec.exports) if parts is None else parts:
            for _ in range(_TRIES):
                if should_stop():
                    made[part] = Made(problem="the worker had to stop before it was made")
                    break
                known = secrets(part)
                _file_of(work_dir, known.part).unlink(missing_ok=True)
                more = msgspec.to_builtins(known)
                child = self._executor.start(work_dir, hub_token=known.hub_token, devices=devices, more=more)
                begun(child)
                made[part] = self._wait(child, work_dir, part, limit_seconds(ready), should_stop, watch)
                if not made[part].problem or made[part].is_lasting:
                    break
                judge_key = known.judge.key if known.judge else None
                log_tail = tail_of_log(work_dir, known=[known.hub_token, judge_key])
                log.warning("%s of %s: %s\n%s", part, spec.run_id, made[part].problem, log_tail)
        evaluated = made.get(EVALUATION, Made())
        return Published(
            adapter=evaluated.sealed or alone(ready).adapter,
            exports={kind: each.sealed for kind, each in made.items() if kind != EVALUATION and each.sealed},
            report=evaluated.report,
            missing=tuple(MissingPart(kind=kind, cause=each.problem) for kind, each in made.items() if each.problem),
            lasting=tuple(kind for kind, each in made.items() if each.problem and each.is_lasting),
        )

    def _wait(
        self,
        child: Child,
        work_dir: Path,
        part: str,
        most_seconds: float,
        should_stop: Callable[[], bool],
        watch: ProgressWatch,
    ) -> Made:
        watch.follow(ChildActivity(child.leader, work_dir))
        ends = time.monotonic() + most_seconds
        while child.poll() is None:
            if should_stop():
                child.kill()
                return Made(problem="the worker had to stop before it was made")
            if watch.check():
                child.end_with_stacks()
                return Made(problem=f"it made no progress for {watch.still_seconds:.0f} seconds")
            if time.monotonic() > ends:
                child.end_with_stacks()
                return Made(problem=f"it took longer than {most_seconds / 60:.0f} minutes", is_lasting=True)
            child.wait(_POLL_SECONDS)
        watch.follow(None)
        return _read(work_dir, part, child)


def limit_seconds(ready: AdapterReady) -> float:
    """Return the time limit of one part: half an hour, plus six slow passes over the base model's files."""
    return _LIMIT_SECONDS + _PASSES * ready.base_bytes / _BYTES_A_SECOND


def write_made(work_dir: Path, part: str, made: Made) -> None:
    """Store the result of a part; called by its child."""
    file = _file_of(work_dir, part)
    temporary = file.with_suffix(".tmp")
    temporary.write_bytes(msgspec.json.encode(made))
    temporary.replace(file)


def alone(ready: AdapterReady) -> Published:
    """Return the trained adapter unchanged, without report and probe."""
    adapter = SealedFolder(folder=ready.folder, manifest_sha256=ready.manifest_sha256, bytes=ready.bytes)
    return Published(adapter=adapter)


def _file_of(work_dir: Path, part: str) -> Path:
    return work_dir / f"published-{part}.json"


def _read(work_dir: Path, part: str, child: Child) -> Made:
    try:
        return msgspec.json.decode(_file_of(work_dir, part).read_bytes(), type=Made)
    except (FileNotFoundError, msgspec.DecodeError):
        if child.was_killed_for_memory():
            return Made(problem="it did not fit into the memory of the machine")
        return Made(problem=f"its process ended unexpectedly ({child.poll()})")
