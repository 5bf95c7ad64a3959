"""CSV in chunks, with cells that no spreadsheet runs as formulas."""

import csv
import io
import re
from collections.abc import Iterable, Iterator, Sequence
from decimal import Decimal

# Also after a semicolon, a tab or a line break: where a comma is the decimal point, spreadsheets split there, and they
# ignore the quotes of a cell that stands after a comma, and those before an equals sign.
_FORMULA_STARTS = re.compile(r'^(?="*[=+\-@\t\r])|(?<=[;\t\r\n])(?="*[=+\-@])')
_ROWS_PER_CHUNK = 200


def csv_chunks(header: Sequence[str], rows: Iterable[Sequence[object]]) -> Iterator[bytes]:
    """Yield a CSV file. Text that a spreadsheet would run as a formula is prefixed with an apostrophe."""
    buffer = io.StringIO()
    writer = csv.writer(buffer)
    writer.writerow([_harmless(cell) for cell in header])
    for number, row in enumerate(rows, start=1):
        writer.writerow([_harmless(cell) for cell in row])
        if number % _ROWS_PER_CHUNK == 0:
            yield _taken(buffer)
    if rest := _taken(buffer):
        yield rest


def _harmless(cell: object) -> object:
    if cell is None or isinstance(cell, int | float | Decimal):
        return cell
    return _FORMULA_STARTS.sub("'", str(cell))


def _taken(buffer: io.StringIO) -> bytes:
    text = buffer.getvalue()
    buffer.seek(0)
    buffer.truncate()
    return text.encode()
