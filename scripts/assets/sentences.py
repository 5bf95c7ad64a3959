"""English sentences in code that cannot mark them: it has no Django, or its texts are stored for pages and API.

A page shows them through `translated` (apps/core/messages/translation.py), which finds the text by its words.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Packages and modules in which every string that begins like a sentence is shown to people.
SOURCES = (
    "apps/accounts/notices",
    "apps/adapters/operations.py",
    "apps/batches/endings.py",
    "apps/batches/validation.py",
    "apps/billing/books/credit_requests.py",
    "apps/contracts/adapter_files",
    "apps/contracts/addresses/customer_servers.py",
    "apps/contracts/chat",
    "apps/contracts/evaluation",
    "apps/contracts/failures.py",
    "apps/datasets/intake/lanes.py",
    "apps/datasets/problems.py",
    "apps/datasets/stream.py",
    "apps/datasets/validation",
    "apps/estimates/calibration.py",
    "apps/estimates/fixes.py",
    "apps/estimates/intervals.py",
    "apps/estimates/quote.py",
    "apps/estimates/models/families.py",
    "apps/estimates/placement.py",
    "apps/estimates/requests.py",
    "apps/finetuning/jobs/admission.py",
    "apps/finetuning/jobs/control.py",
    "apps/finetuning/jobs/creation.py",
    "apps/finetuning/jobs/explanations.py",
    "apps/finetuning/jobs/moves.py",
    "apps/finetuning/jobs/retries.py",
    "apps/finetuning/jobs/suggestions.py",
    "apps/finetuning/jobs/waits.py",
    "apps/finetuning/quotes",
    "apps/finetuning/recipes",
    "apps/finetuning/results/missing_parts.py",
    "apps/finetuning/results/verdicts.py",
    "apps/finetuning/runs/attempts.py",
    "apps/finetuning/runs/claims.py",
    "apps/finetuning/runs/endings.py",
    "apps/finetuning/runs/groups.py",
    "apps/finetuning/runs/lending.py",
    "apps/finetuning/runs/reports.py",
    "apps/finetuning/runs/stalls.py",
    "apps/payments/autorecharge.py",
    "apps/payments/dunning.py",
    "apps/serving/operations.py",
    "apps/serving/queries.py",
    "gpu_workers/serving/trials",
    "gpu_workers/train/attempt.py",
    "gpu_workers/train/data/encoding.py",
    "gpu_workers/train/data/rows.py",
    "gpu_workers/train/failure_codes.py",
    "gpu_workers/train/loop/callbacks.py",
    "gpu_workers/train/model/adapter_export.py",
    "gpu_workers/train/model/base_model.py",
    "gpu_workers/train/model/loading.py",
    "gpu_workers/train/model/weights.py",
    "gpu_workers/trainer/run_checks.py",
    "gpu_workers/trainer/supervision",
)
# Names of strings that become part of a sentence, so that they need not begin like one.
_FRAGMENTS = {"origin", "finished", "measured"}
# Calls whose strings are for programs, for logs, or marked already.
_OTHER_CALLS = {
    "gettext", "ngettext", "gettext_noop", "later", "PaymentMismatch", "StaleLease", "ArithmeticError", "ValueError",
    "TypeError", "RuntimeError", "KeyError", "Path", "debug", "info", "warning", "error", "exception", "compile",
    "execute", "fetch_prepared",
}  # fmt: skip
_VALUE = re.compile(r"%\(\w+\)s")
_SENTENCE = re.compile(r"(?!(?:UPDATE|SELECT|FROM|WHERE|JOIN|LEFT) )[A-Z0-9`'…](?=.*[a-z]{2})[^\n\\|]* [^|]*\Z")


def sentences() -> Iterator[tuple[Path, str]]:
    """Yield each sentence with its module. A value in it is a named placeholder, such as `%(rows)s`."""
    for source in SOURCES:
        path = ROOT / source
        for module in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            for text in sentences_of(module.read_text()):
                yield module, text


def sentences_of(source: str) -> Iterator[str]:
    """Yield each string of the source that is a sentence for people."""
    nodes: list[ast.AST] = [ast.parse(source)]
    while nodes:
        node = nodes.pop(0)
        if isinstance(node, ast.Constant | ast.JoinedStr):
            yield from filter(_is_sentence, map(str.strip, text_of(node).split("\n")))
        elif _is_fragment(node):
            yield from filter(_has_words, _strings(node))
        else:
            nodes += [child for child in ast.iter_child_nodes(node) if not _is_other(child)]


def _strings(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Constant | ast.JoinedStr):
        yield text_of(node)
    else:
        for child in ast.iter_child_nodes(node):
            yield from _strings(child)


def _is_sentence(text: str) -> bool:
    return _SENTENCE.match(_VALUE.sub("…", text)) is not None


def _has_words(text: str) -> bool:
    return re.search(r"[a-z]{3}.* .*", _VALUE.sub("…", text)) is not None


def _is_fragment(node: ast.AST) -> bool:
    """Return whether the node gives a name of `_FRAGMENTS` to a string."""
    if isinstance(node, ast.keyword):
        return node.arg in _FRAGMENTS
    return isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id in _FRAGMENTS


def _is_other(node: ast.AST) -> bool:
    """Return whether the node is documentation, an assertion or a call of `_OTHER_CALLS`: no sentence for people."""
    if isinstance(node, ast.Call):
        name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
        return name in _OTHER_CALLS
    return isinstance(node, ast.Assert) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))


def text_of(node: ast.Constant | ast.JoinedStr) -> str:
    """Return the text of a string, with a named placeholder for each value; "" for other constants."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    text, codes = "", dict[str, str]()
    for part in node.values:
        if isinstance(part, ast.Constant):
            text += str(part.value).replace("%", "%%")
        elif isinstance(part, ast.FormattedValue) and not text.endswith(")s"):  # values that touch are one
            text += f"%({_name(ast.unparse(part.value), codes)})s"
    return text if codes else text.replace("%%", "%")


def _name(code: str, codes: dict[str, str]) -> str:
    """Return a name for the value of an expression: its words, with a number if another value has the same words."""
    words = "_".join(re.findall(r"[a-z]+", code.lower()))[:40] or "value"
    name, number = words, 2
    while codes.setdefault(name, code) != code:
        name, number = f"{words}_{number}", number + 1
    return name
