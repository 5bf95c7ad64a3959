"""A base model on a hub at one commit: its licence, its text files in a folder, and the sizes and hashes of its files.

Workers download the weights themselves and check each file against these hashes. A hub is not trusted: its answers are
limited in size, its names and hashes are checked, and redirects are followed only to known hosts, without the token.
"""

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

import httpx2
import msgspec
from django.conf import settings
from django.utils.translation import gettext
from huggingface_hub import HfApi, constants, hf_hub_download, set_client_factory
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.hf_api import ModelInfo, RepoSibling

from apps.catalog.model_files import COMMIT, TEXT_FILES, ModelRefused, require_repository
from apps.contracts.addresses.hub import HubAddresses
from apps.core.errors import Unavailable

_ANSWER_SECONDS = 20.0
_ANSWER_LIMIT_BYTES = 64 * 1024**2  # the largest tokenizer.json seen is 33 MB (Gemma 3)
_MOST_FILES = 5_000
_MOST_WEIGHT_BYTES = 8 * 1024**4
# What transformers and vLLM load; Mistral keeps the same weights again in another file.
_WEIGHTS = re.compile(r"model(-\d{1,9}-of-\d{1,9})?\.safetensors")
_SHA256 = re.compile(r"[0-9a-f]{64}")
# The hub's names of licences -> SPDX identifiers, or names of the terms where SPDX has none.
_LICENCES = {
    "apache-2.0": "Apache-2.0", "mit": "MIT", "bsd-3-clause": "BSD-3-Clause", "cc-by-4.0": "CC-BY-4.0",
    "cc-by-nc-4.0": "CC-BY-NC-4.0", "cc-by-sa-4.0": "CC-BY-SA-4.0", "cc0-1.0": "CC0-1.0", "gemma": "Gemma Terms of Use",
    "llama3": "Llama 3 Community License", "llama3.1": "Llama 3.1 Community License",
    "llama3.2": "Llama 3.2 Community License", "llama3.3": "Llama 3.3 Community License",
    "llama4": "Llama 4 Community License",
}  # fmt: skip
constants.HF_HUB_DISABLE_XET = True  # its client would leave these limits; the files read here are small


class HubFile(msgspec.Struct, frozen=True):
    """A file of the repository. `sha256` is "" for a small text file, which the hub names by its Git id."""

    name: str
    bytes: int
    sha256: str = ""


class HubRepository(msgspec.Struct, frozen=True, kw_only=True):
    """The hub's description of a repository at one commit. Workers download `files`."""

    repo: str
    revision: str
    is_gated: bool
    licence: str
    licence_url: str
    files: tuple[HubFile, ...]

    @property
    def download_bytes(self) -> int:
        return sum(file.bytes for file in self.files)

    @property
    def weights_sha256(self) -> dict[str, str]:
        return {file.name: file.sha256 for file in self.files if file.name.endswith(".safetensors")}


class Limited(httpx2.HTTPError):
    """The hub refuses because of too many requests."""


class Refused(httpx2.HTTPError):
    """The hub's answer exceeds the limits of this module."""


