"""JSON bodies as msgspec types, and errors in the client's words: the field as sent, its value, and the allowed values.

msgspec's own message contains keys from the client, so nothing here parses it. The body is compared with its type
again.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator
from functools import cache
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, Union, get_args, get_origin

import msgspec
from msgspec import inspect

from apps.core.errors import DomainError, InvalidJson, InvalidValue, MissingParameter, UnknownParameter

if TYPE_CHECKING:
    from django.http import HttpRequest

T = TypeVar("T")
# Reading so many values into objects holds the interpreter for up to 0.1 s.
MAX_VALUES, _VALUE_MARKS = 100_000, (b",", b"[", b"{")
_NOT_EXPLAINED = (
    "A field of the body has a wrong type or is unknown. The body holds too many values to find it. "
    "Send a smaller body, and its error names the field."
)
_MAX_SHOWN = 60
_MAX_PARAM = 200
_MAX_NAMES = 20  # of fields in a message
_fields = cache(msgspec.structs.fields)  # of the few types of bodies, like the words for them


def decode_body(raw: bytes, decoder: "msgspec.json.Decoder[T]") -> T:
    """Return the decoded body. Raises DomainErrors that name the field."""
    try:
        return decoder.decode(raw)
    except msgspec.ValidationError as error:
        if has_many_values(raw):  # finding the fault reads them again; without that, the answer is only less exact
            raise InvalidValue(_NOT_EXPLAINED) from error
        raise explain(_loads(raw), decoder.type) from error
    except RecursionError as error:
        raise InvalidJson("The body is nested too deeply. Flatten it.") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _unreadable(_where(str(error))) from error


def json_of(request: "HttpRequest") -> bytes:
    """Return the body of a request. Raises InvalidJson for a form, whose body is read before its view begins."""
    if request.content_type != "application/json":
        raise InvalidJson("The body is not JSON. Send it with the header Content-Type: application/json.")
    return request.body


def has_many_values(raw: bytes) -> bool:
    """Return whether a body may hold more than MAX_VALUES. Commas and brackets inside its texts count too."""
    return sum(map(raw.count, _VALUE_MARKS)) > MAX_VALUES


def explain(data: object, kind: Any, *, at: str = "") -> DomainError:
    """Return the error for `data`, the body or the value of its field `at`, which is not a valid `kind`.

    The error names the first faulty field.
    """
    options = list(options_of(kind))
    tagged = [option.__struct_config__ for option in options if _is_struct(option)]
    if isinstance(data, dict) and len(tagged) > 1 and (tag := tagged[0].tag_field):
        options = [option for option in options if _is_struct(option) and option.__struct_config__.tag == data.get(tag)]
        if not options:
            name, use = _join(at, tag), _one_of(config.tag for config in tagged)
            if tag not in data:
                return _missing(name, use)
            text = f"Invalid value for '{_cut(name)}': {_shown(data[tag])}. Use {use}."
            return InvalidValue(text, param=name[:_MAX_PARAM])
    for option in options:
        if found := _inside(data, option, at):
            return found
    if _fits(data, kind):  # only the decoder of JSON refuses it
        return InvalidValue("The body holds a number that is out of range. Send a smaller one.")
    if not at:
        return InvalidValue(f"The body must be {_described(kind)}, not {_shown(data)}.")
    text = f"Invalid value for '{_cut(at)}': {_shown(data)}. Use {_described(kind)}."
    return InvalidValue(text, param=at[:_MAX_PARAM])


def _loads(raw: bytes) -> object:
    try:
        return json.loads(raw)
    except RecursionError as error:
        raise InvalidJson("The body is nested too deeply. Flatten it.") from error
    except UnicodeDecodeError as error:
        raise _unreadable(f": byte {error.start} is not UTF-8") from error
    except json.JSONDecodeError as error:
        raise _unreadable(f", from byte {error.pos} on") from error
    except ValueError as error:
        raise InvalidJson("The body holds a number with too many digits. Send a smaller one.") from error


def _where(text: str) -> str:
    if "truncated" in text or "end of" in text:
        return ": it ends inside a value, or holds half of a surrogate pair"
    found = re.search(r"\(byte (\d+)\)", text)
    return f", from byte {found[1]} on" if found else ""


def _unreadable(where: str) -> InvalidJson:
    return InvalidJson(f"The body is not valid JSON{where}. Send one JSON object in UTF-8.")


# --- The place of a fault ---------------------------------------------------------------------------------------------


def _inside(value: object, kind: Any, at: str) -> DomainError | None:
    """Return the error of a field inside `value`; None if `value` itself has the wrong type."""
    wanted = get_args(kind)
    if isinstance(value, dict) and _is_struct(kind):
        return _of_struct(value, kind, at)
    if isinstance(value, dict) and get_origin(kind) is dict:
        return _first((_join(at, key), item, wanted[1]) for key, item in value.items())
    if isinstance(value, list) and get_origin(kind) in (list, tuple):
        return _first((f"{at}[{index}]", item, wanted[0]) for index, item in enumerate(value))
    return None


def _of_struct(value: dict[str, object], kind: type[msgspec.Struct], at: str) -> DomainError | None:
    fields = _fields(kind)
    names = [field.encode_name for field in fields]
    unknown = next((key for key in value if key not in names and key != kind.__struct_config__.tag_field), None)
    if unknown is not None and kind.__struct_config__.forbid_unknown_fields:
        name = _join(at, unknown)
        return UnknownParameter(f"Unknown parameter: '{_cut(name)}'.{_taken(at, names)}", param=name[:_MAX_PARAM])
    sent = (field for field in fields if field.encode_name in value)
    if found := _first((_join(at, field.encode_name), value[field.encode_name], field.type) for field in sent):
        return found
    for field in fields:
        if field.required and field.encode_name not in value:
            return _missing(_join(at, field.encode_name), _described(field.type))
    return None


def _missing(name: str, use: str) -> MissingParameter:
    text = f"Missing required parameter: '{_cut(name)}'. Send it as {use}."
    return MissingParameter(text, param=name[:_MAX_PARAM])


def _first(children: Iterable[tuple[str, object, Any]]) -> DomainError | None:
    return next((explain(item, kind, at=place) for place, item, kind in children if not _fits(item, kind)), None)


def _fits(value: object, kind: Any) -> bool:
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError:
        return False
    return True


def options_of(kind: Any) -> Iterator[Any]:
    """Yield the types that a value may have, without null and without their limits."""
    if get_origin(kind) is Annotated:
        yield from options_of(get_args(kind)[0])
    elif get_origin(kind) in (Union, UnionType):
        for one in get_args(kind):
            yield from options_of(one)
    elif kind is not type(None):
        yield kind


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


# --- Words ------------------------------------------------------------------------------------------------------------


@cache
def _described(kind: Any) -> str:
    return " or ".join(dict.fromkeys(_words(inspect.type_info(kind))))


def _words(kind: inspect.Type) -> Iterator[str]:
    match kind:
        case inspect.UnionType(types=types):
            takes_any_number = any(isinstance(one, inspect.FloatType) for one in types)
            for one in types:
                if not (takes_any_number and isinstance(one, inspect.IntType)):
                    yield from _words(one)
        case inspect.Metadata(type=inner):
            yield from _words(inner)
        case inspect.NoneType():
            return
        case inspect.StrType(pattern=str(pattern)):
            yield f"a string that matches {pattern}"
        case inspect.StrType(min_length=least, max_length=most):
            yield f"a string{_sized(least, most, 'characters')}"
        case inspect.BoolType():
            yield "true or false"
        case inspect.IntType() | inspect.FloatType():
            yield f"a {'whole ' if isinstance(kind, inspect.IntType) else ''}number{_ranged(kind)}"
        case inspect.EnumType(cls=members):
            yield _one_of([member.value for member in members])
        case inspect.LiteralType(values=values):
            yield _one_of(values)
        case (
            inspect.ListType(min_length=least, max_length=most)
            | inspect.VarTupleType(min_length=least, max_length=most)
        ):
            yield f"a list{_sized(least, most, 'items')}"
        case inspect.DictType(min_length=least, max_length=most, key_type=key):
            keys = f" whose keys are {'/'.join(_words(key))}" if getattr(key, "max_length", None) else ""
            yield f"an object{_sized(least, most, 'entries')}{keys}"
        case inspect.CustomType():
            yield "a file part with a filename"
        case _:
            yield "an object"


def _sized(least: int | None, most: int | None, counted: str) -> str:
    if most is not None:
        return f" of {f'{least} to' if least else 'at most'} {most:,} {counted}"
    return f" of at least {least:,} {counted}" if least else ""


def _ranged(kind: inspect.IntType | inspect.FloatType) -> str:
    if isinstance(kind, inspect.IntType):
        least = kind.ge if kind.gt is None else kind.gt + 1
        most = kind.le if kind.lt is None else kind.lt - 1
        kind = inspect.IntType(ge=least, le=most)
    if kind.lt is not None or kind.gt is not None:
        bounds = {"above": kind.gt, "from": kind.ge, "up to": kind.le, "below": kind.lt}
        return " " + " and ".join(f"{word} {bound:,g}" for word, bound in bounds.items() if bound is not None)
    if kind.le is None:
        return "" if kind.ge is None else f" of at least {kind.ge:,}"
    return f" from {kind.ge or 0:,} to {kind.le:,}"


def _one_of(values: Iterable[object]) -> str:
    named = [f"'{value}'" for value in values]
    return f"one of {', '.join(named)}" if len(named) > 1 else named[0]


def _taken(at: str, names: list[str]) -> str:
    if len(names) > _MAX_NAMES:
        return " Remove it."
    subject = f"'{_cut(at)}'" if at else "This call"
    return f" {subject} takes {', '.join(names) or 'nothing'}."


def _shown(value: object) -> str:
    """Return a value as the client wrote it, shortened if it is long."""
    match value:
        case dict():
            return "an object" if value else "{}"
        case list():
            return "a list" if value else "[]"
        case float() if not math.isfinite(value):
            return "a number that is too large"
        case object(chunks=_):  # an uploaded file: Django's type, which the command line does not have
            return "a file"
        case str():
            return _cut(json.dumps(value[: _MAX_SHOWN + 1], ensure_ascii=False))
    return _cut(json.dumps(value))


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"


def _join(param: str, name: str) -> str:
    return f"{param}.{name}" if param else name
