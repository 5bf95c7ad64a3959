"""Requests that are wrong, each in one way, and what their answers have in common.

`FILE` and `JOB` in a path or a body stand for ids of the caller's own. A case without a `param` is about the request as
a whole; one with `MISSING` names what is not there.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

JOBS, ESTIMATES, FILES, UPLOADS = "/v1/fine_tuning/jobs", "/api/v1/estimates", "/v1/files", "/v1/uploads"
FILE, JOB, MODEL = "FILE", "JOB", "MODEL"
MISSING, UNKNOWN, INVALID_JSON = "missing_required_parameter", "unknown_parameter", "invalid_json"
NO_JOB, NO_FILE, NO_MODEL = "fine_tuning_job_not_found", "file_not_found", "model_not_found"
UPLOAD = {"bytes": 9, "filename": "a.jsonl", "purpose": "fine-tune"}


class Case(NamedTuple):
    path: str
    body: Any = None  # JSON, or the bytes of a body that is none
    param: str | None = None
    status: int = 400
    code: str = "invalid_value"
    method: str = "POST"
    content_type: str = "application/json"
    headers: Mapping[str, str] = {}

    def __str__(self) -> str:
        shown = self.body if isinstance(self.body, bytes) else json.dumps(self.body)
        return f"{self.method} {self.path} {shown[:70]!s}"


# Words of the implementation, which say nothing to a client.
_INTERNAL = re.compile(
    r"msgspec|pydantic|Traceback|Exception|\bNone\b|\bTrue\b|\bFalse\b|<[A-Z]\w+|\benum\b|Object missing"
    r"|Object contains"
    r"|`(?:int|float|str|bool|array|object|null)[ |`]|\bstr\b|\bdict\b|\bobject at 0x|psycopg|DataError|Struct"
    r"|Serializer|QuerySet|decimal\.|sys\.|\be[+-]\d\d\b"
)
# What a fix is said with: what to do, or what a value must be.
_FIX = re.compile(
    r"\b([Uu]se|[Ss]end|[Gg]ive|[Tt]ry|[Ss]et|[Cc]reate|[Cc]hoose|[Nn]ame|[Rr]emove|[Ll]eave|[Aa]dd|[Aa]sk|[Ll]ower"
    r"|[Ss]horten|[Ff]latten|[Tt]ake|[Tt]rain|takes?|must|required|needs?|up to|at most)\b"
)
_LONGEST = 1_000  # characters of a message: what it quotes is cut
_LONG = 100  # characters of a param: a longer one may be cut
# An answer to an address that leads nowhere needs no other fix.
_GONE = re.compile(r"not offered|not found|does not exist|No such|There is no|No [a-z -]+ has the id")


def problems(case: Case, status: int, body: Any) -> list[str]:
    """Return what is wrong with an answer to a bad request."""
    error = body.get("error") if isinstance(body, dict) else None
    if not isinstance(error, dict) or not {"message", "type", "param", "code"} <= set(error):
        return [f"{status}, not an error object: {str(body)[:200]}"]
    message, found = error["message"], []
    seen = {"status": status, "code": error["code"], "param": error["param"]}
    wanted = {"status": case.status, "code": case.code, "param": case.param}
    found += [f"{name} {seen[name]!r}, not {wanted[name]!r}" for name in seen if seen[name] != wanted[name]]
    if case.param and error["code"] != MISSING and not _is_sent(case, case.param):
        found.append(f"param {case.param!r} is not in the request")
    if internal := _INTERNAL.search(message):
        found.append(f"internal word {internal[0]!r}")
    if len(message) > _LONGEST:
        found.append(f"a message of {len(message):,} characters")
    if not (_FIX.search(message) or (status == 404 and _GONE.search(message))) or not message.strip().endswith(
        (".", "?")
    ):
        found.append("no fix in words, or no full stop")
    return [f"{one}: {message}" for one in found]


# The parameters that are part of an address, by the word before them.
_IN_ADDRESS = {
    "jobs": "fine_tuning_job_id",
    "files": "file_id",
    "uploads": "upload_id",
    "models": "model",
    "integrations": "kind",
    "webhooks": "webhook_id",
    "deliveries": "delivery_id",
    "evals": "eval_id",
    "batches": "batch_id",
    "completions": "completion_id",
}


def _is_sent(case: Case, param: str) -> bool:
    if param in case.headers:
        return True
    path, _, query = case.path.partition("?")
    words = path.split("/")
    if param in {_IN_ADDRESS.get(word) for word in words[:-1]} | {pair.partition("=")[0] for pair in query.split("&")}:
        return True
    try:
        body = json.loads(case.body) if isinstance(case.body, bytes) else case.body
    except ValueError:
        return False
    return any(place == param or (len(param) > _LONG and place.startswith(param)) for place in _places(body))


def _places(value: Any, at: str = "") -> Iterator[str]:
    """Yield the place of each value in a body, such as `messages[0].role`."""
    yield at
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _places(item, f"{at}.{key}" if at else key)
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from _places(item, f"{at}[{index}]")


def filled(value: Any, ids: dict[str, str]) -> Any:
    """Return a path or body with the caller's ids in it."""
    match value:
        case str():
            for word, found in ids.items():
                value = re.sub(rf"\b{word}\b", found, value)
            return value
        case dict():
            return {key: filled(item, ids) for key, item in value.items()}
        case list():
            return [filled(item, ids) for item in value]
    return value
