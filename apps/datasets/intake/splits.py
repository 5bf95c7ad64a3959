"""Split of a version into two datasets, one to train on and one to validate with, by a share and a seed."""

import datetime

from django.db import transaction
from django.utils.translation import gettext

from apps.contracts.splits.split import Split
from apps.core.errors import InvalidState, InvalidValue
from apps.datasets.inspection import inspections
from apps.datasets.inspection.inspector import FindingCode
from apps.datasets.intake.revisions import derive
from apps.datasets.lifecycle import DatasetVersionStatus
from apps.datasets.models import DatasetVersion, VersionInspection
from apps.datasets.problems import MIN_ROWS
from apps.datasets.validation.layout import FileLayout
from apps.datasets.validation.repair import HELD, TRAINED

LARGEST_SHARE = 0.5


@transaction.atomic
def split_version(
    *, version: DatasetVersion, split: Split, by: str, now: datetime.datetime
) -> tuple[DatasetVersion, DatasetVersion]:
    """Return the rows to train on and the rows that are held out, as versions of two datasets; a task writes them.

    The rows are those that a job with this share and seed would hold out: copies are on the same side. Raises
    InvalidState, InvalidValue and StorageFull.
    """
    if version.status != DatasetVersionStatus.READY:
        raise InvalidState(
            gettext("%(filename)s is %(status)s: only a file that is ready can be split.")
            % {"filename": version.filename, "status": version.status}
        )
    if not 0 < split.share <= LARGEST_SHARE:
        raise InvalidValue(
            gettext("Choose a share of up to %(largest_share)s to hold out.")
            % {"largest_share": f"{LARGEST_SHARE:.0%}"},
            param="share",
        )
    inspection = inspections.find_inspection(version=version)
    if inspection is None:
        raise InvalidState(gettext("The rows are being inspected for copies; split the file in a moment."))
    if any(found["code"] == FindingCode.NOT_INSPECTED for found in inspection.findings):
        raise InvalidState(gettext("The file took too long to inspect for copies, so it cannot be split."))
    _require_rows(version, inspection, split)
    layout = FileLayout(split=split)
    trained = derive(version, TRAINED, by=by, now=now, layout=layout, part="training")
    return trained, derive(version, HELD, by=by, now=now, layout=layout, part="validation")


def _require_rows(version: DatasetVersion, inspection: VersionInspection, split: Split) -> None:
    """Raise InvalidValue for a split that leaves too few rows on a side, and InvalidState if their keys are gone.

    Of many rows, the share is exact enough.
    """
    rows = version.rows or 0
    if rows <= inspections.KEYS_READ_NOW:
        marks = inspections.held_out_rows(inspection=inspection, split=split)
        if len(marks) != rows:
            raise InvalidState(gettext("The rows of the file were not inspected."))
        held = sum(marks)
    else:
        held = int(split.share * rows)
    if min(held, rows - held) < MIN_ROWS:
        text = gettext(
            "Seed %(seed)s holds out %(held)s rows and leaves %(kept)s to train on, and each file needs at least "
            "%(min_rows)s. Choose another share or seed."
        ) % {"seed": split.seed, "held": f"{held:,}", "kept": f"{rows - held:,}", "min_rows": MIN_ROWS}
        raise InvalidValue(text, param="share")
