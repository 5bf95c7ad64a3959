"""The first rows of a file under a choice of columns, as they would be kept: what a person checks before it counts."""

from typing import Any

import msgspec

from apps.contracts.chat import Line
from apps.datasets.models import DatasetVersion
from apps.datasets.problems import LineError
from apps.datasets.validation.conversion import Unconvertible, convert
from apps.datasets.validation.formats import FIELDS, KINDS, LABELS, Format, Mapping, check_mapping, match_columns
from apps.datasets.validation.row_checks import check_line


class PreviewedRow(msgspec.Struct, frozen=True, kw_only=True):
    """One row as it was written and as it would be kept, or why it would not be."""

    number: int
    source: str
    kept: str | None = None
    error: LineError | None = None


class Preview(msgspec.Struct, frozen=True, kw_only=True):
    """What a file is, which columns it has, and what its first rows become with `mapping`."""

    container: str
    columns: tuple[str, ...]
    mapping: Mapping | None
    unused: tuple[str, ...]
    rows: tuple[PreviewedRow, ...]


def preview(*, version: DatasetVersion, mapping: Mapping | None = None) -> Preview:
    """Show a validated file under `mapping`, or under the one it was read with."""
    layout = version.layout
    chosen = mapping or mapping_of(version)
    columns = tuple(layout.get("columns", ()))
    used = set(chosen.columns.values()) if chosen else set()
    return Preview(
        container=layout.get("container", "") + (".gz" if layout.get("is_gzip") else ""),
        columns=columns,
        mapping=chosen,
        unused=tuple(name for name in columns if chosen and name not in used),
        rows=tuple(_row(number, text, chosen) for number, text in enumerate(layout.get("sample", ()), start=1)),
    )


def mapping_of(version: DatasetVersion) -> Mapping | None:
    """Return how a file was read, None while nobody knows."""
    found = version.layout.get("mapping")
    return msgspec.convert(found, Mapping) if found else None


def suggest(version: DatasetVersion, format: Format) -> Mapping:
    """Return a format with those of the file's columns that are named as it expects."""
    return match_columns(format, version.layout.get("columns", ()))


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
    if mapping is None:
        return PreviewedRow(number=number, source=text)
    try:
        kept = convert(text.encode("utf-8", "replace"), check_mapping(mapping))
    except Unconvertible as error:
        return PreviewedRow(number=number, source=text, error=error.at(number))
    problem = check_line(Line(number, kept), mapping.kind)
    return PreviewedRow(number=number, source=text, kept=kept.decode(), error=problem)
