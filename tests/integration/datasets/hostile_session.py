"""Validate one hostile file in a process of its own; prints the first problem, and the memory it took, as JSON.

The memory is the most this process held, and how much of it came with the file.
"""

import io
import json
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

from apps.datasets.validation.validator import validate_file

MIB = 1024 * 1024


def gzip_bomb() -> Iterator[bytes]:
    return _gzip(b"", b" " * MIB, times=1024)


def gzip_line_bomb() -> Iterator[bytes]:
    return _gzip(b'{"messages": "', b"x" * MIB, times=300)


def _gzip(head: bytes, block: bytes, *, times: int) -> Iterator[bytes]:
    """Yield a gzip stream without its end: nothing may read so far. The block is compressed once and repeated."""
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    yield packer.compress(head) + packer.flush(zlib.Z_FULL_FLUSH)  # after which nothing refers to what came before
    packed = packer.compress(block) + packer.flush(zlib.Z_FULL_FLUSH)
    yield from [packed] * times


def long_line() -> Iterator[bytes]:
    yield b'{"messages": "'
    for _ in range(200):
        yield b"x" * (MIB // 4)


def nested() -> Iterator[bytes]:
    yield b'{"messages": ' + b"[" * 900_000 + b"\n"


def nested_array() -> Iterator[bytes]:
    for _ in range(80):
        yield b'[{"a":' * (MIB // 12)


def open_quote() -> Iterator[bytes]:
    yield b'prompt,completion\n"'
    for _ in range(60):
        yield b"xxxxxxx\n" * (MIB // 8)


def endless_row() -> Iterator[bytes]:
    yield b"prompt,completion\n"
    for _ in range(150):
        yield b'"' + b"xxxxxxxx\n" * (MIB // 10) + b'",'


def wide_table() -> Iterator[bytes]:
    for _ in range(60):
        yield b"a,b,c,d," * (MIB // 8)


def parquet_bomb() -> Iterator[bytes]:
    import pyarrow
    import pyarrow.parquet

    words = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 2_000), pyarrow.array(["x" * MIB]))
    out = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": words}), out)
    yield out.getvalue()


def parquet_page_bomb() -> Iterator[bytes]:
    import pyarrow
    import pyarrow.parquet

    out = io.BytesIO()
    table = pyarrow.table({"text": ["y" * (48 * MIB)] * 4})
    pyarrow.parquet.write_table(table, out, compression="zstd", use_dictionary=False)
    yield out.getvalue()


def _peak_mib() -> float:
    """The most this process held; getrusage would count what its parent held when it forked."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def main(name: str) -> None:
    chunks = list(globals()[name]()) if name.startswith(("gzip", "parquet")) else globals()[name]()
    before, started = _peak_mib(), time.monotonic()
    is_table = name in ("open_quote", "endless_row", "wide_table")
    report = validate_file(chunks, filename=f"f.{'csv' if is_table else 'jsonl'}")
    seen = {
        "code": report.errors[0].code,
        "grown_mib": _peak_mib() - before,
        "rss_mib": _peak_mib(),
        "seconds": time.monotonic() - started,
    }
    sys.stdout.write(json.dumps(seen))


main(sys.argv[1])
