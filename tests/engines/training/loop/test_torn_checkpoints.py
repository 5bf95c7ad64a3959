"""Each file of a real checkpoint, torn in each way: the checkpoint is refused."""

import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from apps.contracts.failures import FailureCode
from gpu_workers.common.artifacts import MANIFEST_FILE, BrokenArtifact, verify_folder
from gpu_workers.common.events import CheckpointReady
from gpu_workers.train.failures import TrainingFailed
from gpu_workers.train.loop.checkpoint import BEST_FILE, open_checkpoint
from tests.support.engines.attempts import Tried, attempt
from tests.support.engines.rows import SMALL, make_rows, unlike

ROWS = make_rows(8)
BRIEF = msgspec.structs.replace(SMALL, epochs=1, early_stopping_patience=1)


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def flip_a_byte(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.fixture(scope="module")
def saved(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Tried:
    """A run that promised an export, so that it left a checkpoint at its end, with the best weights in it."""
    folder = tmp_path_factory.mktemp("saved")
    return attempt(folder, tiny_model, ROWS, recipe=BRIEF, exports=("merged_16bit",), validation=unlike(ROWS))


@pytest.mark.slow
@pytest.mark.parametrize("tear", [truncate, Path.unlink, flip_a_byte])
def test_a_checkpoint_with_a_torn_file_is_refused(
    saved: Tried, tmp_path: Path, tear: Callable[[Path], None], record_property: Callable[[str, object], None]
) -> None:
    """By the worker, which knows the registered manifest, and by the child, which has only the one in the folder."""
    digest = saved.of(CheckpointReady)[-1].manifest_sha256
    names = sorted(path.name for path in saved.newest_checkpoint.iterdir())
    verify_folder(saved.newest_checkpoint, manifest_sha256=digest)
    open_checkpoint(saved.newest_checkpoint)
    assert {MANIFEST_FILE, BEST_FILE, "optimizer.pt"} <= set(names)

    for name in names:
        folder = tmp_path / name
        shutil.copytree(saved.newest_checkpoint, folder)
        tear(folder / name)
        with pytest.raises(BrokenArtifact):
            verify_folder(folder, manifest_sha256=digest)
        if (name, tear) != (MANIFEST_FILE, flip_a_byte):
            with pytest.raises(BrokenArtifact):
                open_checkpoint(folder)

    record_property("refused", len(names))


@pytest.mark.slow
def test_an_attempt_that_finds_its_checkpoint_torn_says_so(saved: Tried, tiny_model: Path, tmp_path: Path) -> None:
    torn = shutil.copytree(saved.newest_checkpoint, tmp_path / "torn")
    flip_a_byte(torn / "optimizer.pt")

    with pytest.raises(TrainingFailed, match=r"optimizer\.pt") as failure:
        attempt(tmp_path / "again", tiny_model, ROWS, recipe=BRIEF, validation=unlike(ROWS), resume=torn)

    assert failure.value.code is FailureCode.CHECKPOINT_INVALID
