"""Calls to the public API: retries with back-off, pages, and the server's errors as one sentence."""

import contextlib
import json
import random
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import quote

import httpx

from anneal.failures import ConnectionLost, ExitCode, Failure

JOBS = "/v1/fine_tuning/jobs"
NOT_LOADED = "version_not_loaded"  # the code of a refusal that waiting removes
ATTEMPTS = 5
PATIENT_ATTEMPTS = 40  # of commands that follow something: five minutes without a connection
_LONGEST_WAIT = 8.0
_MOST_ASKED = 120.0  # of a Retry-After that is obeyed
_EXIT_CODES = {401: ExitCode.SIGNED_OUT, 403: ExitCode.SIGNED_OUT, 404: ExitCode.NOT_FOUND}
_RETRIED = frozenset({408, 409, 429, 500, 502, 503, 504})
_PAGE = 100
_KEY_HEADER = "Idempotency-Key"
_UNUSABLE_PROXY = (
    "The environment names a proxy that anneal cannot use, in HTTPS_PROXY, HTTP_PROXY or ALL_PROXY, or an address in "
    "NO_PROXY. Name an HTTP proxy such as http://proxy.example.com:3128 and no networks of IPv6, or unset the variable."
)
_UNUSABLE_CERTIFICATES = (
    "The certificates that SSL_CERT_FILE or SSL_CERT_DIR names cannot be read. Correct or unset it."
)
# A proxy that the environment names cannot reach this machine's own addresses.
_LOOPBACK = ("all://127.0.0.1", "all://localhost", "all://[::1]")


def item_path(place: str, item_id: str) -> str:
    """Return the address of one object of a list. Raises Failure for an empty id."""
    return f"{place}/{quote(_given(item_id), safe='')}"


def job_path(job_id: str) -> str:
    return item_path(JOBS, job_id)


def model_path(name: str, *, is_own: bool = False) -> str:
    """Return the address of a model, in OpenAI's API or our own. Names have `:` and may have `/`.

    Raises Failure for an empty name.
    """
    return f"{'/api' if is_own else ''}/v1/models/{quote(_given(name), safe=':/')}"


def _given(name: str) -> str:
    if not name.strip():
        raise Failure("A name or an id is empty.", ExitCode.USAGE)
    return name


