"""The rows for training and for validation. No row, and no copy of one, is in both.

A given validation file takes precedence: its rows and their near duplicates are not trained on.
"""

from collections.abc import Sequence
from pathlib import Path

from apps.contracts.chat import RowError
from apps.contracts.failures import FailureCode
from apps.contracts.runs import DatasetRef, RunSpec
from apps.contracts.splits.held_rows import Repeats, ValidationIndex, repeats_of
from apps.contracts.splits.split import Split
from apps.contracts.struct import Struct
from gpu_workers.common.events import TRAINING_FILE, VALIDATION_FILE
from gpu_workers.train.data.encoding import bad_row, read_rows, split_keys_of, split_off
from gpu_workers.train.data.rows import kind_of
from gpu_workers.train.failures import TrainingFailed


class Selection(Struct, frozen=True, kw_only=True):
    """The selected rows of each file, in file order; None for all. `validation_file` is None without validation rows.

    `notes` are for the run's log, each with its level.
    """

    training: Sequence[bool] | None = None
    validation_file: str | None = None
    validation: Sequence[bool] | None = None
    notes: tuple[tuple[str, str], ...] = ()


def select_rows(work_dir: Path, spec: RunSpec) -> Selection:
    """Hold rows out as the recipe asks, or exclude the validation file's rows from training.

    Raises TrainingFailed.
    """
    recipe = spec.hyperparameters
    if spec.validation is not None:
        return _without_held_out(work_dir, spec, spec.validation)
    if not recipe.validation_share:
        return Selection()
    kind = kind_of(spec.training, recipe.objective)
    held = split_off(split_keys_of(work_dir / TRAINING_FILE, kind=kind), Split(recipe.validation_share, recipe.seed))
    return Selection(
        training=[not each for each in held],
        validation_file=TRAINING_FILE,
        validation=held,
        notes=(("info", f"{sum(held)} of {len(held)} rows are held out for validation (seed {recipe.seed})."),),
    )


def _without_held_out(work_dir: Path, spec: RunSpec, ref: DatasetRef) -> Selection:
    objective = spec.hyperparameters.objective
    try:
        held = ValidationIndex(read_rows(work_dir / VALIDATION_FILE, kind_of(ref, objective)))
        rows = read_rows(work_dir / TRAINING_FILE, kind_of(spec.training, objective))
        repeats = bytes(repeats_of(rows, held))
    except RowError as error:
        raise bad_row(error) from error
    n_left_out = len(repeats) - repeats.count(Repeats.NOTHING)
    if not n_left_out:
        return Selection(validation_file=VALIDATION_FILE)
    if n_left_out == len(repeats):
        message = (
            "Every row of the training file repeats one of the validation file, or nearly does: nothing is left to "
            "train on."
        )
        raise TrainingFailed(FailureCode.INVALID_TRAINING_FILE, message)
    return Selection(
        training=[each == Repeats.NOTHING for each in repeats],
        validation_file=VALIDATION_FILE,
        notes=(("warn", _what_is_left_out(repeats)),),
    )


def _what_is_left_out(repeats: bytes) -> str:
    equal, near = repeats.count(Repeats.A_ROW), repeats.count(Repeats.NEARLY_A_ROW)
    said = [f"{equal} are in the validation file too"] if equal else []
    if near:
        said.append(f"{near} nearly repeat one of {'it' if equal else 'the validation file'}")
    return f"Of {len(repeats)} rows, {' and '.join(said)}: they are not trained on."
