"""Layouts: what a template does with a conversation's texts, found once per order of roles instead of once per row.

The template runs on stand-ins that record its operations on them. If it only writes them out, whole or stripped, the
rendered text of *any* such conversation is the same literals around other texts: that is its layout. A question of the
template about a text (`'</think>' in content`) is answered "no" and kept as a guard. The template itself renders rows
that fail a guard, and all rows if it uses a text in another way.
"""

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import jinja2
import jinja2.nodes
import jinja2.sandbox
import msgspec

from apps.contracts.templating.environment import TEMPLATE_FAULTS, ChatTemplate, make_environment
from apps.contracts.templating.spans import NotPrefixStable, SpanFinder

_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
_STAND_IN = re.compile(f"{_OPEN}([0-9]+){_CLOSE}")
_ALLOWED_FILTERS = {"trim", "default", "d", "string", "length", "count", "first", "last", "list"}
_ALLOWED_FILTERS |= {"selectattr", "rejectattr"}


class MessageText(msgspec.Struct, frozen=True, array_like=True):
    """The content of message `message`, stripped in these ways in order."""

    message: int
    strips: tuple[tuple[str, str | None], ...] = ()

    def of(self, contents: Sequence[str]) -> str:
        text = contents[self.message]
        for how, characters in self.strips:
            text = getattr(text, how)(characters)
        return text


class Guard(msgspec.Struct, frozen=True, array_like=True):
    """A question of the template about a text that was answered "no"; `is_empty` has no argument."""

    text: MessageText
    question: str  # "contains" | "startswith" | "endswith" | "equals" | "is_empty"
    argument: str = ""

    def holds(self, contents: Sequence[str]) -> bool:
        """Return whether "no" is true for these contents."""
        text = self.text.of(contents)
        if self.question == "contains":
            return self.argument not in text
        if self.question == "equals":
            return text != self.argument
        if self.question == "is_empty":
            return bool(text)
        return not getattr(text, self.question)(self.argument)


class Layout(msgspec.Struct, frozen=True, array_like=True):
    """Literals around texts: literals[0] texts[0] literals[1] …

    A span's edges are (literal, offset).
    """

    literals: tuple[str, ...]
    texts: tuple[MessageText, ...]
    guards: tuple[Guard, ...]
    spans: tuple[tuple[tuple[int, int], tuple[int, int]], ...]


class _Untraceable(BaseException):
    """The template used a text in a way that a layout cannot express. It escapes jinja's `except Exception`."""


class _Trace:
    """The stand-ins of one rendering, and the guards collected."""

    def __init__(self) -> None:
        self.texts: list[MessageText] = []
        self.guards: dict[Guard, None] = {}

    def stand_in(self, text: MessageText) -> "_StandIn":
        if text not in self.texts:
            self.texts.append(text)
        return _StandIn(f"{_OPEN}{self.texts.index(text)}{_CLOSE}", self, text)


class _StandIn(str):
    """A text that is not known yet; `text` is None once it is joined with others."""

    trace: _Trace
    text: MessageText | None

    def __new__(cls, value: str, trace: _Trace, text: MessageText | None = None) -> "_StandIn":
        self = super().__new__(cls, value)
        self.trace, self.text = trace, text
        return self

    def __str__(self) -> str:
        return str.__str__(self)

    def __add__(self, other: object) -> "_StandIn":
        return self._joined(other, lambda: str.__str__(self) + str.__str__(other))

    def __radd__(self, other: object) -> "_StandIn":
        return self._joined(other, lambda: str.__str__(other) + str.__str__(self))

    def _joined(self, other: object, join: Callable[[], str]) -> "_StandIn":
        if not isinstance(other, str):
            raise TypeError("can only concatenate str")
        return _StandIn(join(), self.trace)

    def __bool__(self) -> bool:
        if self.text is not None:
            self._ask("is_empty", "")
        return True

    def __contains__(self, item: object) -> bool:
        return self._ask("contains", item)

    def __eq__(self, other: object) -> bool:
        return self._ask("equals", other) if isinstance(other, str) else False

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = None  # type: ignore[assignment]

    def startswith(self, prefix: object, *bounds: object) -> bool:
        return self._ask("startswith", prefix, *bounds)

    def endswith(self, suffix: object, *bounds: object) -> bool:
        return self._ask("endswith", suffix, *bounds)

    def strip(self, characters: object = None) -> "_StandIn":
        return self._stripped("strip", characters)

    def lstrip(self, characters: object = None) -> "_StandIn":
        return self._stripped("lstrip", characters)

    def rstrip(self, characters: object = None) -> "_StandIn":
        return self._stripped("rstrip", characters)

    def _stripped(self, how: str, characters: object) -> "_StandIn":
        if self.text is None or isinstance(characters, _StandIn) or not isinstance(characters, str | None):
            raise _Untraceable
        strips = (*self.text.strips, (how, characters))
        return self.trace.stand_in(MessageText(self.text.message, strips))

    def _ask(self, question: str, argument: object, *bounds: object) -> bool:
        if self.text is None or bounds or not isinstance(argument, str) or isinstance(argument, _StandIn):
            raise _Untraceable
        self.trace.guards[Guard(self.text, question, argument)] = None
        return False


