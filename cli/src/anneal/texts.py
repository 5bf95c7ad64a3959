"""Text of files and of standard input, as UTF-8."""

import codecs

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
