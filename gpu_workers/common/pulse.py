"""A child's sign of progress: a counter in a file of its work folder. The agent reads it.

Events are too rare for this, because a step of a large model, an evaluation or a merge may take minutes without one.
"""

import mmap
import struct
from pathlib import Path

PULSE_FILE = "pulse"
_COUNTER = struct.Struct("<Q")
_open: list[mmap.mmap] = []  # empty in a process that is not watched


def open_pulse(work_dir: Path) -> None:
    """Make `beat` count in `work_dir` from now on."""
    with (work_dir / PULSE_FILE).open("w+b") as file:
        file.write(_COUNTER.pack(0))
        file.flush()
        _open[:] = [mmap.mmap(file.fileno(), _COUNTER.size)]


def beat() -> None:
    """Count a finished unit of work: a row read, a micro-batch trained, a token written, a tensor merged."""
    for memory in _open:
        _COUNTER.pack_into(memory, 0, _COUNTER.unpack_from(memory)[0] + 1)


def read_pulse(work_dir: Path) -> int:
    """Return how many units a child has counted, 0 before its first."""
    try:
        return int(_COUNTER.unpack((work_dir / PULSE_FILE).read_bytes())[0])
    except (FileNotFoundError, struct.error):
        return 0
