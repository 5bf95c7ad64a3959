"""Every text of a page can be translated, and the German catalogue is complete."""

import re
from collections.abc import Iterator

import pytest

from scripts.assets.translations import LOCALE, ROOT, find_texts, key_of, read_catalogue

CATALOGUES = sorted(LOCALE.rglob("*.po"))
# Templates that show code, classes or the examples of the style guide; new pages may wait here for their marks.
UNMARKED = {
    "cotton/button.html",
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


def _unmarked(source: str, suffix: str) -> Iterator[str]:
    plain = _CODE.sub("", _DJANGO.sub("\0", _MARKED.sub("", source)))
    if suffix == ".txt":
        plain = re.sub("\0/\\S*", "", plain)  # addresses
    for tag in _TAG.findall(plain):
        yield from filter(_has_words, _ATTRIBUTES.findall(tag))
    yield from filter(_has_words, re.split("\0", _TAG.sub("\0", plain)))


def _has_words(text: str) -> bool:
    return any(word.lower() not in SAME for word in re.findall(r"[A-Za-z]{2,}", re.sub(r"&\w+;|\S+@\S+", " ", text)))