def read_repository(*, repo: str, revision: str = "", token: str | None, into: Path) -> HubRepository:
    """Return the repository at the commit, or at its newest one.

    Download its configuration, tokenizer and template into `into`. Raises ModelRefused if the token does not open the
    repository or its files are not acceptable, Unavailable.
    """
    set_client_factory(make_client)
    api = HfApi(endpoint=settings.HUB_URL, token=token or False)
    try:
        info = api.model_info(repo, revision=revision or None, files_metadata=True, timeout=_ANSWER_SECONDS)
        if revision and info.sha != revision:
            raise Refused(
                gettext("The hub describes another commit of %(repo)s than %(revision)s.")
                % {"repo": repo, "revision": revision}
            )
        found = _repository(info)
        for file in info.siblings or ():
            if file.rfilename in TEXT_FILES:
                _download_text(found, file, token=token, into=into)
    except GatedRepoError as error:
        raise ModelRefused(_explain_gate(repo, has_token=bool(token)), param="hub_token") from error
    except RevisionNotFoundError as error:
        raise ModelRefused(
            gettext("%(repo)s has no commit %(revision)s.") % {"repo": repo, "revision": revision}, param="revision"
        ) from error
    except RepositoryNotFoundError as error:
        message = gettext("The hub has no %(repo)s, or requires a token that may read it.") % {"repo": repo}
        raise ModelRefused(message, param="repo") from error
    except (HfHubHTTPError, httpx2.HTTPError, OSError) as error:
        if isinstance(error, HfHubHTTPError) and error.response.status_code == 401:
            message = gettext("The hub does not accept this token: it is wrong, expired or revoked.")
            raise ModelRefused(message, param="hub_token") from error
        reason = gettext("%(repo)s could not be downloaded from the hub (%(error)s). Try again.") % {
            "repo": repo,
            "error": type(error).__name__,
        }
        known = isinstance(error, Limited | Refused)
        raise Unavailable(str(error) if known else reason, code="hub_unavailable") from error
    except (AttributeError, TypeError, ValueError, KeyError, RecursionError) as error:
        raise ModelRefused(
            gettext("The hub's description of %(repo)s cannot be read.") % {"repo": repo}, param="repo"
        ) from error
    return found


def find_newest_revision(*, repo: str, token: str | None) -> str:
    """Return the commit at the head of the repository's main branch; "" if the hub does not answer now."""
    set_client_factory(make_client)
    try:
        sha = HfApi(endpoint=settings.HUB_URL, token=token or False).model_info(repo, timeout=_ANSWER_SECONDS).sha
    except (httpx2.HTTPError, OSError, AttributeError, TypeError, ValueError, KeyError, RecursionError):
        return ""
    return sha if sha and COMMIT.fullmatch(sha) else ""


def _explain_gate(repo: str, *, has_token: bool) -> str:
    page = f"{settings.HUB_URL}/{repo}"
    if has_token:
        text = gettext(
            "%(repo)s is gated, and this token's account has no access: accept the licence at %(page)s with it."
        )
    else:
        text = gettext("%(repo)s is gated: accept its licence at %(page)s, and give a token of that account.")
    return text % {"repo": repo, "page": page}


def _repository(info: ModelInfo) -> HubRepository:
    siblings = info.siblings or []
    require_repository(info.id, info.sha or "none")
    if len(siblings) > _MOST_FILES:
        raise ModelRefused(
            gettext("%(info)s has %(count)s files: too many.") % {"info": info.id, "count": len(siblings)}, param="repo"
        )
    files = tuple(
        _file(sibling)
        for sibling in siblings
        if sibling.rfilename in TEXT_FILES or _WEIGHTS.fullmatch(sibling.rfilename)
    )
    if sum(file.bytes for file in files) > _MOST_WEIGHT_BYTES:
        raise ModelRefused(gettext("%(info)s claims more than 8 TiB of weights.") % {"info": info.id}, param="repo")
    licence, licence_url = _read_licence(info)
    return HubRepository(
        repo=info.id,
        revision=info.sha or "",
        is_gated=bool(info.gated),
        licence=licence,
        licence_url=licence_url,
        files=files,
    )


def _file(sibling: RepoSibling) -> HubFile:
    name, lfs, size = sibling.rfilename, sibling.lfs, sibling.size
    if not isinstance(size, int) or size < 0:
        raise ValueError(f"no size of {name}")
    if name in TEXT_FILES and size > _ANSWER_LIMIT_BYTES:
        raise ModelRefused(
            gettext("%(name)s has %(size)s bytes: too large for text.") % {"name": name, "size": size}, param="repo"
        )
    if name.endswith(".safetensors") and (lfs is None or not _SHA256.fullmatch(lfs.sha256)):
        raise ModelRefused(gettext("The hub gives no SHA-256 of %(name)s.") % {"name": name}, param="repo")
    return HubFile(name, size, lfs.sha256 if lfs else "")


