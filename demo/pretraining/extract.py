"""Extraction of clean English passages from downloaded packages: plain text and short chat exchanges."""

from __future__ import annotations

import ast
import gzip
import html
import io
import json
import random
import re
import subprocess
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

Record = dict[str, Any]

_ASCII = str.maketrans(
    {
        "\u2018": "'",
        "\u2019": "'",
        "\u201c": '"',
        "\u201d": '"',
        "\u2013": "-",
        "\u2014": "-",
        "\u2026": "...",
        "\xa0": " ",
    }
)
_CODE_MARKS = (">>>", "::", "{", "}", "();", "==", "->", "</", "\\", "|", "http", "#", '="', "import ", "self.")


def clean(text: str) -> str:
    """Strip markup and collapse white space."""
    text = html.unescape(re.sub(r"<[^>]+>", " ", text)).translate(_ASCII)
    text = re.sub(r"!?\[([^\]]+)\]\([^)]*\)", r"\1", text)
    text = re.sub(r":[a-z:]+:`~?([^`<]+)[^`]*`", r"\1", text)
    text = re.sub(r"\(?https?://\S+\)?", "", text)
    text = re.sub(r"[`*]+", "", text)
    return re.sub(r"\s+", " ", text).strip()


def is_prose(text: str) -> bool:
    """Return whether the text is ASCII English sentences without code."""
    if len(text) < 4 or not text.isascii() or any(mark in text for mark in _CODE_MARKS):
        return False
    plain = sum(char.isalpha() or char in " .,'" for char in text)
    return plain / len(text) > 0.9


def snake(name: str) -> str:
    """Convert CamelCase, kebab-case and dotted names to snake_case."""
    name = re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name)
    name = re.sub(r"([A-Z]+)([A-Z][a-z])", r"\1_\2", name)
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


def chat(*turns: str) -> Record:
    """Build a chat record from alternating user and assistant turns."""
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[index % 2], "content": turn} for index, turn in enumerate(turns)]}


def first_sentence(text: str) -> str:
    """Return the first sentence of a passage."""
    return re.split(r"(?<=[.!?])\s", text, maxsplit=1)[0]


def described_name(name: str, doc: str) -> Iterator[Record]:
    """Yield a description and, if the name is readable, a description -> name exchange."""
    paragraphs = [clean(part) for part in re.split(r"\n\s*\n", doc)]
    paragraphs = [part for part in paragraphs if is_prose(part)]
    if not paragraphs:
        return
    label, summary = snake(name), first_sentence(paragraphs[0])
    if 2 <= len(label.split("_")) <= 7 and 3 <= len(summary.split()) <= 40 and not name.startswith("_"):
        yield chat(summary, label)
    text = " ".join(paragraphs)
    if len(text.split()) > len(summary.split()) + 5:
        yield {"text": text[:1200]}


def members(path: Path, suffix: str) -> Iterator[tuple[str, bytes]]:
    """Yield (name, content) of the archive members that end with the suffix."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as archive:
            for name in sorted(archive.namelist()):
                if name.endswith(suffix):
                    yield name, archive.read(name)
        return
    with tarfile.open(path) as archive:
        for member in sorted(archive.getmembers(), key=lambda item: item.name):
            handle = archive.extractfile(member) if member.name.endswith(suffix) else None
            if handle:
                yield member.name, handle.read()


def deb_file(path: Path, inner: str) -> bytes:
    """Return one file of a Debian package."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["dpkg", "-x", str(path), folder], check=True)
        return (Path(folder) / inner).read_bytes()


def parse_python(path: Path) -> Iterator[Record]:
    """Yield docstrings of functions, classes and fields."""
    for name, content in members(path, ".py"):
        if "test" in name.lower():
            continue
        try:
            tree = ast.parse(content)
        except (SyntaxError, ValueError):
            continue
        for node in ast.walk(tree):
            yield from _node_docs(node)


def _node_docs(node: ast.AST) -> Iterator[Record]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        yield from described_name(
            node.name, re.split(r"\n\s*(?::param|Args:|Parameters)", ast.get_docstring(node) or "")[0]
        )
    body = getattr(node, "body", None)
    if not isinstance(body, list):
        return
    for field, doc in pairwise(body):
        if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
            continue
        if isinstance(doc, ast.Expr) and isinstance(doc.value, ast.Constant) and isinstance(doc.value.value, str):
            yield from described_name(field.target.id, doc.value.value)


def parse_botocore(path: Path) -> Iterator[Record]:
    """Yield the operation and shape documentation of the AWS service models."""
    for name, content in members(path, "service-2.json.gz"):
        model = json.loads(gzip.decompress(content))
        for key, operation in sorted(model.get("operations", {}).items()):
            yield from described_name(key, operation.get("documentation", ""))
        for _, shape in sorted(model.get("shapes", {}).items()):
            for field, detail in sorted(shape.get("members", {}).items()):
                if name < "botocore/data/s":
                    yield from described_name(field, detail.get("documentation", ""))


