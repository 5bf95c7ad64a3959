"""Removal of secrets from a child's log before it leaves the machine, by pattern and by known value."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from gpu_workers.common.events import LOG_FILE

_BYTES_OF_TAIL = 8000
_MARK = "[removed]"
_SHORTEST = 6  # shorter values would also match harmless words
_PATTERNS = (
    re.compile(r"\b(?:hf|sk|pk|rk|ghp|gho|github_pat|glpat|xox[abp]|whsec|ann|annw)[_-][A-Za-z0-9_\-]{8,}"),
    re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"),
    re.compile(r"\beyJ[A-Za-z0-9_\-]{8,}\.[A-Za-z0-9_\-]{8,}\.[A-Za-z0-9_\-]+"),  # a JSON web token
    re.compile(r"(?<=://)[^/\s:@]+:[^/\s@]+(?=@)"),  # user:password in an address
    re.compile(r"(?i)(?<=bearer )[A-Za-z0-9._~+/\-]{8,}=*"),
    re.compile(
        r"(?i)(?<=[?&])(?:x-amz-[a-z-]+|signature|sig|token|access_token|key|expires)=[^&\s\"']+"
    ),  # the parameters that sign an address
    re.compile(
        r"(?i)\b[\w-]*(?:password|passwd|secret|api[_-]?key|access[_-]?key|token)\b[\"']?\s*[=:]\s*[\"']?[^\s\"',}]{6,}"
    ),
    re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL),
)


def redact(text: str, *, known: Iterable[str | None] = ()) -> str:
    """Return the text without secrets; `known` are values to remove whether or not they match a pattern."""
    for value in sorted({value for value in known if value and len(value) >= _SHORTEST}, key=len, reverse=True):
        text = text.replace(value, _MARK)
    for pattern in _PATTERNS:
        text = pattern.sub(_MARK, text)
    return text


def tail_of_log(work_dir: Path, *, known: Sequence[str | None]) -> str:
    """Return the last lines of the log without secrets, as evidence of a failure; "" if there are none."""
    path = work_dir / LOG_FILE
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _BYTES_OF_TAIL))
            return redact(file.read().decode("utf-8", "replace"), known=known)
    except OSError:
        return ""
