"""The progress of the main job, kept in one small file."""

import json
import os
from pathlib import Path


class State:
    """Earlier results, by name. An unreadable file counts as empty."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._values = read_object(path)

    def __getitem__(self, name: str) -> str:
        """Return the id kept under this name; "" if there is none."""
        return str(self._values.get(name) or "")

    def __setitem__(self, name: str, value: str) -> None:
        """Write at once and atomically: a kill at any moment leaves the old file or the new one."""
        self._values[name] = value
        draft = self._path.with_name(self._path.name + ".part")
        with draft.open("w") as file:
            file.write(json.dumps(self._values, indent=1))
            file.flush()
            os.fsync(file.fileno())
        draft.replace(self._path)


def read_object(path: Path) -> dict[str, object]:
    """Return the JSON object in a file; an empty one if the file is missing or unreadable."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
