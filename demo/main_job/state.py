"""What the main job did before, kept in one small file."""

import json
import os
from pathlib import Path
from typing import Any


class State:
    """What was done before, by name. A file that cannot be read counts as none."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._values = read_object(path)

    def __getitem__(self, name: str) -> Any:
        return self._values.get(name)

    def __setitem__(self, name: str, value: Any) -> None:
        """Write at once, and so that a kill at any moment leaves the old file or the new one."""
        self._values[name] = value
        draft = self._path.with_name(self._path.name + ".part")
        with draft.open("w") as file:
            file.write(json.dumps(self._values, indent=1))
            file.flush()
            os.fsync(file.fileno())
        draft.replace(self._path)


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; an empty one where there is none that can be read."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
