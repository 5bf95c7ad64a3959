"""The inference routes for the OpenAPI document, described by the types that read their requests."""

from typing import Any

from apps.accounts.roles import Permission
from apps.core.http.openapi.document import FileAnswer, Operation
from apps.interfaces.gateway.requests.schema import ChatBody, CompletionBody
from apps.interfaces.gateway.surfaces.answers import ChatAnswer, CompletionAnswer
from apps.interfaces.gateway.surfaces.embeddings import EmbeddingBody
from apps.interfaces.gateway.surfaces.response_answers import ResponseAnswer
from apps.interfaces.gateway.surfaces.responses import ResponsesBody

_STREAM = FileAnswer("text/event-stream")
_HI = [{"role": "user", "content": "Hi"}]


def operations() -> list[Operation]:
    """Return one operation for each route."""
    chat = {"model": "anneal-demo", "messages": _HI, "max_tokens": 16, "temperature": 0}
    return [
        _route("/v1/chat/completions", ChatBody, chat, ChatAnswer, "Answer a conversation."),
        _route(
            "/v1/completions",
            CompletionBody,
            {"model": "anneal-demo", "prompt": "Once", "max_tokens": 16},
            CompletionAnswer,
            "Continue a text.",
        ),
        _route(
            "/v1/responses",
            ResponsesBody,
            {"model": "anneal-demo", "input": "Hi", "store": False},
            ResponseAnswer,
            "Answer a conversation as a Response, which is not stored.",
        ),
        _route(
            "/v1/embeddings",
            EmbeddingBody,
            {"model": "anneal-demo", "input": "Hi"},
            None,
            "Refused: the models here write text, and none makes embeddings.",
        ),
    ]


def _route(path: str, body: Any, example: dict[str, Any], answer: Any, text: str) -> Operation:
    return Operation(
        method="POST",
        path=path,
        name=f"{path.removeprefix('/v1/').replace('/', '_')}_post",
        text=text,
        scope=Permission.INFERENCE,
        body=body,
        example=example,
        answers=(answer, _STREAM) if answer else (),
        errors=(422,),  # the engine failed at this one request
    )
