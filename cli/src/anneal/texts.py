"""Text of files and of standard input, as UTF-8."""

import codecs
from contextlib import suppress
from pathlib import Path

from anneal.failures import ExitCode, Failure

STANDARD_INPUT = "Standard input"


def text_of(content: bytes, name: str) -> str:
    """Return the text without a byte order mark. Raises Failure with the line and byte that are not UTF-8."""
    content = content.removeprefix(codecs.BOM_UTF8)
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        line, byte = content.count(b"\n", 0, error.start) + 1, error.start - content.rfind(b"\n", 0, error.start)
        text = f"{name}, line {line}, byte {byte}: this is not UTF-8 text. Save or send it as UTF-8."
        raise Failure(text, ExitCode.USAGE) from error


def is_file(name: str) -> bool:
    """Return whether a file on this machine has the name. A name that its system does not allow has none."""
    with suppress(OSError):  # Path.is_file() suppresses it from Python 3.14 on
        return Path(name).is_file()
    return False
