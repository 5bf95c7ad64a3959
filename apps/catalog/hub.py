"""A base model on a hub, at one commit: its text files in a folder, and the hashes of its weights.

Workers download the weights themselves and check each file against these hashes.
"""

from pathlib import Path

import httpx
from django.conf import settings
from huggingface_hub import HfApi, hf_hub_download
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.hf_api import ModelInfo

from apps.catalog.model_files import TEXT_FILES, ModelRefused
from apps.core.errors import Unavailable

_ANSWER_SECONDS = 20.0
_TEXT_LIMIT_BYTES = 64 * 1024**2  # the largest tokenizer.json seen is 33 MB (Gemma 3)


def download_text_files(*, repo: str, revision: str, token: str | None, into: Path) -> dict[str, str]:
    """Download configuration, tokenizer and template into `into`; return the SHA-256 of each weights file.

    Raises ModelRefused if the token does not open the repository or it is not safetensors, Unavailable.
    """
    try:
        info = HfApi(endpoint=settings.HUB_URL, token=token or False).model_info(
            repo, revision=revision, files_metadata=True, timeout=_ANSWER_SECONDS
        )
        texts, weights = _files_of(info)
        for name in texts:
            hf_hub_download(
                repo,
                name,
                revision=revision,
                local_dir=into,
                token=token or False,
                endpoint=settings.HUB_URL,
                etag_timeout=_ANSWER_SECONDS,
            )
    except GatedRepoError as error:
        message = f"{repo} is gated: accept its licence on the hub with an account, and give a token of that account."
        raise ModelRefused(message, param="hub_token") from error
    except RevisionNotFoundError as error:
        raise ModelRefused(f"{repo} has no commit {revision}.", param="revision") from error
    except RepositoryNotFoundError as error:
        message = f"The hub has no {repo}, or shows it only to a token that may read it."
        raise ModelRefused(message, param="repo") from error
    except (HfHubHTTPError, httpx.HTTPError, OSError) as error:
        raise Unavailable(
            f"The hub did not hand over {repo} ({type(error).__name__}): try again.", code="hub_unavailable"
        ) from error
    return weights


def _files_of(info: ModelInfo) -> tuple[list[str], dict[str, str]]:
    """Return the text files to download and the weights' hashes. Other files of the repository are never fetched."""
    texts, weights = [], {}
    for file in info.siblings or ():
        if file.rfilename in TEXT_FILES:
            if (file.size or 0) > _TEXT_LIMIT_BYTES:
                raise ModelRefused(f"{file.rfilename} has {file.size} bytes: too large for text.", param="repo")
            texts.append(file.rfilename)
        elif file.rfilename.endswith(".safetensors") and "/" not in file.rfilename:
            if file.lfs is None:
                raise ModelRefused(f"The hub gives no SHA-256 of {file.rfilename}.", param="repo")
            weights[file.rfilename] = file.lfs.sha256
    return texts, weights
