"""Files of a job: the objectives their rows allow, and their errors."""

from django.utils.translation import gettext, ngettext

from apps.accounts.models import Organization
from apps.batches.models import BatchFile
from apps.batches.queries import find_file
from apps.contracts.chat import RowKind
from apps.contracts.hyperparameters import Objective
from apps.core.errors import DomainError
from apps.core.messages.translation import translated
from apps.datasets.inspection.comparisons import find_comparison, find_or_compare
from apps.datasets.lifecycle import DatasetVersionStatus
from apps.datasets.models import DatasetVersion, TokenCount
from apps.datasets.operations import RETRY_SECONDS, StillValidating
from apps.datasets.queries import get_version
from apps.finetuning.recipes import completion


class InvalidTrainingFile(DomainError):
    """The file cannot be trained on; the message describes what to change."""

    code = "invalid_training_file"


def usable_files(
    organization: Organization | str, training_file: str, validation_file: str | None
) -> tuple[DatasetVersion, DatasetVersion | None]:
    """Return the files, locked against deletion. Raises UnknownFile and InvalidTrainingFile."""
    # Deletion locks the row as well, so a file is either deleted before the job or in use after it. The lock lets the
    # checks of foreign keys pass, which jobs of the same file make when they commit while they hold their share. It is
    # taken in the order of the ids, or two jobs with the same files in opposite roles would wait for each other.
    named = [file_id for file_id in (training_file, validation_file) if file_id and "\x00" not in file_id]
    rows = DatasetVersion.objects.for_organization(organization).filter(pk__in=named)
    list(rows.order_by("pk").select_for_update(no_key=True).values_list("pk", flat=True))
    training = _usable_file(organization, training_file, "training_file")
    return training, _usable_file(organization, validation_file, "validation_file") if validation_file else None


def _usable_file(organization: Organization | str, file_id: str, param: str) -> DatasetVersion:
    if file := find_file(organization=organization, id=file_id):
        raise _other_purpose(file, param)
    version = get_version(organization=organization, id=file_id, param=param)
    if version.purpose != "fine-tune":
        raise _other_purpose(version, param)
    if version.status == DatasetVersionStatus.INVALID:
        raise invalid_file(version, param)
    return version


def _other_purpose(file: DatasetVersion | BatchFile, param: str) -> InvalidTrainingFile:
    text = gettext("%(file_id)s was uploaded for %(purpose)s, not for 'fine-tune'.")
    return InvalidTrainingFile(text % {"file_id": file.pk, "purpose": repr(file.purpose)}, param=param)


_ROWS_OF = {
    Objective.SUPERVISED: RowKind.CHAT,
    Objective.TEXT: RowKind.TEXT,
    Objective.DPO: RowKind.PREFERENCE,
    Objective.ORPO: RowKind.PREFERENCE,
}


def require_objective(
    asked: Objective | None, training_file: DatasetVersion, validation_file: DatasetVersion | None = None
) -> Objective:
    """Return the objective of the rows.

    Raises InvalidTrainingFile if they are of another kind than the objective needs.
    """
    objective = asked or objective_of(training_file)
    _require_rows(objective, training_file, "training_file")
    if validation_file is not None:
        _require_rows(objective, validation_file, "validation_file")
    return objective


def _require_rows(objective: Objective, version: DatasetVersion, param: str) -> None:
    """Raise InvalidTrainingFile if the rows' kind is known and the objective does not train on it."""
    wanted = _ROWS_OF[objective]
    if version.kind not in ("", wanted):
        message = gettext("%(version)s holds %(kind)s rows; %(objective)s training needs %(wanted)s rows.") % {
            "version": version.pk,
            "kind": version.kind,
            "objective": objective,
            "wanted": wanted,
        }
        raise InvalidTrainingFile(message, param=param)


def objectives_of(version: DatasetVersion | None) -> tuple[Objective, ...]:
    """Return the objectives the file's rows allow, the usual one first; supervised until their kind is known."""
    kind = version.kind if version is not None else ""
    return tuple(objective for objective, rows in _ROWS_OF.items() if rows == kind) or (Objective.SUPERVISED,)


def objective_of(version: DatasetVersion | None) -> Objective:
    """Return the default objective of the file's rows."""
    return objectives_of(version)[0]


def data_facts(
    *, version: DatasetVersion | None, validation: DatasetVersion | None, count: TokenCount | None
) -> completion.DataFacts:
    """Return the known facts about the rows, for choosing a recipe; the base model's own tokenizer made `count`."""
    if version is None:
        return completion.DataFacts(has_validation=validation is not None)
    return completion.DataFacts(
        rows=version.rows if version.status == DatasetVersionStatus.READY else None,
        longest_row_tokens=count.longest_row_tokens if count else None,
        has_validation=validation is not None,
    )


def require_ready(version: DatasetVersion, param: str) -> None:
    """Raise StillValidating until the file is validated, and InvalidTrainingFile if it has errors."""
    if version.status == DatasetVersionStatus.INVALID:
        raise invalid_file(version, param)
    if version.status != DatasetVersionStatus.READY:
        message = gettext(
            "%(filename)s (%(version)s) is still being validated: ask again in %(retry_seconds)s seconds. "
            "You can create the job now: it waits for the file."
        ) % {"filename": version.filename, "version": version.pk, "retry_seconds": RETRY_SECONDS}
        raise StillValidating(message, param=param, retry_after_seconds=RETRY_SECONDS)


def invalid_file(version: DatasetVersion, param: str) -> InvalidTrainingFile:
    """Return why an invalid or deleted file cannot be trained on: its first problem, with line and fix."""
    name = f"{version.filename} ({version.pk})"
    if version.status == DatasetVersionStatus.DELETED:
        return InvalidTrainingFile(
            gettext("%(name)s was deleted before the job could begin.") % {"name": name}, param=param
        )
    if not version.errors:
        return InvalidTrainingFile(gettext("%(name)s has errors. Upload it again.") % {"name": name}, param=param)
    first, others = version.errors[0], version.error_count - 1
    message = gettext("%(name)s, line %(line)s: %(message)s %(fix)s") % {
        "name": name,
        "line": first["line"],
        "message": translated(first["message"]),
        "fix": translated(first.get("fix", "")),
    }
    more = ngettext("%(others)s more problem in the file.", "%(others)s more problems in the file.", others)
    message = f"{message.rstrip()} {more % {'others': f'{others:,}'}}" if others else message.rstrip()
    return InvalidTrainingFile(message, param=param, line=first["line"])


def require_rows_to_train(training_file: DatasetVersion, validation_file: DatasetVersion | None) -> None:
    """Compare the two, at once if they are small. Raise InvalidTrainingFile if every row repeats one of the other."""
    if validation_file is None:
        return
    if not _is_same(training_file, validation_file):
        find_or_compare(version=training_file, other=validation_file)
    if is_all_held_out(training_file, validation_file):
        message = gettext(
            "Every row of the training file repeats or nearly repeats a row of the validation file, so no rows are "
            "left to train on. Choose a validation file with other rows, or none."
        )
        raise InvalidTrainingFile(message, param="validation_file")


def is_all_held_out(training_file: DatasetVersion, validation_file: DatasetVersion) -> bool:
    """Return whether every row of the first is known to repeat one of the second."""
    if _is_same(training_file, validation_file):
        return True
    compared = find_comparison(version=training_file, other=validation_file)
    return compared is not None and bool(training_file.rows) and compared.left_out_rows == training_file.rows


def _is_same(training_file: DatasetVersion, validation_file: DatasetVersion) -> bool:
    return bool(training_file.sha256) and training_file.sha256 == validation_file.sha256
