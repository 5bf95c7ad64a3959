"""Write the rows of a Parquet file as JSON lines, under limits that are set before the file is opened.

    python -m apps.datasets.validation.parquet_child MAX_ROWS < file.parquet

A file whose footer has more rows is not read.
Imports neither Django nor, until the limits are set, the Parquet reader.
"""

import ctypes
import importlib
import resource
import sys
from typing import Any

import msgspec

EXIT_UNREADABLE, EXIT_NO_MEMORY, EXIT_TOO_MANY_ROWS = 2, 3, 4
ROWS_AT_ONCE = 64
MEMORY_BYTES = 448 * 1024 * 1024  # anonymous memory, of which the reader itself takes about 60 MB
CPU_SECONDS = 3_000
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000  # sched.h


def main() -> int:
    """Write the rows to standard output; return 0, or the exit status that explains missing rows."""
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    # Limits the error message; standard output is a pipe. The limit would truncate compiled modules, which is why `-B`
    # is set.
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Move into a separate network without a way out, where the system allows it.
    ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWUSER | _CLONE_NEWNET)
    try:
        return _write_rows(int(sys.argv[1]))
    except MemoryError:
        return EXIT_NO_MEMORY
    except BrokenPipeError:
        return EXIT_UNREADABLE
    except (OSError, ValueError, TypeError, NotImplementedError, KeyError, RecursionError) as error:
        if "malloc" in str(error) or "allocat" in str(error):
            return EXIT_NO_MEMORY
        sys.stderr.write(" ".join(str(error).split())[:300])
        return EXIT_UNREADABLE


def _write_rows(most_rows: int) -> int:
    pyarrow, parquet = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    pyarrow.set_cpu_count(1)
    pyarrow.set_io_thread_count(1)
    file = parquet.ParquetFile(sys.stdin.buffer, pre_buffer=False, buffer_size=1024 * 1024)
    names = file.schema_arrow.names
    if len(set(names)) < len(names):
        raise ValueError("two columns have the same name")
    if file.metadata.num_rows > most_rows:  # three million nulls take a kilobyte here, and a minute row by row
        return EXIT_TOO_MANY_ROWS
    encode, write = msgspec.json.Encoder().encode, sys.stdout.buffer.write
    for batch in file.iter_batches(ROWS_AT_ONCE, use_threads=False):
        for row in batch.to_pylist():
            write(encode({name: _written(value) for name, value in row.items()}))
            write(b"\n")
    sys.stdout.buffer.flush()
    return 0


def _written(value: object) -> Any:
    """Return the value as it is written: without null members, and bytes as text.

    A Parquet struct cannot omit a member, so null marks a key that the row never had. Bytes that are not UTF-8 become
    an empty object, which is refused where text is trained.
    """
    if isinstance(value, dict):
        return {name: _written(item) for name, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [_written(item) for item in value]
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return {}
    return value


if __name__ == "__main__":
    sys.exit(main())
