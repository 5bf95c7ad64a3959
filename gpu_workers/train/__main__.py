"""`python -m gpu_workers.train SPEC.json WORK_DIR`: train one attempt and say how it ended in outcome.json.

Reads one JSON line from standard input: {"hub_token": …}, so that a token stands in no file, argument or environment.
Exit codes: 0 outcome.json holds an adapter or an orderly stop · 3 outcome.json holds a failure · anything else, a
signal included: the process died without an outcome, and the agent decides what that means.
"""

import logging
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch
from transformers import set_seed

from apps.contracts.chat import ChatRenderer, RowKind, TrainOn
from apps.contracts.failures import FailureCode
from apps.contracts.runs import DatasetRef, Failed, LogLine, Phase, PhaseChanged, RunSpec, Stopped, TrainingStarted
from apps.contracts.split import Split
from gpu_workers.artifacts import BrokenArtifact, folder_bytes, read_manifest
from gpu_workers.events import (
    ADAPTER_FOLDER,
    EVENTS_FILE,
    RESUME_FOLDER,
    TRAINING_FILE,
    UNNUMBERED,
    VALIDATION_FILE,
    AdapterReady,
    ChildOutcome,
    EventWriter,
    write_outcome,
)
from gpu_workers.train.callbacks import StopFlag
from gpu_workers.train.checkpoint import IncompleteCheckpoint, Progress, explain_inexact_resume, open_checkpoint
from gpu_workers.train.data import Encoded, encode_file, hold_out, identities_of, load_renderer
from gpu_workers.train.export import export_adapter
from gpu_workers.train.failures import StopRequested, TrainingFailed, classify
from gpu_workers.train.memory import peak_memory_bytes
from gpu_workers.train.model import fetch_base_model, load_model
from gpu_workers.train.sft import Trainer, build_trainer

EXIT_DONE = 0
EXIT_FAILED = 3

log = logging.getLogger("gpu_workers.train")


def main(spec_path: Path, work_dir: Path) -> int:
    """Run the attempt; returns the exit code."""
    stop = StopFlag()
    stop.install()
    torch.set_num_interop_threads(1)  # the number of intra-op threads is OMP_NUM_THREADS, from the executor
    spec = msgspec.json.decode(spec_path.read_bytes(), type=RunSpec)
    secrets = msgspec.json.decode(sys.stdin.buffer.readline() or b"{}", type=dict[str, str | None])
    outcome = _outcome(Attempt(spec, work_dir, stop, hub_token=secrets.get("hub_token")))
    write_outcome(work_dir, outcome)
    return EXIT_FAILED if isinstance(outcome, Failed) else EXIT_DONE


def _outcome(attempt: "Attempt") -> ChildOutcome:
    try:
        return attempt.run()
    except StopRequested:
        return Stopped(reason="stopped", step=attempt.start_step)
    except Exception as error:  # process edge: every end must be reported
        log.exception("The attempt failed")
        failure = classify(error)
        return Failed(code=failure.code, message=failure.message, peak_memory_bytes=peak_memory_bytes())


