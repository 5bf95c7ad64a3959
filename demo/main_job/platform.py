"""The public interfaces of a running platform: OpenAI's API through its own SDK, and ours through the same client."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import httpx2  # the HTTP library of openai's client
import msgspec
import openai
from openai import BaseModel

from demo.main_job.state import read_object

T = TypeVar("T")


class DemoFailed(Exception):
    """The main job did not finish; the message gives the reason. The log of `process` may explain it."""

    def __init__(self, message: str, *, process: str = "web") -> None:
        super().__init__(message)
        self.process = process


class Platform:
    """The platform whose data is in `home`. Raises DemoFailed if none was started."""

    def __init__(self, home: Path, *, transport: httpx2.BaseTransport | None = None) -> None:
        self.home = home
        self.account = {name: str(value) for name, value in read_object(home / "demo.json").items()}
        self.url = str(read_object(home / "ports.json").get("public_url", ""))
        if not self.account or not self.url:
            raise DemoFailed(f"There is no running platform in {home}: start it with `make demo`.")
        # The shell's proxy must not apply to this machine's own addresses. Retries bridge the restart of a process, and
        # wait for as long as the platform asks when it limits the rate of requests.
        self.openai = openai.OpenAI(
            api_key=self.account["api_key"],
            base_url=f"{self.url}/v1",
            max_retries=8,
            timeout=120,
            http_client=openai.DefaultHttpxClient(trust_env=False, transport=transport),
        )
        self._native = self.openai.with_options(base_url=f"{self.url}/api/v1")

    def get(self, path: str, kind: type[T]) -> T:
        return msgspec.convert(self._native.get(path, cast_to=object), kind)

    def post(self, path: str, body: dict[str, object], kind: type[T]) -> T:
        return msgspec.convert(self._native.post(path, body=body, cast_to=object), kind)

    def log(self, process: str) -> str:
        return str(self.home / "logs" / f"{process}.log")

    @property
    def operator_hint(self) -> str:
        """Return where an operator grants credit and lifts a suspension."""
        page = f"{self.url}/staff/organizations"
        return f"An operator can grant credit or lift a suspension at {page}; the demo's login is one."


def found(retrieve: Callable[[], T]) -> T | None:
    """Return the retrieved object; None if it was deleted, or belongs to an earlier database."""
    try:
        return retrieve()
    except openai.NotFoundError:
        return None


def extra(answered: BaseModel, kind: type[T]) -> T:
    """Return the answer's members that the client library does not know."""
    return msgspec.convert(answered.model_extra or {}, kind)


def message_of(error: openai.APIError) -> str:
    body = error.body if isinstance(error.body, dict) else {}
    return str(body.get("message") or error.message)


def is_passing(error: openai.APIError) -> bool:
    """Return whether the same request may succeed later: a process restarts or is busy."""
    is_busy = isinstance(error, openai.RateLimitError) and error.code != "insufficient_quota"
    return is_busy or isinstance(error, openai.InternalServerError | openai.APIConnectionError)
