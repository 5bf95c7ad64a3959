"""Preview of a file's first rows under a mapping, as they would be stored, for a customer to check."""

from typing import Any

import msgspec

from apps.contracts.chat import Line, RowError
from apps.contracts.chat.lines import keep_columns
from apps.datasets.models import DatasetVersion
from apps.datasets.problems import SHOWN_CHARACTERS, LineError, from_row_error
from apps.datasets.validation.conversion import Unconvertible, convert
from apps.datasets.validation.formats import FIELDS, KINDS, LABELS, Format, Mapping, check_mapping, match_columns
from apps.datasets.validation.row_checks import check_line


class PreviewedRow(msgspec.Struct, frozen=True, kw_only=True):
    """One row as written, and as it would be stored or why it would not be; neither for a row that `is_cut`."""

    number: int
    source: str
    kept: str | None = None
    error: LineError | None = None
    is_cut: bool = False


class Preview(msgspec.Struct, frozen=True, kw_only=True):
    """The container and columns of a file, and its first rows under `mapping`."""

    container: str
    columns: tuple[str, ...]
    mapping: Mapping | None
    unused: tuple[str, ...]
    rows: tuple[PreviewedRow, ...]


def preview(*, version: DatasetVersion, mapping: Mapping | None = None) -> Preview:
    """Return a preview of a validated file under `mapping`, or under the mapping it was read with."""
    layout = version.layout
    chosen = mapping or layout.mapping
    used = set(chosen.columns.values()) if chosen else set()
    return Preview(
        container=layout.container + (".gz" if layout.is_gzip else ""),
        columns=layout.columns,
        mapping=chosen,
        unused=tuple(name for name in layout.columns if chosen and name not in used),
        rows=tuple(_row(number, text, chosen) for number, text in enumerate(layout.sample, start=1)),
    )


def suggest(version: DatasetVersion, format: Format) -> Mapping:
    """Return a format with those of the file's columns that have its usual names."""
    return match_columns(format, version.layout.columns)


def formats() -> list[dict[str, Any]]:
    """Return every format with its fields, for forms and clients."""
    return [
        {
            "format": str(format),
            "label": LABELS[format],
            "kind": str(KINDS[format]),
            "fields": [{"name": field.name, "is_required": field.is_required} for field in fields],
        }
        for format, fields in FIELDS.items()
    ]


def _row(number: int, text: str, mapping: Mapping | None) -> PreviewedRow:
    is_cut = len(text) > SHOWN_CHARACTERS
    if mapping is None or is_cut:
        return PreviewedRow(number=number, source=text[:SHOWN_CHARACTERS], is_cut=is_cut)
    try:
        data = keep_columns(text.encode("utf-8", "replace"), number, mapping.columns.values())
        kept = convert(data, check_mapping(mapping))
    except Unconvertible as error:
        return PreviewedRow(number=number, source=text, error=error.at(number))
    except RowError as error:
        return PreviewedRow(number=number, source=text, error=from_row_error(error))
    problem = check_line(Line(number, kept), mapping.kind)
    return PreviewedRow(number=number, source=text, kept=kept.decode(), error=problem)
