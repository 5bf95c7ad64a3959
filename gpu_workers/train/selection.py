"""Which rows are trained and which are validated on: no row is in both, nor is a copy of one."""

from collections.abc import Sequence
from pathlib import Path

from apps.contracts.runs import DatasetRef, RunSpec
from apps.contracts.split import Split
from apps.contracts.struct import Struct
from gpu_workers.events import TRAINING_FILE, VALIDATION_FILE
from gpu_workers.train.data import hold_out, identities_of, split_keys_of
from gpu_workers.train.rows import kind_of


class Selection(Struct, frozen=True, kw_only=True):
    """Which rows of each file count, in file order, None for all. `validation_file` is None without validation rows.

    `notes` are for the run's log, each with its level.
    """

    training: Sequence[bool] | None = None
    validation_file: str | None = None
    validation: Sequence[bool] | None = None
    notes: tuple[tuple[str, str], ...] = ()


def select_rows(work_dir: Path, spec: RunSpec) -> Selection:
    """Hold rows out as the recipe asks, or leave out of the validation file what is trained on.

    Raises TrainingFailed.
    """
    recipe = spec.hyperparameters
    kind = kind_of(spec.training, recipe.objective)
    if spec.validation is None and not recipe.validation_share:
        return Selection()
    if spec.validation is not None:
        trained = set(identities_of(work_dir / TRAINING_FILE, kind=kind))
        return _without_copies(work_dir, spec, spec.validation, trained)
    held = hold_out(split_keys_of(work_dir / TRAINING_FILE, kind=kind), Split(recipe.validation_share, recipe.seed))
    return Selection(
        training=[not each for each in held],
        validation_file=TRAINING_FILE,
        validation=held,
        notes=(("info", f"{sum(held)} of {len(held)} rows are held out for validation (seed {recipe.seed})."),),
    )


def _without_copies(work_dir: Path, spec: RunSpec, ref: DatasetRef, trained: set[int]) -> Selection:
    kind = kind_of(ref, spec.hyperparameters.objective)
    keep = [identity not in trained for identity in identities_of(work_dir / VALIDATION_FILE, kind=kind)]
    if all(keep):
        return Selection(validation_file=VALIDATION_FILE)
    count = len(keep) - sum(keep)
    message = f"{count} validation rows are in the training file too and are left out of validation."
    file = VALIDATION_FILE if any(keep) else None
    return Selection(validation_file=file, validation=keep, notes=(("warn", message),))
