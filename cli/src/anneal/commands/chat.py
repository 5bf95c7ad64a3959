"""`anneal chat`: talk to a model; the answer appears as it is made."""

import json
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Annotated, Any

import typer

from anneal.api import Api, foreign_answer
from anneal.failures import ExitCode, Failure
from anneal.output import AsJson, emit_line, notice, plain
from anneal.session import session_of
from anneal.texts import STANDARD_INPUT, text_of


def chat(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="A base model, a fine-tuned model or an alias.")],
    message: Annotated[str | None, typer.Argument(help="One message; - reads it from standard input.")] = None,
    system: Annotated[str | None, typer.Option(help="The system message.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="The maximum number of tokens of an answer.")] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0, max=2, help="Randomness; 0 picks the likeliest token.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Send a message to a model, or talk to it until Ctrl-D."""
    api = session_of(context).api
    settings = {"model": model, "max_tokens": max_tokens, "temperature": temperature}
    sent = {name: value for name, value in settings.items() if value is not None}
    messages = [{"role": "system", "content": system}] if system else []
    for text in _messages(message):
        messages.append({"role": "user", "content": text})
        answer = _answer(api, sent | {"messages": messages}, is_shown=not as_json)
        messages.append({"role": "assistant", "content": answer["content"]})
        if as_json:
            emit_line({"object": "chat.answer", "model": model} | answer)


def _messages(given: str | None) -> Iterator[str]:
    if given is not None:
        yield text_of(sys.stdin.buffer.read(), STANDARD_INPUT) if given == "-" else given
        return
    notice("Ctrl-D ends the conversation.")
    while True:
        try:
            text = str(typer.prompt(">", prompt_suffix=" ", err=True))
        except typer.Abort:
            notice("")
            return
        yield text


def _answer(api: Api, body: dict[str, Any], *, is_shown: bool) -> dict[str, Any]:
    """Return the whole answer, its end and its tokens."""
    asked = body | {"stream": True, "stream_options": {"include_usage": True}}
    pieces, reason, usage = list[str](), None, None
    with api.stream("POST", "/v1/chat/completions", json=asked) as response:
        for line in response.iter_lines():
            data = line.removeprefix("data:").strip()
            if not line.startswith("data:") or data == "[DONE]":
                continue
            chunk = _chunk(data)
            if error := chunk.get("error"):
                raise Failure(str(error["message"]), ExitCode.UNREACHABLE, details=error)
            usage = chunk.get("usage") or usage
            for choice in chunk["choices"]:
                reason = choice.get("finish_reason") or reason
                if piece := choice["delta"].get("content"):
                    pieces.append(piece)
                    if is_shown:
                        sys.stdout.write(plain(piece))
                        sys.stdout.flush()
    if is_shown:
        sys.stdout.write("\n")
    return {"content": "".join(pieces), "finish_reason": reason, "usage": usage}


def _chunk(data: str) -> dict[str, Any]:
    """Return a piece of an answer. Raises Failure for anything but an object."""
    with suppress(ValueError):
        found = json.loads(data)
        if isinstance(found, dict):
            return found
    raise foreign_answer()