def _forbid(*_: object, **__: object) -> Any:
    raise _Untraceable


for _name in set(dir(str)) - set(vars(_StandIn)) - set(dir(object)) - {"__getnewargs__"}:
    setattr(_StandIn, _name, _forbid)
for _name in ("__lt__", "__le__", "__gt__", "__ge__", "__format__"):
    setattr(_StandIn, _name, _forbid)


class _TracingSandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The same sandbox; it refuses functions that would turn a stand-in into an untraced string."""

    intercepted_binops = frozenset({"%", "*"})

    def call(self, context: jinja2.runtime.Context, obj: object, /, *args: object, **kwargs: object) -> Any:
        owner = getattr(obj, "__self__", None)
        if _holds_stand_in((args, kwargs)) and not isinstance(owner, _StandIn) and obj is not jinja2.utils.Namespace:
            raise _Untraceable
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: object, right: object) -> Any:
        if _holds_stand_in((left, right)):
            raise _Untraceable
        return super().call_binop(context, operator, left, right)


def _holds_stand_in(value: object, depth: int = 5) -> bool:
    if isinstance(value, _StandIn):
        return True
    if isinstance(value, str | int | float | None | jinja2.Undefined):
        return False
    if depth == 0 or not isinstance(value, list | tuple | dict):
        return True  # a value that cannot be inspected may contain one
    items = value.values() if isinstance(value, dict) else value
    return any(_holds_stand_in(item, depth - 1) for item in items)


@functools.lru_cache(maxsize=64)
def _compile_for_tracing(source: str) -> jinja2.Template | None:
    """Return the template for stand-ins, None if it builds strings untraced (macros, `~`, captures)."""
    environment = make_environment(_TracingSandbox)
    hidden: tuple[type[jinja2.nodes.Node], ...] = (
        jinja2.nodes.Concat,
        jinja2.nodes.Macro,
        jinja2.nodes.CallBlock,
        jinja2.nodes.AssignBlock,
        jinja2.nodes.FilterBlock,
    )
    if any(True for _ in environment.parse(source).find_all(hidden)):
        return None
    for name, function in environment.filters.items():
        if name not in _ALLOWED_FILTERS:
            environment.filters[name] = _watched(function)
    return environment.from_string(source)


def _watched(function: Callable[..., Any]) -> Callable[..., Any]:
    passes_context = hasattr(function, "jinja_pass_arg")

    @functools.wraps(function)
    def watched(*args: object, **kwargs: object) -> Any:
        if _holds_stand_in((args[1:] if passes_context else args, kwargs)):
            raise _Untraceable
        return function(*args, **kwargs)

    return watched


class _TracedTemplate(ChatTemplate):
    """A chat template that runs on stand-ins."""

    def __init__(self, source: str, tokens: dict[str, str], template: jinja2.Template) -> None:
        self.source, self.tokens, self._template = source, tokens, template


def find_layout(
    roles: Sequence[str],
    trained: Sequence[int],
    *,
    template: ChatTemplate,
    twin: ChatTemplate | None,
    control_tokens: Sequence[str],
) -> Layout | None:
    """Return the layout of conversations with these roles, None if there is none."""
    finder = _traced_finder(template, twin, control_tokens)
    if finder is None:
        return None
    trace = _Trace()
    messages = [{"role": role, "content": trace.stand_in(MessageText(index))} for index, role in enumerate(roles)]
    try:
        text, spans = finder.render(messages, None, trained)
    except (_Untraceable, NotPrefixStable, *TEMPLATE_FAULTS):
        return None
    literals: list[str] = []
    texts: list[MessageText] = []
    starts: list[int] = []  # where each literal starts in the text
    position = 0
    for found in _STAND_IN.finditer(text):
        literals.append(text[position : found.start()])
        starts.append(position)
        texts.append(trace.texts[int(found.group(1))])
        position = found.end()
    literals.append(text[position:])
    starts.append(position)
    edges = [(_edge(start, starts, literals), _edge(end, starts, literals)) for start, end in spans]
    known = tuple((start, end) for start, end in edges if start is not None and end is not None)
    if len(known) < len(edges):
        return None
    return Layout(tuple(literals), tuple(texts), tuple(trace.guards), known)


def _traced_finder(
    template: ChatTemplate, twin: ChatTemplate | None, control_tokens: Sequence[str]
) -> SpanFinder | None:
    compiled = [_compile_for_tracing(each.source) for each in (template, twin) if each is not None]
    if any(each is None for each in compiled):
        return None
    traced = [
        _TracedTemplate(each.source, each.tokens, done)
        for each, done in zip((template, twin), compiled, strict=False)
        if each is not None and done is not None
    ]
    return SpanFinder(traced[0], traced[1] if len(traced) > 1 else None, control_tokens)


def _edge(position: int, starts: Sequence[int], literals: Sequence[str]) -> tuple[int, int] | None:
    for index, (start, literal) in enumerate(zip(starts, literals, strict=True)):
        if start <= position <= start + len(literal):
            return index, position - start
    return None
