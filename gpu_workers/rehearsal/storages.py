"""The memory of living tensors, counted operator by operator, for real tensors and for fake ones alike."""

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

# CUDA's caching allocator rounds every tensor up to this (c10/core/AllocatorConfig.h kMinBlockSize).
BLOCK_BYTES = 512
CPU_BLOCK_BYTES = 64  # c10/core/alignment.h gAlignment

# Integer tensors of at most this many values, and what is computed from them, are real under a fake mode.
_MAX_REAL = 1 << 22

_aten = torch.ops.aten
_DEVICE = torch.ops.prim.device.default


class LiveStorages(TorchDispatchMode):
    """Counts the storages that operators create until they are freed, with the peak of each moment.

    Under a FakeTensorMode, tensors of numbers that code reads (token ids, borders, masks) stay real, so that branches
    and shapes that depend on them are the true ones.
    """

    def __init__(self, *, block_bytes: int = BLOCK_BYTES) -> None:
        super().__init__()
        self.bytes = 0
        self.peaks: dict[str, int] = {}
        self.moment = ""
        self._block_bytes = block_bytes
        self._peak = 0
        self._held: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if func is _DEVICE:  # asked more often than anything else
            return args[0].fake_device if isinstance(args[0], FakeTensor) else args[0].device
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # it computes with its shard, which comes here again
        given = list(_tensors((*args, *kwargs.values()) if kwargs else args))
        fake = [value for value in given if isinstance(value, FakeTensor)]
        if func is _aten._local_scalar_dense.default and fake:
            return 1.0 if fake[0].is_floating_point() else 1
        if func is _aten.bincount.default and fake:  # of a router's choices: as many counts as experts
            return fake[0].new_empty(kwargs["minlength"] if kwargs else args[-1])
        if given and all(map(_is_real_integer, given)) and _result_size(given) <= _MAX_REAL:
            with _disable_current_modes():
                found = func(*args, **(kwargs or {}))
        else:
            if func is _aten.index.Tensor and fake:
                args = (args[0], [each for index in args[1] for each in _positions(index)])
            found = func(*args, **(kwargs or {}))
            if not given and _is_small_integer(found):
                with _disable_current_modes():
                    found = func(*args, **(kwargs or {}))
        for value in _tensors((found,)):
            self.add(value)
        return found

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing here is compiled, and the check takes longer than the count

    def add(self, tensor: torch.Tensor) -> None:
        """Count the tensor's storage until it is freed."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._held:
            return
        size = -(-storage.nbytes() // self._block_bytes) * self._block_bytes
        self._held[key] = (weakref.ref(storage, lambda _: self._drop(key)), size)
        self._grow(size)

    def resize(self, storage: torch.UntypedStorage, size: int) -> None:
        """Count a storage that changed its size without an operator."""
        key = storage._cdata
        if key in self._held:
            reference, before = self._held[key]
            size = -(-size // self._block_bytes) * self._block_bytes
            self._held[key] = (reference, size)
            self._grow(size - before)

    def enter(self, moment: str) -> None:
        """Begin a moment; its peak adds to the earlier ones of the same name."""
        self._close()
        self.moment, self._peak = moment, self.bytes

    @contextmanager
    def watching(self) -> Iterator["LiveStorages"]:
        with self:
            yield self
            self._close()

    def _close(self) -> None:
        self.peaks[self.moment] = max(self._peak, self.peaks.get(self.moment, 0))

    def _grow(self, size: int) -> None:
        self.bytes += size
        self._peak = max(self._peak, self.bytes)

    def _drop(self, key: int) -> None:
        self.bytes -= self._held.pop(key)[1]


def _positions(index: object) -> Sequence[object]:
    """Return a real mask as the positions it selects, one tensor for each dimension, so that their number is known."""
    if isinstance(index, torch.Tensor) and index.dtype is torch.bool and not isinstance(index, FakeTensor):
        with _disable_current_modes():
            return index.nonzero().unbind(-1)
    return (index,)


_INTEGERS = (torch.int64, torch.int32, torch.bool)


def _is_real_integer(value: torch.Tensor) -> bool:
    return value.dtype in _INTEGERS and value.device.type == "cpu" and not isinstance(value, FakeTensor)


def _is_small_integer(value: object) -> bool:
    if not isinstance(value, FakeTensor) or value.dtype not in _INTEGERS:
        return False
    return value.device.type == "cpu" and value.numel() <= _MAX_REAL


def _result_size(given: Sequence[torch.Tensor]) -> int:
    """Return the number of values of an operator's result, as far as the shapes of its arguments determine it."""
    try:
        return torch.Size(torch.broadcast_shapes(*(each.shape for each in given))).numel()
    except RuntimeError:
        return max(each.numel() for each in given)


def _tensors(values: Iterable[object]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
