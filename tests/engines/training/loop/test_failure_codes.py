"""The code of an exception of a library, by the words that it really uses."""

import errno
import resource
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from apps.contracts.failures import FailureCode
from gpu_workers.train.failure_codes import classify


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
