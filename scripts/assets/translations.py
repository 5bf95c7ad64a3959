"""The catalogues in `locale`: the texts of pages and mails in languages other than English.

`make translations` adds the texts that templates and code mark to each .po file, drops those that are gone, and writes
the .mo file, which Django reads. A text without a translation is shown in English.
"""

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import polib
from django.utils.translation.template import templatize

from scripts.assets.sentences import sentences

ROOT = Path(__file__).resolve().parents[2]
LOCALE = ROOT / "locale"
_STRING = r"""u?('(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*")"""
_TEMPLATE_CALL = re.compile(rf"(?:\b(?:gettext|ngettext)|_)\(\s*{_STRING}(?:\s*,\s*{_STRING})?")
_PYTHON_CALLS = {"gettext", "gettext_noop", "ngettext", "ngettext_lazy", "later"}


class Text(NamedTuple):
    """A text in English; `plural` is empty if the text has no number."""

    one: str
    plural: str = ""


def find_texts() -> dict[Text, list[str]]:
    """Return every text that templates and code mark for translation, with the files that contain it."""
    found: dict[Text, set[str]] = defaultdict(set)
    for path in sorted((ROOT / "templates").rglob("*.*")):
        for text in texts_of_template(path.read_text()):
            found[text].add(str(path.relative_to(ROOT)))
    for path in sorted((ROOT / "apps").rglob("*.py")):
        source = path.read_text()
        if "translation import" in source:
            for text in _texts_of_code(source):
                found[text].add(str(path.relative_to(ROOT)))
    for path, sentence in sentences():
        found[Text(sentence)].add(str(path.relative_to(ROOT)))
    return {text: sorted(paths) for text, paths in sorted(found.items(), key=lambda item: (min(item[1]), item[0]))}


def texts_of_template(source: str) -> list[Text]:
    """Return the texts that a template marks."""
    matches = _TEMPLATE_CALL.finditer(templatize(source))
    return [Text(ast.literal_eval(match[1]), ast.literal_eval(match[2] or "''")) for match in matches]


def _texts_of_code(source: str) -> list[Text]:
    texts = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _PYTHON_CALLS:
            words = [each.value for each in node.args if isinstance(each, ast.Constant) and isinstance(each.value, str)]
            texts += [Text(*words[: 2 if node.func.id.startswith("ngettext") else 1])] if words else []
    return texts


def read_catalogue(path: Path) -> polib.POFile:
    """Return the content of a .po file."""
    return polib.pofile(str(path), wrapwidth=0)


def key_of(entry: polib.POEntry) -> Text:
    """Return the text that an entry translates."""
    return Text(entry.msgid, entry.msgid_plural)


def updated(path: Path, texts: Mapping[Text, list[str]]) -> polib.POFile:
    """Return the content of a .po file with only these texts, each with its translation if there is one."""
    old, new = read_catalogue(path), polib.POFile(wrapwidth=0)
    new.header, new.metadata = old.header, old.metadata
    known = {key_of(entry): entry for entry in old}
    for text, files in texts.items():
        empty = {0: "", 1: ""} if text.plural else {}
        entry = known.get(text) or polib.POEntry(msgid=text.one, msgid_plural=text.plural, msgstr_plural=empty)
        entry.occurrences = [("\n#: ".join(files), "")]  # a line for each file, which merges better than one for all
        new.append(entry)
    return new


def main() -> int:
    texts = find_texts()
    for path in sorted(LOCALE.rglob("*.po")):
        catalogue = updated(path, texts)
        catalogue.save(str(path))
        catalogue.save_as_mofile(str(path.with_suffix(".mo")))
        missing = len(catalogue.untranslated_entries())
        print(f"{path.relative_to(ROOT)}: {missing} of {len(texts)} texts without a translation")
    return 0


if __name__ == "__main__":
    sys.exit(main())
