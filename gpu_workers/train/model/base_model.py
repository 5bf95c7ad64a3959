"""The files of a base model: local, or downloaded at their commit; verified in both cases."""

from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import GatedRepoError

from apps.contracts.failures import FailureCode
from apps.contracts.runs import BaseModelRef
from gpu_workers.common.files import hash_file
from gpu_workers.train.failures import TrainingFailed

_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer.model"]


def fetch_base_model(base_model: BaseModelRef, *, hub_token: str | None) -> Path:
    """Return the folder of the base model, downloaded at its pinned commit unless it is local, files verified."""
    if base_model.path is not None:
        folder = Path(base_model.path)
    else:
        assert base_model.repo is not None  # by contract there is a path or a repository
        try:
            folder = Path(
                snapshot_download(
                    base_model.repo,
                    revision=base_model.revision,
                    token=hub_token or False,
                    allow_patterns=sorted(base_model.files_sha256) or _HUB_FILES,
                )
            )
        except GatedRepoError as error:
            message = (
                f"{base_model.repo} is gated, and the hub does not open it to the operator's token: its owner has not "
                "accepted the terms there."
                if hub_token
                else f"{base_model.repo} is gated, and its operator has stored no token that opens it."
            )
            raise TrainingFailed(FailureCode.BASE_MODEL_UNAVAILABLE, message) from error
        except (OSError, ValueError) as error:  # every hub and connection error is one of the two
            message = f"The base model {base_model.name} could not be downloaded ({type(error).__name__})."
            raise TrainingFailed(FailureCode.BASE_MODEL_UNAVAILABLE, message) from error
    _verify_base_model(folder, base_model)
    return folder


def _verify_base_model(folder: Path, base_model: BaseModelRef) -> None:
    if not (folder / "config.json").is_file():
        message = f"The base model {base_model.name} is not installed on this machine."
        raise TrainingFailed(FailureCode.BASE_MODEL_UNAVAILABLE, message)
    for name, sha256 in base_model.files_sha256.items():
        path = folder / name
        if not path.is_file() or hash_file(path) != sha256:
            message = f"{name} of the base model {base_model.name} is not the file this job was created with."
            raise TrainingFailed(FailureCode.BASE_MODEL_UNAVAILABLE, message)
