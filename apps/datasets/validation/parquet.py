"""Parquet as JSON lines, read in a child process with little memory, no environment and no way to write.

A file of 200 kB can claim to be gigabytes, and its reader is a large C++ library: neither may affect the caller.
"""

import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, cast

from apps.datasets.problems import MAX_ROWS, FileErrorCode, Rejected, too_many_rows
from apps.datasets.stream import CHUNK_BYTES, require_proportion
from apps.datasets.validation import parquet_child
from apps.datasets.validation.parquet_child import EXIT_NO_MEMORY, EXIT_TOO_MANY_ROWS

_ROOT = Path(__file__).resolve().parents[3]
_MESSAGE_BYTES = 400


def parquet_lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the rows as JSON lines in pieces. Raises Rejected for a damaged file or a bomb.

    Parquet is read from its end, so the stream is copied to a temporary file.
    """
    with tempfile.TemporaryFile() as file, tempfile.TemporaryFile() as complaints:
        for chunk in chunks:
            file.write(chunk)
        source_bytes = file.tell()
        file.seek(0)
        file.flush()
        child = subprocess.Popen(
            [sys.executable, "-B", "-m", parquet_child.__name__, str(MAX_ROWS)],
            cwd=_ROOT,
            env={"ARROW_DEFAULT_MEMORY_POOL": "system", "OMP_NUM_THREADS": "1"},
            stdin=file,
            stdout=subprocess.PIPE,
            stderr=complaints,
        )
        try:
            yield from _output(child, source_bytes)
            status = child.wait()
        finally:
            child.kill()
            child.wait()
            cast(IO[bytes], child.stdout).close()
        if status:
            complaints.seek(0)
            raise _explained(status, complaints.read(_MESSAGE_BYTES).decode("utf-8", "replace"))


def _output(child: subprocess.Popen[bytes], source_bytes: int) -> Iterator[bytes]:
    size, stream = 0, cast(IO[bytes], child.stdout)
    while piece := stream.read(CHUNK_BYTES):
        size += len(piece)
        require_proportion(size, source_bytes)
        yield piece


def _explained(status: int, complaint: str) -> Rejected:
    if status == EXIT_TOO_MANY_ROWS:
        return too_many_rows(line=1)
    if status == EXIT_NO_MEMORY or status < 0:  # a negative status: stopped by a system limit
        fix = "Write it again with smaller row groups (pandas: to_parquet(row_group_size=10_000)), or upload JSONL."
        return Rejected(FileErrorCode.TOO_LARGE_INSIDE, "The Parquet file needs too much memory to be read.", fix)
    message = f"The Parquet file cannot be read: {complaint.strip() or 'it is damaged'}"
    return Rejected(FileErrorCode.INVALID_TABLE, message, "Write the file again, or upload JSONL.")
