"""The code of an exception of a library, by the words that it really uses."""

import errno
import resource
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from apps.contracts.adapter_files import WEIGHTS_FILE
from apps.contracts.failures import FailureCode
from gpu_workers.common.artifacts import verify_folder
from gpu_workers.common.events import EVENTS_FILE, CheckpointReady, EventTail
from gpu_workers.train.failure_codes import classify
from gpu_workers.train.loop import base_trainer
from tests.support.engines.attempts import attempt
from tests.support.engines.rows import make_rows


@contextmanager
def files_up_to(n_bytes: int) -> Iterator[None]:
    """Let no file of this process grow further. Python ignores the signal, so a write fails as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("save", [save_file, torch.save])
def test_a_disk_that_fills_up_is_told_apart(tmp_path, save):
    with files_up_to(2**16), pytest.raises((SafetensorError, RuntimeError)) as failure:
        save({"a": torch.zeros(2**18)}, str(tmp_path / "file"))
    # Only the number differs: the file is too large (EFBIG), or the disk full (ENOSPC).
    error = type(failure.value)(str(failure.value).replace("os error 27", "os error 28"))

    assert classify(error).code is FailureCode.DISK_FULL
    assert classify(type(error)("something else")).code is FailureCode.INTERNAL_ERROR


@pytest.mark.slow
def test_a_disk_that_fills_up_while_training_leaves_the_checkpoint_before(tiny_model, tmp_path, monkeypatch):
    """The second one finds room for its weights, and none for the optimizer's state, which is larger."""
    save = base_trainer.save_checkpoint

    def save_until_full(root, spec, state):
        before = [*root.glob("checkpoint-*")]
        with files_up_to((before[0] / WEIGHTS_FILE).stat().st_size) if before else nullcontext():
            return save(root, spec, state)

    monkeypatch.setattr(base_trainer, "save_checkpoint", save_until_full)
    monkeypatch.setattr(
        "gpu_workers.train.loop.run_callback.checkpoint_interval_seconds", lambda spec, save_seconds: 0.0
    )

    with pytest.raises(RuntimeError) as failure:
        attempt(tmp_path, tiny_model, make_rows(32))

    assert classify(failure.value).code is FailureCode.DISK_FULL
    [ready] = [event for event in EventTail(tmp_path / EVENTS_FILE).read() if isinstance(event, CheckpointReady)]
    assert verify_folder(tmp_path / ready.folder, manifest_sha256=ready.manifest_sha256).step == ready.step
    assert [path.name for path in (tmp_path / ready.folder).parent.glob("checkpoint-*")] == [f"checkpoint-{ready.step}"]


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory."),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
    ],
)
def test_memory_runs_out_in_several_words(error):
    assert classify(error).code is FailureCode.OUT_OF_MEMORY