class Api:
    """One connection to an installation, or to another service with the same conventions, with one key."""

    def __init__(
        self,
        base_url: str,
        key: str,
        *,
        project: str | None = None,
        transport: httpx.BaseTransport | None = None,
        service: str = "Anneal",
        sign_in: str = "Run `anneal login`, or set ANNEAL_API_KEY.",
    ) -> None:
        self.base_url = base_url
        self.service = service
        self._sign_in = sign_in
        self.attempts = ATTEMPTS
        headers = {"Authorization": f"Bearer {key}", "User-Agent": "anneal-cli"}
        try:
            self._http = httpx.Client(
                base_url=base_url,
                headers=headers | ({"OpenAI-Project": project} if project else {}),
                timeout=httpx.Timeout(120, connect=10),
                transport=transport,
                mounts=dict.fromkeys(_LOOPBACK),
            )
        except UnicodeError:  # of the headers
            raise
        except (ImportError, ValueError, httpx.InvalidURL) as error:
            raise Failure(_UNUSABLE_PROXY, ExitCode.UNREACHABLE) from error
        except OSError as error:
            raise Failure(_UNUSABLE_CERTIFICATES, ExitCode.LOCAL) from error

    def close(self) -> None:
        self._http.close()

    def get(self, path: str, **params: object) -> Any:
        sent = {name: value for name, value in params.items() if value is not None}
        return _json(self.send("GET", path, params=sent))

    def delete(self, path: str) -> Any:
        return _json(self.send("DELETE", path))

    def post(self, path: str, body: object = None, **options: Any) -> Any:
        return _json(self.send("POST", path, **({} if body is None else {"json": body}), **options))

    def post_once(self, path: str, body: object = None, *, key: str | None = None, **options: Any) -> Any:
        """Send a POST that has one effect, also if it is sent again because its answer was lost."""
        try:
            return self.post(path, body, headers={_KEY_HEADER: key or str(uuid.uuid4())}, **options)
        except Failure as failure:
            if (failure.code, failure.details.get("param")) != ("invalid_value", _KEY_HEADER):
                raise
        # Nothing was made: the answer is too long for the server to keep it for another attempt, so there is only one.
        attempts, self.attempts = self.attempts, 1
        try:
            return self.post(path, body, **options)
        finally:
            self.attempts = attempts

    def send(self, method: str, path: str, **options: Any) -> httpx.Response:
        """Return the whole answer. Raises Failure for a refusal, or once no attempt succeeded."""
        _require_json(options.get("json"))
        return self._attempt(lambda: self._http.request(method, path, **options))

    @contextlib.contextmanager
    def stream(self, method: str, path: str, **options: Any) -> Iterator[httpx.Response]:
        """Give an answer whose body is read piece by piece. Only its beginning is retried."""
        _require_json(options.get("json"))

        def begin() -> httpx.Response:
            response = self._http.send(self._http.build_request(method, path, **options), stream=True)
            if not response.is_success:
                response.read()
            return response

        response = self._attempt(begin)
        try:
            yield response
        except httpx.TransportError as error:
            raise ConnectionLost(self._unreachable(error).message, ExitCode.UNREACHABLE) from error
        finally:
            response.close()

    def pages(self, path: str, *, limit: int, **params: object) -> Iterator[dict[str, Any]]:
        """Yield up to `limit` objects of a list."""
        after, left = None, limit
        while left > 0:
            page = self.get(path, limit=min(left, _PAGE), after=after, **params)
            yield from page["data"]
            left -= len(page["data"])
            if not page["has_more"] or not page["data"]:
                return
            after = page["data"][-1]["id"]

    def _attempt(self, send: Callable[[], httpx.Response]) -> httpx.Response:
        for attempt in range(1, self.attempts + 1):
            try:
                response = send()
            except httpx.TransportError as error:
                if attempt == self.attempts:
                    raise self._unreachable(error) from error
                reason, wait = f"{self.base_url} does not answer", _back_off(attempt)
            else:
                if response.is_success:
                    return response
                if not _is_retried(response) or attempt == self.attempts:
                    raise self._refusal(response)
                is_limit = response.status_code == 429
                reason = f"{self.service}'s rate limit was reached" if is_limit else f"{self.service} failed to answer"
                wait = _asked_wait(response) or _back_off(attempt)
            sys.stderr.write(f"{reason}. Next attempt in {max(1, round(wait))} s.\n")
            time.sleep(wait)
        raise AssertionError("the last attempt returns or raises")

    def _unreachable(self, error: httpx.TransportError) -> Failure:
        text = f"{self.base_url} does not answer ({error or type(error).__name__}). Check the address and the network."
        return Failure(text, ExitCode.UNREACHABLE)

    def _refusal(self, response: httpx.Response) -> Failure:
        """Return the server's error as a failure with one sentence."""
        status = response.status_code
        try:
            found = json.loads(response.text)["error"]
            message = str(found["message"])
        except (ValueError, KeyError, TypeError):
            found = None
            message = f"The answer has the status {status} and is not {self.service}'s. Check the base URL."
        else:
            if (found.get("param"), found.get("code")) == (_KEY_HEADER, "insufficient_quota"):
                message = "Your organization sent too many requests in 24 hours. Run the command again later."
        if status == 401:
            message += f" {self._sign_in}"
        is_temporary = _is_retried(response)
        return Failure(
            message, ExitCode.UNREACHABLE if is_temporary else _EXIT_CODES.get(status, ExitCode.REFUSED), details=found
        )


def _require_json(body: object) -> None:
    """Raise Failure for values that YAML, Python's JSON and options allow, but no request."""
    try:
        json.dumps(body, allow_nan=False)
    except ValueError as error:
        raise Failure("A number is infinite or NaN. Give a finite number.", ExitCode.USAGE) from error
    except TypeError as error:
        text = "A value is neither text nor a number, a list or an object. Put quotes around dates."
        raise Failure(text, ExitCode.USAGE) from error


def foreign_answer() -> Failure:
    """Return the failure for a success that is not in the form of the API."""
    text = "The answer is not Anneal's. Check that the base URL is that of an Anneal installation."
    return Failure(text, ExitCode.REFUSED)


def _json(response: httpx.Response) -> Any:
    try:
        return response.json()
    except ValueError as error:
        raise foreign_answer() from error


def _is_retried(response: httpx.Response) -> bool:
    """Return what the server says about another attempt, else whether its status is a temporary one."""
    told = response.headers.get("x-should-retry")
    return told == "true" if told in ("true", "false") else response.status_code in _RETRIED


def _asked_wait(response: httpx.Response) -> float | None:
    for name, per_second in (("retry-after-ms", 1000), ("retry-after", 1)):
        with contextlib.suppress(ValueError):
            asked = float(response.headers.get(name, "")) / per_second
            return asked if 0 < asked <= _MOST_ASKED else None
    return None


def _back_off(attempt: int) -> float:
    return float(min(_LONGEST_WAIT, 0.5 * 2 ** (attempt - 1)) * random.uniform(0.75, 1))  # noqa: S311
