"""An estimate of what a repair would leave to train on, scaled up from the file's first rows."""

from collections.abc import Iterator

import msgspec

from apps.catalog.models import BaseModel
from apps.catalog.queries import chat_renderer
from apps.contracts.chat import ChatRenderer, Row, RowError
from apps.core.objects.store import ObjectMissing
from apps.datasets.lifecycle import DatasetVersionStatus
from apps.datasets.models import DatasetVersion, TokenCount
from apps.datasets.queries import read_rows
from apps.datasets.token_counts import Cut, Lengths, MeasuredRow, count_rows, measure_rows

_SAMPLE_ROWS = 200  # take a tenth of a second


def estimate_repair(*, version: DatasetVersion, base_model: BaseModel) -> tuple[DatasetVersion, TokenCount] | None:
    """Return the file as repaired, and its tokens; neither is saved.

    The tokens are those of the good rows among the first ones, scaled up to all rows. A repair may still drop rows, so
    they are an upper bound. Return None when none of the first rows is good or the stored file is gone. Raises
    ModelNotInstalled.
    """
    try:
        previews = read_rows(version=version, limit=_SAMPLE_ROWS)
    except ObjectMissing:
        return None
    renderer = chat_renderer(base_model=base_model)
    measured = list(_measured(renderer, [preview.row for preview in previews if preview.row is not None]))
    if not measured:
        return None
    rows = max(version.rows or 0, len(measured))  # the bad ones too
    found = count_rows(measured, longest_limit=base_model.context_length)
    fixed = DatasetVersion(
        organization_id=version.organization_id,
        kind=version.kind,
        status=DatasetVersionStatus.READY,
        rows=rows,
        bytes=version.data_bytes,
    )
    return fixed, _scaled(found, rows / len(measured), fixed, base_model)


def _measured(renderer: ChatRenderer, rows: list[Row]) -> Iterator[MeasuredRow]:
    for row in rows:
        try:
            yield from measure_rows(renderer, [row])
        except RowError:
            continue


def _scaled(found: Lengths, factor: float, version: DatasetVersion, base_model: BaseModel) -> TokenCount:
    return TokenCount(
        organization_id=version.organization_id,
        version=version,
        base_model=base_model,
        chat_template_sha256=base_model.chat_template_sha256,
        tokens=round(found.tokens * factor),
        trained_tokens=round(found.trained_tokens * factor),
        longest_row_tokens=found.longest_row_tokens,
        histogram=[[bound, round(rows * factor)] for bound, rows in found.histogram],
        starts=[[first, last, round(rows * factor)] for first, last, rows in found.starts],
        cuts=msgspec.to_builtins([_scaled_cut(cut, factor) for cut in found.cuts]),
    )


def _scaled_cut(cut: Cut, factor: float) -> Cut:
    return msgspec.structs.replace(
        cut,
        over=round(cut.over * factor),
        untrained=round(cut.untrained * factor),
        tokens=round(cut.tokens * factor),
        trained_tokens=round(cut.trained_tokens * factor),
    )
