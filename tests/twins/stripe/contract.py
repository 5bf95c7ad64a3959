"""What may be sent to Stripe, read from the installed package: every operation, its parameters, their types.

The package checks nothing at run time, so a misspelt parameter would travel. Its services name verb, path and the
TypedDict of parameters; a decoded body is checked against that, all the way down. Not in the types, so not checked
here: longest strings, and which parameters go together.
"""

import ast
import importlib
import re
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from functools import cache
from pathlib import Path
from typing import Any, NotRequired, Required
from urllib.parse import parse_qsl

import stripe
from typing_extensions import is_typeddict

ROOT = Path(stripe.__file__).parent
_INDEXED = re.compile(r"\d+")
_OPTIONS = {"idempotency_key", "max_network_retries", "api_key", "stripe_account", "stripe_version", "headers"}
_OPTIONS |= {"stripe_context", "content_type", "stripe_request_trigger"}
_ELSEWHERE = {"StripeContext": object, "Mapping": Mapping}  # named by the package for its own options


@dataclass(frozen=True)
class Operation:
    """One thing that can be asked: `name` is `POST /v1/invoices/{invoice}/pay`."""

    name: str
    method: str
    pattern: re.Pattern[str]
    params_module: str
    params_class: str

    @property
    def params(self) -> Any:
        return getattr(importlib.import_module(self.params_module), self.params_class) if self.params_class else None


@dataclass(frozen=True)
class Complaint:
    """What is wrong with a request, in the words Stripe uses for it."""

    code: str
    param: str

    def __str__(self) -> str:
        return f"{self.code}: {self.param}"


@cache
def operations() -> tuple[Operation, ...]:
    """Return every operation of the package; paths without parameters first, so that they match before the others."""
    found = {each.name: each for path in sorted(ROOT.rglob("_*_service.py")) for each in _operations_in(path)}
    return tuple(sorted(found.values(), key=lambda each: (each.name.count("{"), each.name)))


def find(method: str, path: str) -> Operation | None:
    matching = (each for each in operations() if each.method == method.upper() and each.pattern.fullmatch(path))
    return next(matching, None)


def check(operation: Operation, body: Mapping[str, Any]) -> list[Complaint]:
    """Return what Stripe's types say against the decoded parameters of a request."""
    if operation.params is None:
        return [Complaint("parameter_unknown", name) for name in body]
    return list(_check_dict(operation.params, body, ""))


def decode(encoded: str) -> dict[str, Any]:
    """Return the parameters of a form body or a query: `a[b][0]=x` is {"a": {"b": ["x"]}}."""
    result: dict[str, Any] = {}
    for key, value in parse_qsl(encoded, keep_blank_values=True):
        path = re.findall(r"[^\[\]]+", key)
        inner = result
        for part in path[:-1]:
            inner = inner.setdefault(part, {})
        inner[path[-1]] = value
    return {key: _lists(value) for key, value in result.items()}


