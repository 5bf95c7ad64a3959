"""Compile JSON schemas for the gateway within limits: `python -m apps.interfaces.gateway.requests.grammar_child`.

Writes an empty frame to standard output when it is ready. Then it reads frames (four bytes of length, then a schema as
JSON) from standard input and answers each with a `Verdict`. A schema that uses too much processor time or memory ends
this process, and the parent starts another.
"""

import os
import re
import resource
import signal
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec
from llguidance import LLMatcher

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

LENGTH_BYTES = 4
MEMORY_BYTES = 512 * 1024 * 1024
CPU_SECONDS = 0.2
# The compile options of engines (gpu_workers/engine/command.py), beside those the gateway writes into the schema.
_OPTIONS: "JsonCompileOptions" = {"whitespace_flexible": False}

_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_SINGLE = ("items", "additionalProperties")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_MAX_TRIES = 64
_MAX_REASON = 200


class Verdict(msgspec.Struct, array_like=True):
    """The reason and the place if a schema cannot be compiled; the reason is empty if it can.

    `seconds`: processor time used.
    """

    reason: str = ""
    place: str = ""
    seconds: float = 0.0


def judge(raw: bytes) -> Verdict:
    fault = _fault_of(raw.decode())
    if not fault:
        return Verdict()
    return Verdict(_in_plain_words(fault), ".".join(_place_of(msgspec.json.decode(raw), fault)))


def _fault_of(schema: str) -> str:
    """Return the compiler's message, or an empty string if the schema is valid."""
    try:
        grammar = LLMatcher.grammar_from_json_schema(schema, defaults=_OPTIONS)
        is_wrong, messages = LLMatcher.validate_grammar_with_warnings(grammar, None)
    except BaseException as error:  # noqa: BLE001 - a panic of the compiler is not an Exception
        return f"{error}" or "it cannot be compiled"
    return messages[0] if is_wrong else ""


# --- Location of a fault ----------------------------------------------------------------------------------------------


def _place_of(schema: dict[str, object], fault: str) -> list[str]:
    """Return the path to the innermost schema that has the same fault when compiled alone."""
    shared = {name: schema[name] for name in ("$defs", "definitions") if isinstance(schema.get(name), dict)}
    wanted, path, tries = _headline(fault), [], 0
    waiting = _schemas_in(schema)
    while (found := next(waiting, None)) is not None and tries < _MAX_TRIES:
        tries += 1
        steps, inner = found
        if _headline(_fault_of(msgspec.json.encode(shared | inner).decode())) == wanted:
            path += steps
            waiting = _schemas_in(inner)
    return path


def _schemas_in(schema: dict[str, object]) -> Iterator[tuple[list[str], dict[str, object]]]:
    named = [([key, name], value) for key in _MAPS for name, value in _items(schema.get(key))]
    single = [([key], schema.get(key)) for key in _SINGLE]
    listed = [([key, str(n)], value) for key in _LISTS for n, value in enumerate(_list(schema.get(key)))]
    return ((steps, value) for steps, value in named + single + listed if isinstance(value, dict))


def _items(value: object) -> list[tuple[str, object]]:
    return list(value.items()) if isinstance(value, dict) else []


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _headline(fault: str) -> str:
    return fault.partition("\n  while processing")[0]


# --- Wording of a fault -----------------------------------------------------------------------------------------------

_QUOTED = re.compile(r'"([^"]+)"')
_WORDS = [
    (re.compile(r"Invalid type: (.+)"), r"`\1` is not a type; use string, number, integer, boolean, object or array"),
    (re.compile(r"Unknown format: (.+)"), r"the format `\1` is not supported. Remove `format`"),
    (re.compile(r"regex parse error:.*error: (.+)", re.DOTALL), r"its pattern is not supported (\1). Simplify it"),
    (re.compile(r"oneOf constraints.*"), "`oneOf` is not supported here. Use `anyOf`"),
    (re.compile(r"Pointer '(.*)' does not exist"), r"`$ref` points to `#\1`, which this schema does not have"),
    (re.compile(r"Resource '.*"), "`$ref` may only point into this schema"),
    (re.compile(r"Unsatisfiable schema: (.+)"), r"no value fits it: \1"),
    (re.compile(r"schema too large.*"), "it expands to too many cases. Use fewer or smaller `allOf` and `anyOf`"),
]  # fmt: skip


def _in_plain_words(fault: str) -> str:
    text = _headline(fault).strip()
    if text.startswith("Unimplemented keys:"):
        names = ", ".join(f"`{name}`" for name in _QUOTED.findall(text))
        return f"{names} cannot be enforced here. Remove it and check the answer yourself"
    for pattern, words in _WORDS:
        if found := pattern.match(text):
            return found.expand(words)[:_MAX_REASON]
    return text.partition("\n")[0][:_MAX_REASON].rstrip(".")


def serve() -> None:
    """Answer requests until the parent closes the pipe."""
    requests, replies = sys.stdin.buffer, sys.stdout.buffer
    replies.write(bytes(LENGTH_BYTES))
    replies.flush()
    while head := requests.read(LENGTH_BYTES):
        raw = requests.read(int.from_bytes(head, "big"))
        began = time.process_time()
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)  # SIGPROF ends the process
        verdict = judge(raw)
        signal.setitimer(signal.ITIMER_PROF, 0)
        verdict.seconds = time.process_time() - began
        reply = msgspec.json.encode(verdict)
        replies.write(len(reply).to_bytes(LENGTH_BYTES, "big") + reply)
        replies.flush()


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(10)  # the gateway's own process comes first
    serve()