def parse_chitchat(path: Path) -> Iterator[Record]:
    """Yield informal two-person conversations as multi-turn chats."""
    content = dict(members(path, "dataset.json"))["chitchat_dataset/dataset.json"]
    for _, conversation in sorted(json.loads(content).items()):
        turns = [clean(" ".join(part["text"] for part in turn)) for turn in conversation["messages"]]
        turns = [turn for turn in turns if turn and turn.isascii() and len(turn) < 400]
        for start in range(0, len(turns) - 1, 8):
            part = turns[start : start + 8]
            yield chat(*part[: len(part) // 2 * 2])


def parse_wordnet(path: Path) -> Iterator[Record]:
    """Yield glosses, example sentences and synonyms."""
    for part in ("verb", "adj", "adv", "noun"):
        for line in deb_file(path, f"usr/share/wordnet/data.{part}").decode("latin-1").splitlines():
            if not line.startswith(" "):
                yield from _synset(line)


def _synset(line: str) -> Iterator[Record]:
    head, gloss = line.split(" | ", 1)
    fields = head.split()
    lemmas = [re.sub(r"\(.*\)", "", word) for word in fields[4 : 4 + 2 * int(fields[3], 16) : 2]]
    definition = clean(re.split(r"; \"", gloss)[0])
    examples = [clean(text) for text in re.findall(r'"([^"]+)"', gloss)]
    if not is_prose(definition) or any(char.isupper() for char in lemmas[0]):
        return
    yield chat(definition, lemmas[0].lower())
    yield {"text": f"{', '.join(word.replace('_', ' ') for word in lemmas)}: {definition}"}
    for text in examples:
        if is_prose(text) and len(text.split()) > 3:
            yield {"text": text}


def parse_jargon(path: Path) -> Iterator[Record]:
    """Yield paragraphs of the Jargon File."""
    text = gzip.decompress(deb_file(path, "usr/share/dictd/jargon.dict.dz")).decode("utf-8", "replace")
    for paragraph in re.split(r"\n\s*\n", text):
        passage = clean(re.sub(r"[{}\[\]]", "", paragraph))
        if is_prose(passage) and len(passage.split()) > 8:
            yield {"text": passage}


def parse_chatterbot(path: Path) -> Iterator[Record]:
    """Yield English question and answer pairs."""
    for name, content in members(path, ".yml"):
        if "/english/" not in name:
            continue
        for turns in yaml.safe_load(content)["conversations"]:
            turns = [clean(str(turn)) for turn in turns]
            if len(turns) > 1 and all(is_prose(turn) for turn in turns):
                yield chat(*turns[: len(turns) // 2 * 2])


def parse_ovos(path: Path) -> Iterator[Record]:
    """Yield voice assistant utterances. Each intent file holds many phrasings of one request."""
    rng = random.Random(path.name)
    for name, content in members(path, ".intent"):
        if "/en-us/" not in name.lower():
            continue
        label = snake(Path(name).stem)
        for line in io.StringIO(content.decode("utf-8", "replace")):
            for _ in range(4):
                text = clean(_expand(line, rng)).replace("{", "").replace("}", "").replace("_", " ")
                if is_prose(text):
                    yield chat(text, label)


def _expand(template: str, rng: random.Random) -> str:
    """Sample one sentence of a template with (a|b) alternatives and [optional] parts."""
    pattern = re.compile(r"\(([^()\[\]]*)\)|\[([^()\[\]]*)\]")
    while match := pattern.search(template):
        choices = (match.group(1) if match.group(1) is not None else match.group(2)).split("|")
        choice = "" if match.group(2) is not None and rng.random() < 0.5 else rng.choice(choices)
        template = template[: match.start()] + choice + template[match.end() :]
    return template


def parse_home_assistant(path: Path) -> Iterator[Record]:
    """Yield smart home requests sampled from sentence templates."""
    rng = random.Random(path.name)
    data = json.loads(dict(members(path, "data/en.json"))["home_assistant_intents/data/en.json"])
    rules = data["expansion_rules"]
    for intent, detail in sorted(data["intents"].items()):
        label = snake(intent.removeprefix("Hass"))
        for sentence in [line for block in detail["data"] for line in block["sentences"]]:
            for _ in range(6):
                text = _expand_rules(sentence, rules, rng)
                if is_prose(text):
                    yield chat(text, label)


def _expand_rules(sentence: str, rules: dict[str, str], rng: random.Random) -> str:
    for _ in range(8):
        sentence = re.sub(r"<([a-z_]+)>", lambda match: f"({rules.get(match.group(1), match.group(1))})", sentence)
    sentence = re.sub(r"\{(?:[a-z_]+:)?([a-z_]+)\}", r"\1", sentence)
    return clean(_expand(sentence, rng).replace("_", " "))


PARSERS: dict[str, Callable[[Path], Iterator[Record]]] = {
    "python": parse_python,
    "botocore": parse_botocore,
    "chitchat": parse_chitchat,
    "wordnet": parse_wordnet,
    "jargon": parse_jargon,
    "chatterbot": parse_chatterbot,
    "ovos": parse_ovos,
    "home_assistant": parse_home_assistant,
}
