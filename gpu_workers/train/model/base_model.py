"""The files of a base model. They are local, or downloaded at their commit, and verified in both cases."""

import errno
import logging
import time
from collections.abc import Callable
from pathlib import Path

import httpx2
from huggingface_hub import set_client_factory, snapshot_download
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError

from apps.contracts.failures import FailureCode
from apps.contracts.runs import BaseModelRef
from gpu_workers.common.base_models import HUB_PATTERNS, find_damaged, repair
from gpu_workers.common.config import hub_addresses
from gpu_workers.train.failures import TrainingFailed

log = logging.getLogger(__name__)

_TRIES = 4
_LONGEST_WAIT_SECONDS = 120
_BUSY = (429, 500, 502, 503, 504)


def fetch_base_model(
    base_model: BaseModelRef, *, hub_token: str | None, sleep: Callable[[float], None] = time.sleep
) -> Path:
    """Return the folder of the base model, downloaded at its pinned commit unless it is local, files verified.

    Damaged files of the hub are downloaded again, once. Raises TrainingFailed.
    """
    unchecked = base_model.files_sha256
    if base_model.path is not None:
        folder = Path(base_model.path)
    else:
        folder = _download(base_model, hub_token, sleep)
        damaged = repair(folder, base_model.files_sha256, lambda: _download(base_model, hub_token, sleep))
        if damaged:
            log.warning("Damaged, and downloaded again: %s", ", ".join(damaged))
        unchecked = {name: unchecked[name] for name in damaged}  # repair has read the others
    if not (folder / "config.json").is_file():
        raise _unavailable(f"The base model {base_model.name} is not installed on this machine.")
    for name in find_damaged(folder, unchecked):
        raise _unavailable(f"{name} of the base model {base_model.name} is not the file this job was created with.")
    return folder


def _download(base_model: BaseModelRef, hub_token: str | None, sleep: Callable[[float], None]) -> Path:
    """Return the folder of the pinned commit. Bytes that arrived before an interruption are not downloaded again."""
    assert base_model.repo is not None  # by contract there is a path or a repository
    set_client_factory(_make_client)
    for attempt in range(1, _TRIES + 1):
        try:
            return Path(
                snapshot_download(
                    base_model.repo,
                    revision=base_model.revision,
                    token=hub_token or False,
                    allow_patterns=sorted(base_model.files_sha256) or list(HUB_PATTERNS),
                )
            )
        except GatedRepoError as error:
            message = (
                f"{base_model.repo} is gated, and the operator's token has no access to it: the token's owner has "
                "not accepted the terms on the hub."
                if hub_token
                else f"{base_model.repo} is gated, and the operator has stored no token with access to it."
            )
            raise _unavailable(message) from error
        except (OSError, ValueError, httpx2.HTTPError) as error:
            if isinstance(error, OSError) and error.errno == errno.ENOSPC:
                message = f"The machine's disk has no room for the base model {base_model.name}."
                raise TrainingFailed(FailureCode.DISK_FULL, message) from error
            wait = _seconds_to_wait(error, attempt)
            if wait is None or attempt == _TRIES:
                message = f"The base model {base_model.name} could not be downloaded ({type(error).__name__})."
                raise _unavailable(message) from error
            log.warning("The hub is busy: again in %.0f s", wait)
            sleep(wait)
    raise AssertionError("the last attempt returns or raises")


def _seconds_to_wait(error: BaseException, attempt: int) -> float | None:
    """Return how long to wait before another attempt; None if it would fail as well."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, HfHubHTTPError | httpx2.TransportError):
        cause = cause.__cause__
    if isinstance(cause, httpx2.TransportError):
        return float(2**attempt)
    if not isinstance(cause, HfHubHTTPError) or cause.response.status_code not in _BUSY:
        return None
    asked = cause.response.headers.get("Retry-After", "")
    return float(min(int(asked), _LONGEST_WAIT_SECONDS)) if asked.isdigit() and len(asked) < 9 else float(2**attempt)


def _make_client() -> httpx2.Client:
    """Return the hub library's HTTP client. It calls only known hosts, and sends the token only to the hub."""
    addresses = hub_addresses()

    def check(request: httpx2.Request) -> None:
        if not addresses.is_allowed(str(request.url)):
            raise httpx2.UnsupportedProtocol(f"the hub redirects to {request.url.host}, which is not one of its hosts")
        if not addresses.is_hub(str(request.url)):
            request.headers.pop("Authorization", None)

    return httpx2.Client(event_hooks={"request": [check]}, follow_redirects=True, timeout=None)


def _unavailable(message: str) -> TrainingFailed:
    return TrainingFailed(FailureCode.BASE_MODEL_UNAVAILABLE, message)
