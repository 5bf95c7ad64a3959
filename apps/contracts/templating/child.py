"""`python -m apps.contracts.templating.child`: the child process that runs chat templates within limits.

It reads frames (four bytes of length, then msgpack) from standard input and answers each on standard output. A template
that uses too much processor time or memory ends this process; the parent starts another.
"""

import resource
import signal
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, BinaryIO

import jinja2
import msgspec

from apps.contracts.templating.environment import TEMPLATE_FAULTS, ChatTemplate, one_line
from apps.contracts.templating.layout import find_layout
from apps.contracts.templating.spans import NotPrefixStable, SpanFinder

LENGTH_BYTES = 4


class LoadedTemplate:
    """The result of one `load`: a template, its twin and its control tokens."""

    def __init__(self, source: str, twin: str, tokens: dict[str, str], control_tokens: list[str]) -> None:
        self._template = ChatTemplate(source, tokens)
        self._twin = ChatTemplate(twin, tokens) if twin else None
        self._control_tokens = control_tokens
        self._finder = SpanFinder(self._template, self._twin, control_tokens)

    def render(self, rows: list[dict[str, Any]]) -> list[object]:
        """Return [text, spans] or an error for each row."""
        render = self._finder.render
        return [_guarded(partial(render, row["messages"], row["tools"], row["trained"])) for row in rows]

    def prompt(self, messages: list[dict[str, object]], tools: list[dict[str, object]] | None) -> object:
        return _guarded(lambda: self._finder.render_prompt(messages, tools))

    def layout(self, roles: list[str], trained: list[int]) -> object:
        return find_layout(
            roles, trained, template=self._template, twin=self._twin, control_tokens=self._control_tokens
        )


def _guarded(render: Callable[[], object]) -> object:
    try:
        return render()
    except NotPrefixStable as error:
        return {"unstable": error.index}
    except TEMPLATE_FAULTS as error:
        return {"rejected": one_line(error)}


def limit_resources(memory_bytes: int) -> None:
    """Limit this process to this much address space, no writes to files and no core dump."""
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # `-B` is needed: the limit would truncate compiled modules
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def serve(requests: BinaryIO, replies: BinaryIO, *, limit_bytes: int) -> None:
    """Answer requests until the parent closes the pipe."""
    loaded: dict[str, LoadedTemplate] = {}
    while head := requests.read(LENGTH_BYTES):
        request = msgspec.msgpack.decode(requests.read(int.from_bytes(head, "big")))
        signal.setitimer(signal.ITIMER_PROF, request["cpu_seconds"])  # SIGPROF ends the process
        reply = msgspec.msgpack.encode(_answer(loaded, request))
        signal.setitimer(signal.ITIMER_PROF, 0)
        if len(reply) > limit_bytes:
            reply = msgspec.msgpack.encode({"too_long": len(reply)})
        replies.write(len(reply).to_bytes(LENGTH_BYTES, "big") + reply)
        replies.flush()


def _answer(loaded: dict[str, LoadedTemplate], request: dict[str, Any]) -> dict[str, object]:
    key = request["key"]
    if request["do"] == "load":
        try:
            loaded[key] = LoadedTemplate(*request["arguments"])
        except jinja2.TemplateError as error:
            return {"invalid": one_line(error)}
        return {}
    if key not in loaded:
        return {"unknown": key}
    return {"done": getattr(loaded[key], request["do"])(*request["arguments"])}


if __name__ == "__main__":
    memory_bytes, reply_bytes = (int(argument) for argument in sys.argv[1:3])
    limit_resources(memory_bytes)
    serve(sys.stdin.buffer, sys.stdout.buffer, limit_bytes=reply_bytes)
