"""A fake machine: fake tensors on the "cpu" device, with the paths that the trainer's code takes on a GPU.

torch's CPU wheels cannot make fake CUDA tensors (slices need the driver), so code that asks for the device's type would
take its CPU path. Each replacement here answers one such question.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace

import torch
import transformers.masking_utils
import trl.kernels.chunked_logprob
import trl.trainer.dpo_trainer
import trl.trainer.utils
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes

from gpu_workers.rehearsal.storages import LiveStorages
from gpu_workers.train.model import attention
from gpu_workers.train.model.hardware import FLASH_CAPABILITY, Hardware

# A card with everything that our trainer looks for, except Liger and flash_attn, whose kernels have no fake form: the
# model's own code keeps more, so the figure is an upper bound where they are installed.
GPU = Hardware(name="a GPU", capability=FLASH_CAPABILITY, has_bf16=True, has_triton=True)
CPU = Hardware(name="the CPU", has_bf16=True)


@contextmanager
def fake_tensors(live: LiveStorages, *, is_gpu: bool, processes: int = 1) -> Iterator[None]:
    """Run the block with fake tensors, which `live` counts, as the first of this many processes."""
    with ExitStack() as stack:
        if processes > 1:
            torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=processes)
            stack.callback(torch.distributed.destroy_process_group)
        stack.enter_context(_replaced(torch.utils, "swap_tensors", _take_data))
        stack.enter_context(_replaced(transformers.masking_utils, "is_tracing", lambda tensor=None: False))
        stack.enter_context(_replaced(trl.trainer.dpo_trainer, "hash_module", lambda _: ""))
        stack.enter_context(_replaced(ShardingPropagator, "_propagate_tensor_meta_non_cached", _tensor_meta_alone))
        for module in (_fsdp_param, _fsdp_param_group):
            stack.enter_context(_replaced(module, "alloc_storage", _counted(live, is_freed=False)))
        stack.enter_context(_replaced(_fsdp_param, "free_storage", _counted(live, is_freed=True)))
        if is_gpu:
            for module, name, value in _ON_A_GPU:
                stack.enter_context(_replaced(module, name, value))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(live.watching())
        yield


class _Kernel:
    """A Triton kernel that works in place: it allocates nothing."""

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return lambda *_, **__: None


def _dropout(value: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    return torch.native_dropout(value, p, training)[0] if training and p else value


def _tensor_meta_alone(propagator: ShardingPropagator, *args: object) -> object:
    """Infer the result of a sharded operator from whole tensors that are not part of the job."""
    with _disable_current_modes():
        return _TENSOR_META(propagator, *args)


_TENSOR_META = ShardingPropagator._propagate_tensor_meta_non_cached
_chunked = trl.kernels.chunked_logprob
_ON_A_GPU: tuple[tuple[object, str, object], ...] = (
    (attention, "_has_varlen", lambda _: True),
    (_chunked, "_use_triton", lambda _: True),
    (trl.trainer.utils, "_use_triton", lambda _: True),
    (_chunked, "triton", SimpleNamespace(cdiv=lambda a, b: -(-a // b))),
    (_chunked, "_forward_kernel", _Kernel()),
    (_chunked, "_backward_kernel", _Kernel()),
    # CUDA's dropout keeps a mask of bytes; on a CPU it has the type of the input.
    (torch.nn.functional, "dropout", _dropout),
    # torch.addmm(out_dtype=float32) in place, which exists for CUDA tensors only
    (_chunked, "_addmm_fp32", lambda acc, a, b: None),
)


def _take_data(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """Replace torch.utils.swap_tensors, which refuses tensors that a fake mode remembers."""
    tensor.data = other.data


def _counted(live: LiveStorages, *, is_freed: bool) -> Callable[[torch.Tensor], None]:
    """Replace FSDP's change of a storage's size, which passes no operator."""

    def resize(tensor: torch.Tensor) -> None:
        live.resize(tensor.untyped_storage(), 0 if is_freed else tensor.numel() * tensor.itemsize)

    return resize


@contextmanager
def _replaced(module: object, name: str, value: object) -> Iterator[None]:
    missing = object()
    before = getattr(module, name, missing)
    setattr(module, name, value)
    try:
        yield
    finally:
        if before is missing:
            delattr(module, name)
        else:
            setattr(module, name, before)
