"""A dedicated replica for one merged or fully trained model. Its files are fetched before its engine starts.

The folder is named after its content, checked file by file at each start of the agent, and read-only. It contains no
code: the engine does not trust remote code, and other kinds of files are not fetched.
"""

import hashlib
import logging
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from apps.contracts.result_files import is_model_file
from apps.contracts.runs import SignedFile
from apps.contracts.serving import ObservedState
from apps.contracts.worker_api import EnrollResponse
from gpu_workers.common.api_client import ApiClient, ApiError, Unavailable
from gpu_workers.common.downloads import OpenObject, Unfetchable, fetch
from gpu_workers.common.files import flush, hash_file, remove_tree
from gpu_workers.engine.state import EnginePaths, ReplicaBase, read_engine_state

log = logging.getLogger("anneal.serving")

RETRY_SECONDS = 10.0


def wait_for_model(
    enrollment: EnrollResponse,
    folder: Path,
    *,
    api: ApiClient,
    open_object: OpenObject,
    url: str,
    sleep: Callable[[float], None] = time.sleep,
) -> ReplicaBase:
    """Return the model to serve once its files are here. Until then, report to the control plane why it waits."""
    replica_id = enrollment.replica_id or ""
    served_name = (enrollment.base_model or {})["served_name"]
    while True:
        generation, trouble = 0, ""
        try:
            desired = api.get_desired_state(replica_id)
            if desired is not None and not desired.is_withdrawn:
                generation = desired.generation
                _tell(api, replica_id, generation, "downloading the model", url)
                return ReplicaBase(
                    served_name=served_name,
                    path=str(fetch_model(desired.model_files, folder, open_object)),
                    has_adapters=False,
                )
            trouble = "its model was deleted"
        except Unfetchable as refusal:
            trouble = str(refusal)
        except (Unavailable, ApiError) as error:
            trouble = f"the control plane does not answer: {error}"
        log.warning("the model is not here yet: %s", trouble)
        _tell(api, replica_id, generation, trouble, url)
        sleep(RETRY_SECONDS)


def fetch_model(files: Sequence[SignedFile], folder: Path, open_object: OpenObject) -> Path:
    """Return the folder with exactly these files, every hash checked. Raises Unfetchable.

    Whole files from an earlier attempt are kept; other models in the folder are deleted.
    """
    wanted = [file for file in files if is_model_file(file.name)]
    if "config.json" not in {file.name for file in wanted}:
        raise Unfetchable("The model has no config.json.")
    identity = "\n".join(sorted(f"{file.name} {file.sha256}" for file in wanted))
    path = folder / f"sha256-{hashlib.sha256(identity.encode()).hexdigest()}"
    staged = folder / f"staging-{path.name}"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for other in folder.iterdir():
            if other not in (path, staged):
                remove_tree(other)
        if path.is_dir():
            if all(_is_whole(path / file.name, file) for file in wanted):
                return path
            remove_tree(path)
        return _fetch_into(staged, path, wanted, open_object)
    except OSError as error:
        raise Unfetchable(f"The model could not be stored: {error.strerror}.") from error


def _fetch_into(staged: Path, path: Path, files: Sequence[SignedFile], open_object: OpenObject) -> Path:
    staged.mkdir(exist_ok=True)
    missing = [file for file in files if not _is_whole(staged / file.name, file)]
    needed = sum(file.bytes for file in missing)
    if shutil.disk_usage(staged).free < needed:
        raise Unfetchable(f"The model needs {needed} bytes of disk, more than are free.")
    for file in missing:
        fetch(file, staged / file.name, open_object)
    for file in files:
        (staged / file.name).chmod(0o444)
    staged.rename(path)
    path.chmod(0o555)
    flush(path)
    flush(path.parent)
    return path


def _is_whole(path: Path, file: SignedFile) -> bool:
    try:
        return path.stat().st_size == file.bytes and hash_file(path) == file.sha256
    except FileNotFoundError:
        return False


def withdraw_model(paths: EnginePaths, folder: Path) -> None:
    """End the engine of a deleted model and delete its files. The next launcher waits, because it has no model."""
    paths.replica.unlink(missing_ok=True)
    state = read_engine_state(paths)
    if state is not None:
        paths.restart_request.write_text(state.generation)
    for model in folder.glob("*"):
        remove_tree(model)


def _tell(api: ApiClient, replica_id: str, generation: int, reason: str, url: str) -> None:
    said = ObservedState(
        replica_id=replica_id, generation=generation, engine_generation="", is_ready=False, adapters=(),
        reason=reason[:300], url=url,
    )  # fmt: skip
    try:
        api.report_observed_state(said)
    except (Unavailable, ApiError) as error:
        log.warning("observed state not reported: %s", error)
