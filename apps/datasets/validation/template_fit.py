"""The rows of a valid file that a base model's chat template can render."""

from collections.abc import Callable, Iterable, Iterator

from apps.contracts.chat import (
    ChatRenderer,
    ChatRow,
    Line,
    PreferenceRow,
    Row,
    RowError,
    RowKind,
    TextRow,
    parse_line_as,
    split_lines,
)
from apps.datasets.problems import MAX_LINE_BYTES

_ROWS_AT_ONCE, _BYTES_AT_ONCE = 256, 2 * 1024**2


class RenderableRows:
    """Lines of the rows that can be rendered, to iterate once; `dropped` counts the others so far."""

    def __init__(
        self,
        chunks: Iterable[bytes],
        *,
        kind: RowKind,
        renderer: ChatRenderer,
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        self._lines = split_lines(chunks, max_line_bytes=MAX_LINE_BYTES)
        self._kind, self._renderer, self._on_progress = kind, renderer, on_progress
        self.dropped = 0

    def __iter__(self) -> Iterator[bytes]:
        waiting, size = list[Line](), 0
        for line in self._lines:
            waiting.append(line)
            size += len(line.data)
            if len(waiting) == _ROWS_AT_ONCE or size > _BYTES_AT_ONCE:
                yield self._kept(waiting)
                waiting, size = [], 0
        yield self._kept(waiting)

    def _kept(self, lines: list[Line]) -> bytes:
        """Return the lines that can be rendered.

        Most batches hold no refused row, so rows are rendered one by one only in a batch that has one.
        """
        self._on_progress()
        rows = [parse_line_as(line, self._kind) for line in lines]
        kept = (
            lines
            if self._are_renderable(rows)
            else [line for line, row in zip(lines, rows, strict=True) if self._are_renderable([row])]
        )
        self.dropped += len(lines) - len(kept)
        return b"".join(line.data.rstrip(b"\r\n") + b"\n" for line in kept)

    def _are_renderable(self, rows: list[Row]) -> bool:
        try:
            self._renderer.require_renderable(_conversations(rows))
        except RowError:
            return False
        return True


def _conversations(rows: list[Row]) -> Iterator[ChatRow | TextRow]:
    for row in rows:
        if isinstance(row, PreferenceRow):
            yield from (row.chosen, row.rejected)
        else:
            yield row
