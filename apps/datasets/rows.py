"""The rows of a version, in order, with bounded memory."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from apps.contracts.chat import Line, Row, RowKind, parse_line_as, split_lines
from apps.core.objects.store import read_chunks, store
from apps.datasets.models import DatasetVersion
from apps.datasets.problems import MAX_LINE_BYTES


def kind_of(version: DatasetVersion) -> RowKind:
    """Return the kind of the version's rows. Files from before kinds existed hold conversations."""
    return RowKind(version.kind or RowKind.CHAT)


@contextmanager
def iterate_rows(*, version: DatasetVersion, on_progress: Callable[[], None] = lambda: None) -> Iterator[Iterator[Row]]:
    """Yield an iterator over every row of a ready version. Its rows raise RowError; the file is closed at the end."""
    kind = kind_of(version)
    with store().open_stream(version.data_key) as stream:
        lines = split_lines(read_chunks(stream), max_line_bytes=MAX_LINE_BYTES)
        yield _parsed(lines, kind, on_progress)


def _parsed(lines: Iterable[Line], kind: RowKind, on_progress: Callable[[], None]) -> Iterator[Row]:
    for line in lines:
        on_progress()
        yield parse_line_as(line, kind)
