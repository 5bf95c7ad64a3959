"""The mapping from an exception to the error code and the one line that the customer reads."""

import errno
import re

import torch
from safetensors import SafetensorError

from apps.contracts.failures import FailureCode
from gpu_workers.train.failures import TrainingFailed

_LOST_PEER = re.compile(r"gloo|connection (closed|reset) by peer|NCCL.*(remote|timeout|system error)", re.IGNORECASE)
_NO_MEMORY = re.compile(r"out of memory|can't allocate memory|STATUS_ALLOC_FAILED")
# The errors of safetensors and torch.save have no errno. Those of torch.save do not say why the file is too short.
_SHORT_WRITE = re.compile(r"os error (28|122)\b|inline_container.*unexpected pos|PytorchStreamWriter failed writing")


def classify(error: BaseException, *, is_group: bool = False) -> TrainingFailed:
    """Return the failure to report for any exception of the child.

    `is_group` says that it trains with other machines.
    """
    if isinstance(error, TrainingFailed):
        return error
    if is_group and isinstance(error, RuntimeError) and _LOST_PEER.search(str(error)):
        message = "Lost contact with another machine of the job."
        return TrainingFailed(FailureCode.WORKER_LOST, message)
    if is_out_of_memory(error):
        return TrainingFailed(FailureCode.OUT_OF_MEMORY, "The job did not fit into the memory of the machine.")
    if is_disk_full(error):
        return TrainingFailed(FailureCode.DISK_FULL, "The disk of the machine is full.")
    if isinstance(error, RuntimeError) and bool(re.search(r"CUDA error|cuDNN error|NCCL error|CUBLAS", str(error))):
        return TrainingFailed(FailureCode.GPU_FAULT, "The GPU reported a fault.")
    return TrainingFailed(FailureCode.INTERNAL_ERROR, f"Training stopped unexpectedly ({type(error).__name__}).")


def is_disk_full(error: BaseException) -> bool:
    """Return whether a file could not be written for lack of space."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    return isinstance(error, SafetensorError | RuntimeError) and bool(_SHORT_WRITE.search(str(error)))


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory ran out, on the GPU or in the machine."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    is_named = isinstance(error, RuntimeError) and bool(_NO_MEMORY.search(str(error)))
    return is_named or isinstance(error, torch.OutOfMemoryError | MemoryError)
