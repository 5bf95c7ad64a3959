"""The open model that is suggested in place of another service's, from the catalogue of the installation."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# By the beginning of the name, the longest first. The first one in the catalogue is suggested.
_SMALL = ("qwen3-4b", "llama-3.2-3b", "gemma-3-4b-it", "qwen2.5-3b", "phi-4-mini-instruct")
_MIDDLE = ("qwen3-8b", "llama-3.1-8b", "gemma-3-12b-it", "gemma-2-9b", "qwen2.5-7b", "mistral-7b-v0.3")
_LARGE = ("qwen3-32b", "llama-3.3-70b", "llama-3.1-70b", "qwen2.5-32b", "gemma-3-27b-it", "gpt-oss-20b", "qwen3-14b")
SUGGESTIONS: dict[str, tuple[tuple[str, ...], str]] = {
    "gpt-4.1-nano": (_SMALL, "a small, fast model"),
    "gpt-4.1-mini": (_MIDDLE, "a model of about 8 billion parameters"),
    "gpt-4o-mini": (_MIDDLE, "a model of about 8 billion parameters"),
    "gpt-3.5-turbo": (_MIDDLE, "a model of about 8 billion parameters"),
    "gpt-4.1": (_LARGE, "a large model"),
    "gpt-4o": (_LARGE, "a large model"),
    "gpt-4": (_LARGE, "a large model"),
    "davinci-002": (_MIDDLE, "a model of about 8 billion parameters"),
    "babbage-002": (("llama-3.2-1b", "qwen3-1.7b", "qwen2.5-1.5b", *_SMALL), "a very small model"),
}


@dataclass(frozen=True)
class Suggestion:
    """A base model here, or None with the reason why there is none."""

    model: str | None
    reason: str


def suggest(source: str, *, catalogue: Sequence[str], chosen: Mapping[str, str]) -> Suggestion:
    """Return the base model for another service's model: the chosen one, one of the same name, or the suggested one."""
    usual = _longest(source, SUGGESTIONS)
    key = _longest(source, chosen)
    if key is not None and len(key) >= len(usual or ""):  # a choice for gpt-4o is none for gpt-4o-mini
        name = _find(chosen[key], catalogue)
        return Suggestion(name, "you chose it" if name else f"{chosen[key]} is not in the catalogue")
    if name := _find(source, catalogue):
        return Suggestion(name, _relation(name, source))
    candidates, size = SUGGESTIONS[usual] if usual else ((), "")
    for candidate in candidates:
        if name := _find(candidate, catalogue):
            return Suggestion(name, f"{size}, as {usual} is meant to be used; compare both on your held-out rows")
    return Suggestion(
        None, f"no model of the catalogue is suggested for {source}: choose one with --map {source}=MODEL"
    )


def _longest(source: str, keys: Mapping[str, object]) -> str | None:
    """Return the longest key that is the name or begins it, up to a hyphen."""
    wanted = source.lower()
    found = [key for key in keys if wanted == key.lower() or wanted.startswith(f"{key.lower()}-")]
    return max(found, key=len, default=None)


def _find(wanted: str, catalogue: Sequence[str]) -> str | None:
    """Return the name in the catalogue: of the same text, else of the same last part, else its instruct version."""
    short = _short(wanted)
    ranks = [
        (name.lower() != wanted.lower(), tail != short, name)
        for name in catalogue
        if _untuned(tail := _short(name)) == _untuned(short)
    ]
    return min(ranks)[2] if ranks else None


def _relation(name: str, source: str) -> str:
    """Return what the model of the catalogue is to the source."""
    tail, short = _short(name), _short(source)
    if tail == short:
        return "the same model"
    return "its instruct version" if len(tail) > len(short) else "its base version"


def _short(name: str) -> str:
    """Return the last part of a name in one spelling: without Hugging Face's and Together's endings."""
    short = name.lower().rpartition("/")[2].removeprefix("meta-").removesuffix("-reference").replace("___", ".")
    short = re.sub(r"(-unsloth)?-bnb-4bit$|-hf$", "", short)
    return re.sub(r"(?<=\d)p(?=\d)", ".", re.sub(r"-v(?=\d)", "-", short))  # Fireworks: llama-v3p1-8b-instruct


def _untuned(short: str) -> str:
    """Return the name of the model before it was tuned to follow instructions."""
    return re.sub(r"-(instruct|it)(?=-|$)", "", short)
