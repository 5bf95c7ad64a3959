"""Write docs/errors.md: every code that an error object can have, with its status, meaning and fix.

    python -m scripts.with_services .venv/bin/python -m scripts.assets.error_codes

Codes and statuses are read from the source: the classes of `DomainError`, and the places that raise one with another
code. The texts are in error_texts.py and problem_texts.py.
"""

import ast
import importlib
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import django

from scripts.processes import REPOSITORY

PAGE = REPOSITORY / "docs/errors.md"
_INTRO = """# Errors

If a call is refused, the answer has an HTTP status of 400 or above and one error object. The object has OpenAI's shape,
so OpenAI's SDKs raise their exception class for the status.

```json
{
  "error": {
    "message": "`epochs` must be from 1 to 50.",
    "type": "invalid_request_error",
    "param": "epochs",
    "code": "invalid_value",
    "doc_url": "https://anneal.example.com/help/errors#invalid_value"
  }
}
```

| member | meaning |
|---|---|
| `message` | what is wrong and how to fix it, for people; its words may change |
| `type` | the kind of error, as OpenAI names it |
| `param` | the field at fault, or null |
| `code` | what happened, for programs; codes stay the same |
| `doc_url` | the address of the section of this page about the code |

Some errors have further members, such as `required_scope`. For an `openai.APIStatusError`, read the address from
`error.body["doc_url"]` in Python, and from `error.error.doc_url` in JavaScript.

**Retries.** If an answer has the header `Retry-After`, send the request again after that time; OpenAI's SDKs do so. The
header `x-should-retry: false` says that waiting does not help. Send an `Idempotency-Key` with each POST that takes one,
so that a repeat does nothing twice ([safe repeats](limits.md#safe-repeats)).

**Support.** Each answer has the header `x-request-id`. Include its value when you report a problem.
"""


class RaisedCode(NamedTuple):
    """A code and an HTTP status that it comes with."""

    code: str
    status: int
    is_retryable: bool


def main() -> int:
    django.setup()
    PAGE.write_text(page())
    return 0


def raised_codes() -> Iterator[RaisedCode]:
    """Yield each code of a `DomainError` in `apps`. Call django.setup() first.

    Raises ValueError for a code that is neither a literal nor a constant.
    """
    for path in sorted((REPOSITORY / "apps").rglob("*.py")):
        source = path.read_text()
        if "code" in source and "migrations" not in path.parts:
            yield from _of_module(path, ast.parse(source))


def _of_module(path: Path, tree: ast.Module) -> Iterator[RaisedCode]:
    from apps.core.errors import DomainError  # noqa: PLC0415 - needs the settings

    given = [node for node in ast.walk(tree) if _sets_code(node) or _code_of(node) is not None]
    if not given:
        return
    module = importlib.import_module(".".join(path.relative_to(REPOSITORY).with_suffix("").parts))
    names = vars(module)
    for node in given:
        name = node.name if isinstance(node, ast.ClassDef) else getattr(getattr(node, "func", None), "id", "")
        kind = names.get(name)
        if not (isinstance(kind, type) and issubclass(kind, DomainError)):
            continue
        code = kind.code
        if (value := _code_of(node)) is not None:
            code = str(_constant(value, names))
        yield RaisedCode(code, int(kind.status), kind.is_retryable)


def _constant(value: ast.expr, names: Mapping[str, object]) -> object:
    match value:
        case ast.Constant(value=constant):
            return constant
        case ast.Name(id=name) if name in names:
            return names[name]
        case ast.Attribute(value=owner, attr=name):
            return getattr(_constant(owner, names), name)
    raise ValueError(f"The code {ast.unparse(value)} is no constant.")


def _sets_code(node: ast.AST) -> bool:
    return isinstance(node, ast.ClassDef) and any(
        isinstance(target, ast.Name) and target.id == "code"
        for line in node.body
        for target in (line.targets if isinstance(line, ast.Assign) else [getattr(line, "target", None)])
    )


def _code_of(node: ast.AST) -> ast.expr | None:
    """Return the value of `code=` in a call."""
    if not isinstance(node, ast.Call):
        return None
    return next((each.value for each in node.keywords if each.arg == "code"), None)


def page() -> str:
    """Return docs/errors.md as it should be."""
    from apps.contracts.failures import CAUSES, FailureCode  # noqa: PLC0415 - after django.setup()
    from apps.core.errors import Status  # noqa: PLC0415
    from scripts.assets.error_texts import ERRORS  # noqa: PLC0415
    from scripts.assets.problem_texts import BATCH_LINES, FILES, ROWS  # noqa: PLC0415

    found: dict[str, set[RaisedCode]] = {}
    for raised in raised_codes():
        found.setdefault(raised.code, set()).add(raised)
    by_status: dict[int, list[str]] = {}
    for code in sorted(found):
        by_status.setdefault(min(each.status for each in found[code]), []).append(code)
    parts = [_INTRO]
    for status, codes in sorted(by_status.items()):
        parts.append(f"## {status} {Status(status).name.replace('_', ' ').capitalize()}\n")
        for code in codes:
            meaning, fix = ERRORS[code]
            statuses = " or ".join(dict.fromkeys(str(each.status) for each in sorted(found[code])))
            repeat = " SDKs repeat it." if any(each.is_retryable for each in found[code]) else ""
            parts.append(f"### `{code}`\n\n{meaning}\n\n- **Status:** {statuses}.{repeat}\n- **What to do:** {fix}\n")
    parts.append(
        "## Failed jobs\n\nA failed job has one of these codes in `error.code`, or a code from above. "
        "`error.suggestion` names a change and its\nprice. Time is billed only if the customer is at fault.\n"
    )
    causes = {failure.value: f"{CAUSES[failure]} | {failure.blame.value}" for failure in FailureCode}
    parts.append(_table(causes, heads=("code", "cause", "at fault")))
    parts.append(
        "## Rows and files\n\nThese are the codes of a file's problems. Each problem has the line, a message and a "
        "`fix`.\n"
    )
    parts.append(_table({code.value: text for code, text in (ROWS | FILES).items()}, heads=("code", "meaning")))
    parts.append(
        "## Batches\n\nThese codes appear in `errors` of a batch that failed, and in the error of a line that got no "
        "answer.\n"
    )
    parts.append(_table(BATCH_LINES, heads=("code", "meaning")))
    return "\n".join(parts)


def _table(rows: Mapping[str, str], *, heads: tuple[str, ...]) -> str:
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    return "\n".join([*lines, *(f"| `{code}` | {text} |" for code, text in sorted(rows.items()))]) + "\n"


if __name__ == "__main__":
    sys.exit(main())
