"""Names of modules, classes, functions, parameters and fields use the words of docs/CONTEXT.md."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

# Words to avoid that also have a meaning of their own here.
OTHER_MEANINGS = {
    "account": "a person's login, and an account of the ledger",
    "bucket": "an object store's bucket, and a rate limit's",
    "config": "a file such as config.json",
    "down": "a projection of an MLP; an engine that does not run",
    "edit": "a form that changes a row",
    "endpoint": "the address of an object store; an HTTP handler",
    "experiment": "the word of MLflow",
    "lock": "a lock of the database",
    "meter": "a meter of Stripe; the count of a stream's tokens",
    "model": "a base model, or Django's",
    "plan": "what memory, replicas and spans are planned to be",
    "queue": "a queue of the broker, a pool or the gateway",
    "record": "a verb: to write down",
    "retry": "a new attempt at a call; a job that repeats another",
    "sample": "the first rows of a file; a measured value; an answer of the model in training",
    "server": "an HTTP server",
    "step": "an optimizer step; a step of the wizard",
    "sweep": "a periodic deletion",
    "tag": "a tag of Jinja",
    "task": "a task of Celery or the outbox",
    "test": "the settings of tests",
    "tokens": "tokens of a text",
    "training": "the process, such as training_file",
    "up": "a projection of an MLP; sign-up, looked up",
    "validation": "the validation of a file, and validation rows",
    "version": "a version of a dataset or adapter",
}
# Single names whose word means something else.
EXCEPTIONS = {
    "BrokenArtifact": "any damaged file that a worker reads",
    "Forecast": "spending of a month, not of a job",
    "IdempotencyMismatch": "one key with two requests",
    "PaymentMismatch": "a paid amount that is not the requested one",
    "Prediction": "a quoted value beside the measured one",
    "PredictionInterval": "the statistical term",
    "Reversal": "a posting that undoes another in the ledger",
    "authorization": "the HTTP header",
    "beyond_reservation": "usage above the held amount",
    "execution_time": "OpenAI's name, in the answer of a grader",
    "chargeback_label": "the cost centre to charge",
    "forecast_month": "spending of a month, not of a job",
    "is_blocked": "a connection whose peer does not read",
    "list_stuck": "events of Stripe that cannot be handled",
    "on_stuck": "a callback of a process that hangs",
    "prediction": "OpenAI's parameter",
    "priority": "the order in which lots are spent",
    "snapshot": "values at one moment",
}
_CELLS = re.compile(r"^\|(?P<word>[^|]+)\|[^|]+\|(?P<avoid>[^|]+)\|$", re.MULTILINE)
_PARTS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


def words_to_avoid() -> dict[str, str]:
    """Return each single word to avoid that the glossary does not qualify, and the word in its place."""
    avoid = {}
    for row in _CELLS.finditer((ROOT / "docs/CONTEXT.md").read_text()):
        for word in re.split(r"[,;]", row["avoid"]):
            if re.fullmatch(r"[a-z]+", word.strip()) and word.strip() != "avoid":
                avoid[word.strip()] = row["word"].strip()
    return avoid


def names(modules: dict[str, list[ast.AST]]) -> Iterator[tuple[str, str]]:
    """Yield each name with its place."""
    for place, nodes in modules.items():
        yield place, Path(place).stem
        for node in nodes:
            for name in _names_of(node):
                yield f"{place}:{getattr(node, 'lineno', 0)}", name


def _names_of(node: ast.AST) -> list[str]:
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            given = node.args
            return [node.name, *(each.arg for each in [*given.posonlyargs, *given.args, *given.kwonlyargs])]
        case ast.ClassDef():
            targets = [target for each in node.body if isinstance(each, ast.Assign) for target in each.targets]
            targets += [each.target for each in node.body if isinstance(each, ast.AnnAssign)]
            return [node.name, *(target.id for target in targets if isinstance(target, ast.Name))]
        case ast.keyword(arg="name", value=ast.Constant(value=str(name))):  # of a URL, for example
            return [name] if re.fullmatch(r"[a-z_]+", name) else []
    return []


@pytest.fixture(scope="module")
def found(modules: dict[str, list[ast.AST]]) -> list[tuple[str, str, str]]:
    """Return place, name and word of each name with a word to avoid."""
    avoid = words_to_avoid()
    return [
        (place, name, word)
        for place, name in names(modules)
        for word in {part.lower() for part in _PARTS.findall(name)} & avoid.keys()
    ]


def test_names_have_no_word_that_the_glossary_avoids(found: list[tuple[str, str, str]]) -> None:
    avoid = words_to_avoid()
    wrong = [
        f"{place}: {name}: say {avoid[word]}"
        for place, name, word in found
        if word not in OTHER_MEANINGS and name not in EXCEPTIONS
    ]

    assert wrong == []


def test_each_exception_is_still_needed(found: list[tuple[str, str, str]]) -> None:
    assert set(OTHER_MEANINGS) <= {word for _, _, word in found}
    assert set(EXCEPTIONS) <= {name for _, name, word in found if word not in OTHER_MEANINGS}
    assert len(words_to_avoid()) > 50
