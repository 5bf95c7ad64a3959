"""Which rows are trained and which are validated on: no row is in both, nor is a copy of one.

A given validation file is the customer's word: what it holds is not trained on. Rows that are only nearly the same are
told, and stay.
"""

from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from apps.contracts.chat import RowError
from apps.contracts.failures import FailureCode
from apps.contracts.near_copies import MOST_ROWS, NearCopies
from apps.contracts.runs import DatasetRef, RunSpec
from apps.contracts.split import Split, own_words
from apps.contracts.struct import Struct
from gpu_workers.events import TRAINING_FILE, VALIDATION_FILE
from gpu_workers.train.data import bad_row, hold_out, identities_of, read_rows, split_keys_of
from gpu_workers.train.failures import TrainingFailed
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
    """Hold rows out as the recipe asks, or leave out of training what the validation file holds.

    Raises TrainingFailed.
    """
    recipe = spec.hyperparameters
    if spec.validation is not None:
        return _without_held_out(work_dir, spec, spec.validation)
    if not recipe.validation_share:
        return Selection()
    kind = kind_of(spec.training, recipe.objective)
    held = hold_out(split_keys_of(work_dir / TRAINING_FILE, kind=kind), Split(recipe.validation_share, recipe.seed))
    return Selection(
        training=[not each for each in held],
        validation_file=TRAINING_FILE,
        validation=held,
        notes=(("info", f"{sum(held)} of {len(held)} rows are held out for validation (seed {recipe.seed})."),),
    )


def count_near_copies(work_dir: Path, spec: RunSpec, selection: Selection) -> int:
    """Return how many trained rows nearly repeat a row of the validation file: of the first 200,000 rows of each.

    Raises TrainingFailed.
    """
    if spec.validation is None:
        return 0
    objective, near = spec.hyperparameters.objective, NearCopies()
    try:
        for place, row in enumerate(read_rows(work_dir / VALIDATION_FILE, kind_of(spec.validation, objective))):
            near.find(own_words(row), place)
        rows = read_rows(work_dir / TRAINING_FILE, kind_of(spec.training, objective))
        kept = selection.training
        return sum(
            near.knows(own_words(row))
            for place, row in enumerate(islice(rows, MOST_ROWS))
            if kept is None or kept[place]
        )
    except RowError as error:
        raise bad_row(error) from error


def _without_held_out(work_dir: Path, spec: RunSpec, ref: DatasetRef) -> Selection:
    objective = spec.hyperparameters.objective
    held = set(identities_of(work_dir / VALIDATION_FILE, kind=kind_of(ref, objective)))
    rows = identities_of(work_dir / TRAINING_FILE, kind=kind_of(spec.training, objective))
    keep = [identity not in held for identity in rows]
    if all(keep):
        return Selection(validation_file=VALIDATION_FILE)
    if not any(keep):
        message = "Every row of the training file is in the validation file too: nothing is left to train on."
        raise TrainingFailed(FailureCode.INVALID_TRAINING_FILE, message)
    message = f"{len(keep) - sum(keep)} of {len(keep)} rows are in the validation file too and are not trained on."
    return Selection(training=keep, validation_file=VALIDATION_FILE, notes=(("warn", message),))
