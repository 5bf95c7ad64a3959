"""Hides a folder from every process of the workers' environment; Python imports this file at its start.

Trainer, training child, serving agent and engine then reach objects by signed URLs or not at all.
"""

import os
import sys
from typing import Any

_EVENTS = frozenset(
    ["open", "os.listdir", "os.scandir", "os.rename", "os.remove", "os.mkdir", "os.link", "os.symlink", "os.chmod"]
)


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    if event not in _EVENTS:
        return
    for argument in arguments[:2]:
        if isinstance(argument, str | bytes) and os.path.abspath(os.fsdecode(argument)).startswith(_HIDDEN):
            raise PermissionError(f"{os.fsdecode(argument)} is hidden from workers")


_HIDDEN = os.environ.get("HIDDEN_FOLDER", "")
if _HIDDEN and os.path.basename(sys.prefix) == ".venv-engines":
    sys.addaudithook(_refuse)