def _lists(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if value and all(_INDEXED.fullmatch(key) for key in value):
        return [_lists(value[key]) for key in sorted(value, key=int)]
    return {key: _lists(inner) for key, inner in value.items()}


# --- Reading the package ----------------------------------------------------------------------------------------------


def _operations_in(path: Path) -> Iterator[Operation]:
    tree = ast.parse(path.read_text())
    modules = {
        alias.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module and ".params" in node.module
        for alias in node.names
    }
    for method in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
        for call in (node for node in ast.walk(method) if isinstance(node, ast.Call)):
            if isinstance(call.func, ast.Attribute) and call.func.attr in ("_request", "_request_stream"):
                yield _operation(call, _params_of(method), modules)


def _operation(call: ast.Call, params: str, modules: Mapping[str, str]) -> Operation:
    verb, url = call.args[0], call.args[1]
    assert isinstance(verb, ast.Constant)
    template = url.func.value if isinstance(url, ast.Call) and isinstance(url.func, ast.Attribute) else url
    assert isinstance(template, ast.Constant), ast.dump(url)
    pattern = re.compile(re.sub(r"\\{\w+\\}", "[^/]+", re.escape(template.value)))
    return Operation(
        f"{verb.value.upper()} {template.value}", verb.value.upper(), pattern, modules.get(params, ""), params
    )


def _params_of(method: ast.FunctionDef) -> str:
    for argument in (*method.args.posonlyargs, *method.args.args, *method.args.kwonlyargs):
        if argument.arg == "params" and argument.annotation is not None:
            names = re.findall(r"\w+Params", ast.unparse(argument.annotation))
            return names[0] if names else ""
    return ""


# --- Checking values --------------------------------------------------------------------------------------------------


@cache
def _hints(kind: Any) -> dict[str, Any]:
    module = importlib.import_module(kind.__module__)
    return {
        name: hint
        for name, hint in typing.get_type_hints(kind, vars(module) | _ELSEWHERE, include_extras=True).items()
        if name not in _OPTIONS
    }


def _check_dict(kind: Any, value: Any, at: str) -> Iterator[Complaint]:
    if not isinstance(value, Mapping):
        yield Complaint("parameter_invalid", at)
        return
    hints = _hints(kind)
    for name, inner in value.items():
        where = f"{at}[{name}]" if at else name
        if name not in hints:
            yield Complaint("parameter_unknown", where)
        else:
            yield from _check(_bare(hints[name]), inner, where)
    for name, hint in hints.items():
        if name not in value and _is_required(kind, name, hint):
            yield Complaint("parameter_missing", f"{at}[{name}]" if at else name)


def _is_required(kind: Any, name: str, hint: Any) -> bool:
    origin = typing.get_origin(hint)
    if origin is NotRequired or origin is typing.NotRequired:
        return False
    return origin in (Required, typing.Required) or name in kind.__required_keys__


def _bare(hint: Any) -> Any:
    wrappers = (NotRequired, Required, typing.NotRequired, typing.Required)
    return typing.get_args(hint)[0] if typing.get_origin(hint) in wrappers else hint


def _check(hint: Any, value: Any, at: str) -> Iterator[Complaint]:
    hint = _bare(hint)
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        yield from _check_union(typing.get_args(hint), value, at)
    elif is_typeddict(hint):
        yield from _check_dict(hint, value, at)
    elif origin is list:
        yield from _check_list(typing.get_args(hint)[0], value, at)
    elif origin is dict:
        if not isinstance(value, Mapping):
            yield Complaint("parameter_invalid", at)
    elif not _fits(hint, value):
        yield Complaint("parameter_invalid", at)


def _check_union(kinds: tuple[Any, ...], value: Any, at: str) -> Iterator[Complaint]:
    # `Literal[...] | str` leaves a door open for values of the future: here the list is taken at its word.
    if any(typing.get_origin(kind) is typing.Literal for kind in kinds):
        named = {choice for kind in kinds for choice in typing.get_args(kind) if isinstance(choice, str)}
        if named - {""}:
            kinds = tuple(kind for kind in kinds if kind is not str)
    complaints = [list(_check(kind, value, at)) for kind in kinds]
    if all(complaints):
        yield from min(complaints, key=lambda found: (found[0].param == at, len(found)))


def _check_list(kind: Any, value: Any, at: str) -> Iterator[Complaint]:
    if not isinstance(value, list):
        yield Complaint("parameter_invalid", at)
        return
    for number, inner in enumerate(value):
        yield from _check(kind, inner, f"{at}[{number}]")


def _fits(hint: Any, value: Any) -> bool:
    if not isinstance(value, str):
        return hint is Any
    if typing.get_origin(hint) is typing.Literal:
        return value in {
            str(choice).lower() if isinstance(choice, bool) else choice for choice in typing.get_args(hint)
        }
    if hint is bool:
        return value in ("true", "false")
    if hint is int:
        return re.fullmatch(r"-?\d+", value) is not None
    if hint in (float, Decimal):
        return _is_number(value)
    return hint is str or hint is Any or hint is type(None)


def _is_number(value: str) -> bool:
    try:
        return Decimal(value).is_finite()
    except InvalidOperation:
        return False
