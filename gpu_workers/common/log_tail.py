"""The last lines of a child's log, without secrets, as evidence of a failure."""

from collections.abc import Sequence
from pathlib import Path

from gpu_workers.common.events import LOG_FILE
from gpu_workers.common.redaction import redact

_BYTES = 8000


def tail_of_log(work_dir: Path, *, known: Sequence[str | None]) -> str:
    """Return the last lines, "" if there are none; `known` secrets and text that looks like a secret are removed."""
    path = work_dir / LOG_FILE
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _BYTES))
            return redact(file.read().decode("utf-8", "replace"), known=known)
    except OSError:
        return ""
