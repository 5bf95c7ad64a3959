"""The catalogues of `locale`: what pages and mails say, in languages other than English.

`make translations` adds the texts that templates and code mark to each .po file, drops those that are gone, and writes
the .mo file, which Django reads. It needs no program beyond Python. A text without a translation is shown in English.
"""

import ast
import re
import struct
import sys
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

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


class Catalogue(NamedTuple):
    """A .po file: its comment, its header, and each text's translation, one for each plural form."""

    comment: str
    header: str
    translations: dict[Text, list[str]]


def find_texts() -> dict[Text, list[str]]:
    """Return every text that templates and code mark for translation, with the files it is in."""
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


def read_catalogue(path: Path) -> Catalogue:
    """Return the content of a .po file."""
    comment, header, translations = "", "", {}
    for block in path.read_text().split("\n\n"):
        fields: dict[str, str] = {}
        name = ""
        for line in block.splitlines():
            if line.startswith("#"):
                continue
            keyword, _, value = line.partition(" ")
            if line.startswith('"'):
                fields[name] += ast.literal_eval(line)
            else:
                name, fields[keyword] = keyword, ast.literal_eval(value)
        if fields.get("msgid"):
            words = [fields[each] for each in sorted(fields) if each.startswith("msgstr")]
            translations[Text(fields["msgid"], fields.get("msgid_plural", ""))] = words
        elif fields:
            comment = "\n".join(line for line in block.splitlines() if line.startswith("#"))
            header = fields["msgstr"]
    return Catalogue(comment, header, translations)


def write_catalogue(path: Path, catalogue: Catalogue, places: dict[Text, list[str]]) -> None:
    """Write a .po file with these texts, each with its translation, if there is one."""
    lines = "\n".join(_quote(line + "\n") for line in catalogue.header.splitlines())
    blocks = [f'{catalogue.comment}\nmsgid ""\nmsgstr ""\n{lines}']
    for text, files in places.items():
        words = catalogue.translations.get(text, [""] * (2 if text.plural else 1))
        rows = [*(f"#: {file}" for file in files), f"msgid {_quote(text.one)}"]
        if text.plural:
            rows += [f"msgid_plural {_quote(text.plural)}"]
            rows += [f"msgstr[{number}] {_quote(word)}" for number, word in enumerate(words)]
        else:
            rows += [f"msgstr {_quote(words[0])}"]
        blocks.append("\n".join(rows))
    path.write_text("\n\n".join(blocks) + "\n")


def compiled(catalogue: Catalogue) -> bytes:
    """Return the .mo file of a catalogue; texts without a translation are left out."""
    words = {"": catalogue.header}
    for text, forms in catalogue.translations.items():
        if all(forms):
            words["\0".join(filter(None, text))] = "\0".join(forms)
    pairs = [(key.encode(), value.encode()) for key, value in sorted(words.items())]
    start = 28 + 16 * len(pairs)
    keys, values, body = b"", b"", b""
    for index in (0, 1):
        for pair in pairs:
            entry = struct.pack("<II", len(pair[index]), start + len(body))
            body += pair[index] + b"\0"
            keys, values = (keys + entry, values) if index == 0 else (keys, values + entry)
    head = struct.pack("<7I", 0x950412DE, 0, len(pairs), 28, 28 + 8 * len(pairs), 0, 0)
    return head + keys + values + body


def _quote(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


def main() -> int:
    texts = find_texts()
    for path in sorted(LOCALE.rglob("*.po")):
        write_catalogue(path, read_catalogue(path), texts)
        catalogue = read_catalogue(path)
        path.with_suffix(".mo").write_bytes(compiled(catalogue))
        missing = sum(not all(words) for words in catalogue.translations.values())
        print(f"{path.relative_to(ROOT)}: {missing} of {len(texts)} texts without a translation")
    return 0


if __name__ == "__main__":
    sys.exit(main())
