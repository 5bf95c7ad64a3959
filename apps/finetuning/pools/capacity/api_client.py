"""Calls of an engine's HTTP API: one token, one authority, few seconds and a limited answer."""

import ssl
import time
from collections.abc import Mapping
from typing import NoReturn, TypeVar

import httpx2
import msgspec

from apps.finetuning.pools.capacity.port import CapacityError

_SECONDS = 8.0  # for one request
_MAX_ANSWER_BYTES = 16 * 1024 * 1024
_TOO_SLOW = "The API server did not answer within {:g} seconds."
_Kind = TypeVar("_Kind")


class EngineRefused(CapacityError):
    """The API server did nothing, and says why with a status of 4xx."""


class _Detail(msgspec.Struct):
    msg: str = ""


class _Failure(msgspec.Struct):
    """What Kubernetes says is in `message`, what dstack says in `detail`."""

    message: str = ""
    detail: _Detail | list[_Detail] = []


class ApiClient:
    """The API server at `url`. Without a `ca` the usual authorities count."""

    def __init__(self, *, url: str, ca: str | None, token: str) -> None:
        self._url, self._ca, self._token = url, ca, token

    def call(
        self,
        method: str,
        path: str,
        *,
        body: Mapping[str, object] | None = None,
        query: dict[str, str] | None = None,
        allowed: tuple[int, ...] = (),
        may_quote: bool = True,
        hidden: str = "",
    ) -> bytes:
        """Return the answer's body. A refusal is quoted (`may_quote`), without the token and without `hidden`."""
        try:
            trust = ssl.create_default_context(cadata=self._ca)
            with (
                httpx2.Client(verify=trust, timeout=_SECONDS, trust_env=False, follow_redirects=False) as client,
                client.stream(
                    method, self._url + path, params=query, json=body,
                    headers={
                        "Authorization": f"Bearer {self._token}", "Accept": "application/json",
                        "Accept-Encoding": "identity",
                    },
                ) as answer,
            ):  # fmt: skip
                content = _read(answer)
        except httpx2.TimeoutException as error:
            raise CapacityError(_TOO_SLOW.format(_SECONDS)) from error
        except (httpx2.HTTPError, httpx2.InvalidURL, OSError, ValueError) as error:
            raise CapacityError(f"The API server cannot be reached: {type(error).__name__}.") from error
        if not answer.is_success and answer.status_code not in allowed:
            self._refuse(answer.status_code, content if may_quote else b"", hidden or self._token)
        return content

    def _refuse(self, status: int, content: bytes, hidden: str) -> NoReturn:
        try:
            failure = msgspec.json.decode(content, type=_Failure)
        except msgspec.MsgspecError:
            failure = _Failure()
        details = failure.detail if isinstance(failure.detail, list) else [failure.detail]
        said = "; ".join(filter(None, [failure.message, *(detail.msg for detail in details)]))
        said = " ".join(said.replace(self._token, "…").replace(hidden, "…").split())[:200]
        kind = EngineRefused if 400 <= status < 500 else CapacityError
        raise kind(f"The API server refused with {status}: {said or 'no reason'}")


def _read(answer: httpx2.Response) -> bytes:
    """Return the body as sent. Raises CapacityError if it is too large or takes too long as a whole."""
    until, content = time.monotonic() + _SECONDS, bytearray()
    for part in answer.iter_raw():
        content += part
        if len(content) > _MAX_ANSWER_BYTES:
            raise CapacityError("The API server's answer is too large.")
        if time.monotonic() > until:
            raise CapacityError(_TOO_SLOW.format(_SECONDS))
    return bytes(content)


def decode(content: bytes, kind: type[_Kind]) -> _Kind:
    """Return the answer as `kind`. Raises CapacityError if it is something else."""
    try:
        return msgspec.json.decode(content, type=kind)
    except msgspec.MsgspecError as error:
        raise CapacityError("The API server's answer is not what its API describes.") from error
