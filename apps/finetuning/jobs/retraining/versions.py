"""The versions of datasets that a retraining uses: the newest that are ready."""

from django.utils.translation import gettext

from apps.contracts.chat import RowKind
from apps.core.errors import InvalidValue
from apps.datasets.lifecycle import DatasetVersionStatus
from apps.datasets.models import DatasetVersion
from apps.serving.evals.sources import MAX_ITEMS


def newest_ready(dataset_id: str) -> DatasetVersion | None:
    """Return the newest version of a dataset that is ready."""
    rows = DatasetVersion.objects.filter(dataset_id=dataset_id, status=DatasetVersionStatus.READY)
    return rows.defer("line_offsets", "errors").order_by("-number").first()


def require_comparable(version: DatasetVersion | None, *, param: str) -> DatasetVersion:
    """Return the version if models can be compared on its rows. Raises InvalidValue."""
    if version is None:
        raise InvalidValue(gettext("The dataset has no version that is ready."), param=param)
    if version.kind != RowKind.CHAT:
        text = gettext("Models are compared by their answers in conversations, and these rows are of another kind.")
        raise InvalidValue(text, param=param)
    if (version.rows or 0) > MAX_ITEMS:
        text = gettext("Models are compared on at most %(most)s rows, and this dataset has %(rows)s. Keep fewer.")
        raise InvalidValue(text % {"most": f"{MAX_ITEMS:,}", "rows": f"{version.rows:,}"}, param=param)
    return version