def _download_text(found: HubRepository, file: RepoSibling, *, token: str | None, into: Path) -> None:
    path = hf_hub_download(
        found.repo,
        file.rfilename,
        revision=found.revision,
        local_dir=into,
        token=token or False,
        endpoint=settings.HUB_URL,
        etag_timeout=_ANSWER_SECONDS,
    )
    content = Path(path).read_bytes()
    if file.lfs:
        is_right = hashlib.sha256(content).hexdigest() == file.lfs.sha256
    else:
        git_id = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
        is_right = git_id == file.blob_id
    if not is_right:
        raise Refused(
            gettext("%(file)s of %(repo)s arrived damaged: its hash differs. Try again.")
            % {"file": file.rfilename, "repo": found.repo}
        )


def _read_licence(info: ModelInfo) -> tuple[str, str]:
    """Return the licence's SPDX identifier or the name of its terms ("" if unstated), and where to read it."""
    card, page = info.card_data, f"{settings.HUB_URL}/{info.id}"
    key = str((card.get("license") if card else None) or "").lower()
    named = str((card.get("license_name") if card else None) or "") if key == "other" else ""
    link = str((card.get("license_link") if card else None) or "")
    licence = "".join(filter(str.isprintable, _LICENCES.get(key) or named or key))
    is_link = link.startswith("https://") and len(link) <= 400 and link.isprintable()
    return licence[:80], link if is_link else page


# --- the client ------------------------------------------------------------------------------------------------------


class _Bounded(httpx2.SyncByteStream):
    def __init__(self, stream: httpx2.SyncByteStream) -> None:
        self._stream = stream

    def __iter__(self) -> Iterator[bytes]:
        count = 0
        for chunk in self._stream:
            count += len(chunk)
            if count > _ANSWER_LIMIT_BYTES:
                raise Refused(
                    gettext("The hub's answer is longer than %(mib)s MiB.") % {"mib": _ANSWER_LIMIT_BYTES // 1024**2}
                )
            yield chunk

    def close(self) -> None:
        self._stream.close()


def make_client() -> httpx2.Client:
    """Return the client for the hub's library. Its hooks see each request and answer in a chain of redirects."""
    addresses = HubAddresses(endpoint=settings.HUB_URL, blob_hosts=settings.HUB_BLOB_HOSTS)

    def check(request: httpx2.Request) -> None:
        if not addresses.is_allowed(str(request.url)):
            raise Refused(
                gettext(
                    "The hub redirects to %(host)s, which is not one of its hosts. If it belongs to a mirror, add "
                    "it to HF_BLOB_HOSTS."
                )
                % {"host": request.url.host}
            )
        if not addresses.is_hub(str(request.url)):
            request.headers.pop("Authorization", None)
        request.headers["Accept-Encoding"] = "identity"

    def bound(response: httpx2.Response) -> None:
        if response.status_code == 429:
            seconds = response.headers.get("Retry-After", "")
            if not seconds.isdigit() or len(seconds) > 5:
                raise Limited(gettext("The hub limits our requests: try again later."))
            raise Limited(
                gettext("The hub limits our requests: try again in %(seconds)s seconds.") % {"seconds": seconds}
            )
        if response.headers.get("Content-Encoding", "identity").strip().lower() not in ("", "identity"):
            raise Refused(
                gettext("The hub sent a compressed answer, which was not requested.")
            )  # the limit counts raw bytes
        assert isinstance(response.stream, httpx2.SyncByteStream)
        response.stream = _Bounded(response.stream)

    return httpx2.Client(
        event_hooks={"request": [check], "response": [bound]}, follow_redirects=True, timeout=_ANSWER_SECONDS
    )
