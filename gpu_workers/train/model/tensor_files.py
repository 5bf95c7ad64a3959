"""Safetensors files, read and written one tensor at a time with the memory of one tensor.

The safetensors library maps whole files, and their pages count as this process's memory until the file is closed. It
also needs all tensors in memory to write them. (Format: https://huggingface.co/docs/safetensors: 8 bytes of length, a
JSON header, the data.)
"""

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
import torch

_LENGTH_BYTES = 8
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class Entry(msgspec.Struct, frozen=True):
    """A tensor of a file, and the position of its bytes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int = 0

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class UnknownNumbers(Exception):
    """A file contains an unknown number format."""


def list_tensors(file: Path) -> list[Entry]:
    """Return the tensors of a file in the order of their bytes. Raises UnknownNumbers."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(_LENGTH_BYTES), "little")
        header = json.loads(opened.read(length))
    entries = [
        Entry(name, _dtype(told["dtype"]), tuple(told["shape"]), _LENGTH_BYTES + length + told["data_offsets"][0])
        for name, told in header.items()
        if name != "__metadata__"
    ]
    return sorted(entries, key=lambda entry: entry.start)


def read_tensor(file: Path, entry: Entry) -> torch.Tensor:
    """Return one tensor in its own memory."""
    tensor = torch.empty(entry.shape, dtype=entry.dtype)
    with file.open("rb") as opened:
        opened.seek(entry.start)
        if opened.readinto(tensor.view(-1).view(torch.uint8).numpy()) != entry.bytes:
            raise EOFError(f"{file.name} is cut off")
    return tensor


def write_tensors(file: Path, entries: Sequence[Entry], tensors: Iterable[torch.Tensor]) -> None:
    """Write a file of these tensors. Each is taken from the iterable only when it is written."""
    header, at = {}, 0
    for entry in entries:
        place = [at, at := at + entry.bytes]
        header[entry.name] = {"dtype": _NAMES[entry.dtype], "shape": entry.shape, "data_offsets": place}
    encoded = json.dumps({"__metadata__": {"format": "pt"}} | header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with file.open("wb") as opened:
        opened.write(len(encoded).to_bytes(_LENGTH_BYTES, "little") + encoded)
        for entry, tensor in zip(entries, tensors, strict=True):
            assert (tensor.dtype, tuple(tensor.shape)) == (entry.dtype, entry.shape), entry.name
            opened.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)


def _dtype(name: str) -> torch.dtype:
    if name not in _DTYPES:
        raise UnknownNumbers(f"The base model holds numbers of the kind {name}, which cannot be merged.")
    return _DTYPES[name]