class Attempt:
    """The phases of one attempt, in order."""

    def __init__(self, spec: RunSpec, work_dir: Path, stop: StopFlag, *, hub_token: str | None) -> None:
        self._spec = spec
        self._work_dir = work_dir
        self._stop = stop
        self._hub_token = hub_token
        self._events = EventWriter(work_dir / EVENTS_FILE)
        self.start_step = 0

    def run(self) -> ChildOutcome:
        """Load, train, export; raises TrainingFailed or StopRequested."""
        spec = self._spec
        if spec.hyperparameters.packing:
            raise TrainingFailed(FailureCode.INTERNAL_ERROR, "Packing is not available on this worker.")
        self._enter(Phase.DOWNLOADING)
        folder = fetch_base_model(spec.base_model, hub_token=self._hub_token)
        self._enter(Phase.LOADING)
        training, validation = self._encode_both(folder)
        resumed = self._open_resume()
        self._check_stop()
        set_seed(spec.hyperparameters.seed)
        model = load_model(folder, spec.hyperparameters)
        trainer = build_trainer(
            model=model,
            folder=folder,
            training=training,
            validation=validation,
            spec=spec,
            work_dir=self._work_dir,
            events=self._events,
            stop=self._stop,
        )
        self._check_stop()
        return self._train(trainer, training, resumed)

    def _train(self, trainer: Trainer, training: Encoded, resumed: Progress | None) -> ChildOutcome:
        total_steps = trainer.progress.steps_per_epoch * self._spec.hyperparameters.epochs
        if resumed is not None:
            trainer.progress.restore(resumed)
        self._events.write(
            TrainingStarted(
                sequence=UNNUMBERED,
                total_steps=total_steps,
                start_step=self.start_step,
                rows=len(training),
                trained_tokens_per_epoch=training.n_trained,
            )
        )
        self._enter(Phase.TRAINING)
        trainer.train(resume_from_checkpoint=str(self._work_dir / RESUME_FOLDER) if resumed else None)
        step = trainer.state.global_step
        trainer.progress.watch.pause()
        if step < total_steps and self._stop.is_set:
            return self._stopped(trainer, step)
        if step != total_steps:
            message = f"Training ended at step {step} of {total_steps}."
            raise TrainingFailed(FailureCode.INCOMPLETE_TRAINING, message)
        return self._export(trainer, step)

    def _stopped(self, trainer: Trainer, step: int) -> Stopped:
        return Stopped(
            reason="stopped",
            step=step,
            training_seconds=trainer.progress.watch.seconds,
            trained_tokens=trainer.progress.trained_tokens,
            peak_memory_bytes=peak_memory_bytes(),
        )

    def _export(self, trainer: Trainer, step: int) -> AdapterReady:
        folder = self._work_dir / ADAPTER_FOLDER
        digest = export_adapter(folder, trainer.model, self._spec, step=step)
        evaluation = trainer.progress.evaluation
        return AdapterReady(
            folder=ADAPTER_FOLDER,
            manifest_sha256=digest,
            bytes=folder_bytes(read_manifest(folder)),
            step=step,
            training_seconds=trainer.progress.watch.seconds,
            trained_tokens=trainer.progress.trained_tokens,
            tokens=trainer.progress.tokens,
            train_loss=trainer.progress.mean_recent_loss,
            valid_loss=None if evaluation is None else evaluation.valid_loss,
            peak_memory_bytes=peak_memory_bytes(),
        )

    def _open_resume(self) -> Progress | None:
        if self._spec.resume_from is None:
            return None
        try:
            manifest, progress = open_checkpoint(self._work_dir / RESUME_FOLDER)
        except (BrokenArtifact, IncompleteCheckpoint) as error:
            raise TrainingFailed(FailureCode.CHECKPOINT_INVALID, f"The checkpoint cannot be used: {error}") from error
        changed = explain_inexact_resume(manifest, self._spec)
        if changed is not None:
            self._say("warn", f"Resumed from step {progress.step}, not bit-exact: {changed} changed.")
        else:
            self._say("info", f"Resumed from step {progress.step}.")
        self.start_step = progress.step
        return progress

    def _encode_both(self, folder: Path) -> tuple[Encoded, Encoded | None]:
        """Return the rows to train on and those to validate on; no row is in both, nor is an equal one."""
        spec, recipe = self._spec, self._spec.hyperparameters
        renderer = load_renderer(folder, spec.base_model.chat_template)
        kind = RowKind(spec.training.kind)
        if kind is RowKind.PREFERENCE:
            raise TrainingFailed(FailureCode.INVALID_TRAINING_FILE, "Preference rows need the method dpo.")
        path = self._work_dir / TRAINING_FILE
        if spec.validation is None and not recipe.validation_share:
            return self._encode(path, renderer, kind), None
        seen = identities_of(path, kind=kind)
        if spec.validation is None:
            held = hold_out(seen, Split(recipe.validation_share, recipe.seed))
            self._say("info", f"{sum(held)} of {len(held)} rows are held out for validation (seed {recipe.seed}).")
            training = self._encode(path, renderer, kind, keep=[not each for each in held])
            return training, self._encode(path, renderer, kind, keep=held)
        return self._encode(path, renderer, kind), self._encode_validation(spec.validation, renderer, set(seen))

    def _encode_validation(self, ref: DatasetRef, renderer: ChatRenderer, trained: set[int]) -> Encoded | None:
        path, kind = self._work_dir / VALIDATION_FILE, RowKind(ref.kind)
        keep = [identity not in trained for identity in identities_of(path, kind=kind)]
        if not all(keep):
            count = len(keep) - sum(keep)
            self._say("warn", f"{count} validation rows are in the training file too and are left out of validation.")
        if not any(keep):
            return None
        return self._encode(path, renderer, kind, keep=keep)

    def _encode(
        self, path: Path, renderer: ChatRenderer, kind: RowKind, *, keep: Sequence[bool] | None = None
    ) -> Encoded:
        recipe = self._spec.hyperparameters
        rows = encode_file(
            path, renderer, max_length=recipe.max_length, kind=kind, train_on=TrainOn(recipe.train_on), keep=keep
        )
        if rows.n_truncated:
            self._say("warn", f"{rows.n_truncated} rows were cut to {recipe.max_length} tokens.")
        if rows.n_dropped:
            self._say("warn", f"{rows.n_dropped} rows were left out: nothing trained remains after truncation.")
        return rows

    def _enter(self, phase: Phase) -> None:
        self._check_stop()
        self._events.write(PhaseChanged(sequence=UNNUMBERED, phase=phase))

    def _say(self, level: str, message: str) -> None:
        self._events.write(LogLine(sequence=UNNUMBERED, level=level, message=message))

    def _check_stop(self) -> None:
        if self._stop.is_set:
            raise StopRequested


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
