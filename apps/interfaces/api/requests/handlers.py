"""The signature of a view's handler says what a call sends and gets: it is read from there, and documented from there.

`query`, `body` and `form` are the parameters of the address, the JSON body and the multipart form, each with the
struct that reads it. The return type is the answer; a File is annotated with its media type.
"""

from collections.abc import Callable, Mapping
from functools import cache
from types import UnionType
from typing import Annotated, Any, Union, cast, get_args, get_origin, get_type_hints

import msgspec
from django.http.response import HttpResponseBase
from django.utils.datastructures import MultiValueDict
from rest_framework.request import Request

from apps.core.errors import InvalidValue
from apps.core.http.asgi import require_unencoded
from apps.core.http.json_bodies import explain, options_of
from apps.core.http.openapi.document import FileAnswer
from apps.interfaces.api.requests.parsers import read_body

Download = Annotated[HttpResponseBase, FileAnswer("application/octet-stream", is_resumable=True)]


class Signature(msgspec.Struct, frozen=True):
    """The types of a handler; None for what it does not read."""

    query: Any
    body: Any
    form: Any
    answers: tuple[Any, ...]
    is_body_required: bool


def signature_of(handler: Callable[..., object]) -> Signature:
    return _signature(getattr(handler, "__func__", handler))


@cache
def _signature(function: Callable[..., object]) -> Signature:
    hints = get_type_hints(function, include_extras=True)
    sent = hints.get("body") or hints.get("form")
    is_required = sent is not None and any(field.required for field in msgspec.structs.fields(sent))
    returned = hints["return"]
    kinds = get_args(returned) if get_origin(returned) in (Union, UnionType) else (returned,)
    answers = tuple(kind.__metadata__[0] if get_origin(kind) is Annotated else kind for kind in kinds)
    return Signature(hints.get("query"), hints.get("body"), hints.get("form"), answers, is_required)


def is_file(handler: Callable[..., object]) -> bool:
    """Return whether a handler answers with a file only."""
    return all(isinstance(answer, FileAnswer) for answer in signature_of(handler).answers)


def read_arguments(request: Request, handler: Callable[..., object]) -> dict[str, object]:
    """Return the arguments that the handler's signature asks for. Raises DomainErrors that name the field."""
    wanted = signature_of(handler)
    read: dict[str, object] = {}
    if wanted.body is not None or wanted.form is not None:
        require_unencoded(request.headers.get("Content-Encoding", ""))
    if wanted.query is not None:
        read["query"] = read_query(request.query_params, wanted.query)
    if wanted.body is not None:
        read["body"] = read_body(request.data, wanted.body)
    if wanted.form is not None:
        form = cast(MultiValueDict[str, object], request.data)
        for name, parts in form.lists():
            if len(parts) > 1:
                raise InvalidValue(f"'{name[:60]}' is sent {len(parts)} times. Send it once.", param=name[:60])
        read["form"] = read_body(dict(form.items()), wanted.form)
    return read


def read_query(given: Mapping[str, str], kind: type[Any]) -> Any:
    """Return the parameters of an address; others are ignored. Raises InvalidValue that names the one at fault."""
    read = {}
    for field in msgspec.structs.fields(kind):
        sent = _sent(given, field.encode_name)
        if sent is None:
            continue
        if sent == "" and any(get_origin(option) is dict for option in options_of(field.type)):
            sent = "null"  # OpenAI's client for Node writes null as an empty text
        try:
            read[field.name] = msgspec.convert(sent, field.type, strict=False)
        except msgspec.ValidationError as error:
            raise explain(sent, field.type, at=field.encode_name) from error
    return kind(**read)


def _sent(given: Mapping[str, str], name: str) -> str | dict[str, str] | None:
    """Return a parameter: a text, or an object that is sent as `name[key]=value`."""
    if name in given:
        return given[name]
    start = f"{name}["
    return {key[len(start) : -1]: given[key] for key in given if key.startswith(start) and key.endswith("]")} or None
