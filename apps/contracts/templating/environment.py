"""The environment of a chat template, as in transformers and vLLM, in jinja's immutable sandbox.

Only the child process runs it.
"""

import datetime
import functools
import json
from collections.abc import Sequence
from typing import NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

# A fixed date for templates with `strftime_now`, so that a run does not change from day to day: Llama 3's own fallback.
TEMPLATE_DATE = datetime.datetime(2024, 7, 26)

# Unicode noncharacters, refused in rows: they mark places in a rendered text and are removed again.
GENERATION_START, GENERATION_END = "\ufdd8", "\ufdd9"
MARKS = tuple(chr(code) for code in range(0xFDD0, 0xFDF0))
Span = tuple[int, int]

TEMPLATE_FAULTS = (
    jinja2.TemplateError,
    ArithmeticError,
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    RecursionError,
)


class _GenerationTag(jinja2.ext.Extension):
    """The tag `{% generation %}…{% endgeneration %}` around what the model writes; two marks enclose its output."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        start, end = (
            jinja2.nodes.Output([jinja2.nodes.TemplateData(mark)]) for mark in (GENERATION_START, GENERATION_END)
        )
        return jinja2.nodes.Scope([start, *body, end]).set_lineno(line)


def make_environment(kind: type[jinja2.sandbox.SandboxedEnvironment]) -> jinja2.sandbox.SandboxedEnvironment:
    """Return an environment like that of `apply_chat_template`, of this sandbox class."""
    environment = kind(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = TEMPLATE_DATE.strftime
    return environment


class ChatTemplate:
    """A compiled template with the special tokens that it may use."""

    def __init__(self, source: str, tokens: dict[str, str]) -> None:
        self.source = source
        self.tokens = tokens
        self._template = compile_template(source)

    def render(
        self,
        messages: Sequence[dict[str, object]],
        tools: list[dict[str, object]] | None = None,
        *,
        add_generation_prompt: bool = False,
    ) -> tuple[str, list[Span]]:
        """Return the text and the spans that the template marks as written by the model. Raises TEMPLATE_FAULTS."""
        return take_out_marks(
            self._template.render(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self.tokens,
            )
        )


@functools.lru_cache(maxsize=64)
def compile_template(source: str) -> jinja2.Template:
    """Compile with jinja's own sandbox. Raises jinja2.TemplateError."""
    return make_environment(jinja2.sandbox.ImmutableSandboxedEnvironment).from_string(source)


def take_out_marks(marked: str) -> tuple[str, list[Span]]:
    """Return the text without generation marks, and the spans they enclosed, with adjacent spans joined."""
    spans: list[Span] = []
    parts: list[str] = []
    position = 0
    for index, piece in enumerate(marked.split(GENERATION_START)):
        inside, _, after = piece.partition(GENERATION_END) if index else ("", "", piece)
        if index and spans and spans[-1][1] == position:
            spans[-1] = (spans[-1][0], position + len(inside))
        elif index:
            spans.append((position, position + len(inside)))
        parts += [inside, after]
        position += len(inside) + len(after)
    return "".join(parts), [span for span in spans if span[0] < span[1]]


def one_line(error: Exception) -> str:
    """Return an exception's message on one line of at most 200 characters."""
    return " ".join(str(error).split())[:200] or type(error).__name__


def raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
