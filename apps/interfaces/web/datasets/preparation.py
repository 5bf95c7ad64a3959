"""Values that the page of a file needs: token counts, the inspection, the comparison with a validation file.

Pages only read stored values. They send a POST that computes missing ones; for a large file, a task does it.
"""

from apps.catalog.models import BaseModel
from apps.datasets import operations
from apps.datasets.inspection import comparisons, inspections
from apps.datasets.lifecycle import DatasetVersionStatus
from apps.datasets.models import DatasetVersion, TokenCount, VersionComparison
from apps.datasets.queries import find_refusal, find_token_count


def is_ready(*versions: DatasetVersion | None) -> bool:
    return all(version is not None and version.status == DatasetVersionStatus.READY for version in versions)


def is_uncounted(*, version: DatasetVersion | None, base_model: BaseModel | None, count: TokenCount | None) -> bool:
    """Return whether the file can be counted under this model and `count` is missing."""
    if count or version is None or base_model is None or not base_model.is_installed or not is_ready(version):
        return False
    return find_refusal(version=version, base_model=base_model) is None


def is_uncompared(
    *, version: DatasetVersion | None, other: DatasetVersion | None, comparison: VersionComparison | None
) -> bool:
    """Return whether the files can be compared and `comparison` is missing."""
    return comparison is None and is_ready(version, other)


def prepare(
    *,
    version: DatasetVersion,
    base_model: BaseModel | None,
    other: DatasetVersion | None = None,
    with_inspection: bool = False,
) -> None:
    """Compute missing values or request them from a task. Repeating it is harmless."""
    count = find_token_count(version=version, base_model=base_model) if base_model else None
    if base_model and is_uncounted(version=version, base_model=base_model, count=count):
        if operations.is_counted_at_once(version):
            try:
                operations.count_tokens(version=version, base_model=base_model)
            except operations.RowRefused:
                pass  # stored, and shown by the page
        else:
            operations.request_count(version=version, base_model=base_model)
    if with_inspection and is_ready(version) and inspections.find_inspection(version=version) is None:
        inspections.request_inspection(version=version)
    if other is not None:
        comparisons.find_or_compare(version=version, other=other)
