"""Every text of a page can be translated, and the German catalogue is complete."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator

import pytest

from scripts.assets.sentences import text_of
from scripts.assets.translations import LOCALE, ROOT, find_texts, key_of, read_catalogue

CATALOGUES = sorted(LOCALE.rglob("*.po"))
# Templates that show code, classes or the examples of the style guide; new pages may wait here for their marks.
UNMARKED = {
    "cotton/button.html",
    "staff/_live.html",
    "wizard/parts/live_attrs.html",
    *(f"shell/styleguide/{path.name}" for path in (ROOT / "templates/shell/styleguide").iterdir()),
}
# Names, units and code, which are the same in every language.
SAME = {
    "gib",
    "json",
    "csv",
    "gpu",
    "lora",
    "id",
    "amp",
    "wandb",
    "html",
    "esc",
    "ctrl",
    "page",
    "narrow",
    "tok",
    "jsonl",
    "sha",
}
# Errors that only programs see, or that come before the reader's language is known.
FOR_PROGRAMS = {
    "apps/accounts/login/bearer_keys.py": "API keys",
    "apps/billing/ledger.py": "a mistake of ours, never of a customer",
    "apps/core/database/idempotency.py": "a header of the API",
    "apps/core/http/asgi.py": "bodies too large or too slow, before the language is known",
    "apps/core/http/body_limits.py": "bodies too large, before the language is known",
    "apps/core/http/json_bodies.py": "bodies of the API and of workers",
    "apps/core/http/turns.py": "machines that call too often",
    "apps/core/objects": "signed links, which programs follow",
    "apps/datasets/validation/formats.py": "the command line too, without Django; pages show them through `translated`",
    "apps/finetuning/pools/rehearsals.py": "workers",
    "apps/finetuning/results/examinations.py": "workers",
    "apps/finetuning/conversions/leases.py": "workers",
    "apps/finetuning/runs/endings.py": "workers",
    "apps/finetuning/runs/leases.py": "workers",
    "apps/finetuning/runs/members.py": "workers",
    "apps/finetuning/runs/reports.py": "workers",
    "apps/finetuning/runs/uploads.py": "workers",
    "apps/interfaces/api": "the API, which is in English",
    "apps/interfaces/gateway": "inference, whose answers are in English",
    "apps/interfaces/web/edge": "limits of the front door, before the language is known",
    "apps/interfaces/worker_api": "workers",
    "apps/payments/stripe/gateway.py": "Stripe's webhooks",
    "apps/serving/evals": "the API: pages only list and show evals",
}
_ATTRIBUTES = re.compile(r'\s(?:title|label|placeholder|aria-label|alt|caption|data-label|confirm|keep)="([^"]*)"')
_MARKED = re.compile(r"\{% blocktranslate .*?\{% endblocktranslate %\}|\{% comment %\}.*?\{% endcomment %\}", re.DOTALL)
_DJANGO = re.compile(r"\{%.*?%\}|\{\{.*?\}\}|\{#.*?#\}", re.DOTALL)
_CODE = re.compile(r"<(script|style|svg|pre|code|kbd|c-data\.code)\b.*?</\1>", re.DOTALL)
_TAG = re.compile(r"""<[a-zA-Z/!](?:"[^"]*"|'[^']*'|[^>"'])*>""")
_PLACEHOLDER = re.compile(r"%\(\w+\)s|\{\w+\}")


@pytest.mark.parametrize("path", CATALOGUES, ids=lambda path: path.parts[-3])
def test_every_text_is_translated_and_keeps_its_placeholders(path):
    catalogue, texts = read_catalogue(path), find_texts()
    translations = {key_of(entry): [entry.msgstr, *entry.msgstr_plural.values()] for entry in catalogue}
    translated = {key_of(entry) for entry in catalogue.translated_entries()}

    missing = [text.one for text in texts if text not in translated]
    unknown = [
        words
        for text, forms in translations.items()
        for words in forms
        if not set(_PLACEHOLDER.findall(words)) <= set(_PLACEHOLDER.findall(text.one + text.plural))
    ]
    assert not missing, "run `make translations`, translate the empty texts in locale, and run it again"
    assert not unknown and not translations.keys() - texts.keys()


