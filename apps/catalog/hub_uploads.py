"""A folder sent to a customer's repository on the hub, as one commit, with the customer's own token.

The client is that of `hub.py`: the token goes only to the hub, and files go only to its known hosts. The library's
errors may repeat what was sent, so their texts never leave this module.
"""

from pathlib import Path

import httpx2
from django.conf import settings
from django.utils.translation import gettext
from huggingface_hub import CommitOperationAdd, HfApi, set_client_factory
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError
from huggingface_hub.utils import disable_progress_bars

from apps.catalog.hub import Limited, Refused, make_client
from apps.core.errors import DomainError, Unavailable

_THREADS = 2  # files at a time
_CONFLICTS = (409, 412)


class PushRefused(DomainError):
    """The hub does not let the token write to the repository. Repeating does not help."""

    code = "push_refused"


def push_folder(*, repo: str, folder: Path, token: str, message: str) -> str:
    """Commit the folder's files to the repository's main branch, and return the commit.

    If the repository does not exist, it is created as a private one. Files that the hub already has are not sent again.
    Raises PushRefused, and Unavailable if a repeat may succeed.
    """
    set_client_factory(make_client)
    disable_progress_bars()
    api = HfApi(endpoint=settings.HUB_URL, token=token)
    files = [file for file in sorted(folder.iterdir()) if file.is_file()]
    try:
        api.create_repo(repo, private=True, exist_ok=True)
        operations = [CommitOperationAdd(path_in_repo=file.name, path_or_fileobj=file) for file in files]
        return str(api.create_commit(repo, operations, commit_message=message, num_threads=_THREADS).oid)
    except RepositoryNotFoundError as error:  # of 401, for a token that is unknown or may not see the repository
        raise PushRefused(_unknown_token(), param="token") from error
    except (httpx2.HTTPError, OSError, RuntimeError, AttributeError, TypeError, ValueError, KeyError) as error:
        raise _in_our_words(repo, error) from None


def _in_our_words(repo: str, error: Exception) -> DomainError:
    """Return the error to raise. The library wraps the failure of one file in a RuntimeError."""
    cause = error.__cause__ if isinstance(error, RuntimeError) and error.__cause__ else error
    if isinstance(cause, Limited | Refused):
        return Unavailable(str(cause), code="hub_unavailable")
    status = cause.response.status_code if isinstance(cause, HfHubHTTPError) else 0
    if status == 401:
        return PushRefused(_unknown_token(), param="token")
    if status == 403:
        text = gettext("This token may not write to %(repo)s: give one with write access to it.")
        return PushRefused(text % {"repo": repo}, param="token")
    if status in _CONFLICTS:
        text = gettext("%(repo)s changed while the files were sent.")
        return Unavailable(text % {"repo": repo}, code="hub_unavailable")
    text = gettext("The hub did not take the files of %(repo)s (%(error)s).")
    return Unavailable(text % {"repo": repo, "error": type(cause).__name__}, code="hub_unavailable")


def _unknown_token() -> str:
    return gettext("The hub does not accept this token: it is wrong, expired or revoked.")