@pytest.mark.parametrize("path", CATALOGUES, ids=lambda path: path.parts[-3])
def test_the_compiled_catalogue_is_that_of_the_source(path):
    assert path.with_suffix(".mo").read_bytes() == read_catalogue(path).to_binary(), "run `make translations`"


def test_templates_have_no_text_that_cannot_be_translated():
    root = ROOT / "templates"
    found = {
        f"{name}: {' '.join(text.split())}"
        for path in root.rglob("*.*")
        if (name := str(path.relative_to(root))) not in UNMARKED
        for text in _unmarked(path.read_text(), path.suffix)
    }

    assert not found, "mark them with {% translate %} or {% blocktranslate %}"


def test_domain_errors_have_texts_that_can_be_translated():
    modules = {path: ast.parse(path.read_text()) for path in (ROOT / "apps").rglob("*.py")}
    errors = _domain_errors(modules.values())
    found = {
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for path, module in modules.items()
        for line, text in _plain_messages(module, errors)
    }
    unused = {path for path in FOR_PROGRAMS if not any(each.startswith(path) for each in found)}
    found = {each for each in found if not each.startswith(tuple(FOR_PROGRAMS))}

    assert not unused
    assert not found, 'give them gettext("…") % {…}: not an f-string, which would be put together before it'


def test_a_message_is_found_wherever_it_was_made():
    source = """
def refuse(name):
    raise NotFound(f"There is no {name}.")
def refuse_later(name):
    text = "Not now." if name else "Never."
    raise InvalidValue(text, param="name")
def refuse_in_german(name):
    text = gettext("There is no %(name)s.") % {"name": name}
    raise NotFound(text)
"""
    found = list(_plain_messages(ast.parse(source), {"NotFound", "InvalidValue"}))

    assert found == [(3, "There is no %(name)s."), (6, "Not now."), (6, "Never.")]


def _unmarked(source: str, suffix: str) -> Iterator[str]:
    plain = _CODE.sub("", _DJANGO.sub("\0", _MARKED.sub("", source)))
    if suffix == ".txt":
        plain = re.sub("\0/\\S*", "", plain)  # addresses
    for tag in _TAG.findall(plain):
        yield from filter(_has_words, _ATTRIBUTES.findall(tag))
    yield from filter(_has_words, re.split("\0", _TAG.sub("\0", plain)))


def _has_words(text: str) -> bool:
    return any(word.lower() not in SAME for word in re.findall(r"[A-Za-z]{2,}", re.sub(r"&\w+;|\S+@\S+", " ", text)))


def _domain_errors(modules: Iterable[ast.Module]) -> set[str]:
    """Return the names of DomainError and of every class made of it."""
    classes = [node for module in modules for node in ast.walk(module) if isinstance(node, ast.ClassDef)]
    errors = {"DomainError"}
    while more := {each.name for each in classes if errors & {ast.unparse(base) for base in each.bases}} - errors:
        errors |= more
    return errors


def _plain_messages(module: ast.Module, errors: set[str]) -> Iterator[tuple[int, str]]:
    """Yield the line and text of each error made with a string that no translation was asked for."""
    for function in ast.walk(module):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Module):
            continue
        own, values = list(_own_nodes(function)), defaultdict(list)
        for node in own:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                values[node.targets[0].id].append(node.value)
        for node in own:
            if isinstance(node, ast.Call) and ast.unparse(node.func) in errors and node.args:
                message = node.args[0]
                given = values[message.id] if isinstance(message, ast.Name) else [message]
                texts = [text for value in given for text in _strings(value)]
                yield from ((node.lineno, text) for text in texts if _has_words(_PLACEHOLDER.sub("", text)))


def _own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a function, without those of the functions in it."""
    for child in ast.iter_child_nodes(function):
        yield child
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _own_nodes(child)


def _strings(value: ast.AST) -> Iterator[str]:
    """Yield the strings that a message is made of, except those that a call such as `gettext` returns."""
    if isinstance(value, ast.Constant | ast.JoinedStr):
        yield text_of(value)
    elif isinstance(value, ast.BinOp) and isinstance(value.op, ast.Mod):
        yield from _strings(value.left)
    elif isinstance(value, ast.BinOp | ast.IfExp | ast.BoolOp):
        for child in ast.iter_child_nodes(value):
            yield from _strings(child)
