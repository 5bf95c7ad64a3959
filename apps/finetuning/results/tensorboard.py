"""A job's metrics as a TensorBoard event file, made from its events: complete across attempts, without any worker.

The file is TFRecords of `tensorflow.Event` messages (tensorflow/core/util/event.proto, summary.proto). Only a few
fields are needed; TensorBoard's own writers would bring numpy and protobuf to the web processes.
"""

import struct
from collections.abc import Iterable, Iterator

from apps.finetuning.models import FineTuningJob

# The charted values, under the names that Hugging Face's trainer uses.
TAGS = {
    "train_loss": "train/loss",
    "learning_rate": "train/learning_rate",
    "grad_norm": "train/grad_norm",
    "train_mean_token_accuracy": "train/mean_token_accuracy",
    "tokens_per_second": "train/tokens_per_second",
    "epoch": "train/epoch",
    "memory_bytes": "system/memory_bytes",
    "gpu_utilization": "system/gpu_utilization",
    "gpu_celsius": "system/gpu_celsius",
    "gpu_watts": "system/gpu_watts",
    "valid_loss": "eval/loss",
    "valid_mean_token_accuracy": "eval/mean_token_accuracy",
}
_POLYNOMIAL = 0x82F63B78  # CRC-32C, reflected
_MASK_DELTA = 0xA282EAD8
_VERSION = "brain.Event:2"


def file_name(job: FineTuningJob) -> str:
    """Return a file name that TensorBoard recognizes."""
    return f"events.out.tfevents.{int(job.created_at.timestamp())}.{job.pk}"


def read_points(*, job: FineTuningJob) -> list[tuple[float, dict[str, float | None]]]:
    """Return the time and the values of every report, oldest first."""
    rows = job.events.filter(type="metrics").order_by("sequence").values_list("created_at", "data")
    return [(created_at.timestamp(), data) for created_at, data in rows]


def event_file(points: Iterable[tuple[float, dict[str, float | None]]], *, began_at: float) -> Iterator[bytes]:
    """Yield the file's records."""
    yield _record(_time(began_at) + _bytes(3, _VERSION.encode()))
    for moment, data in points:
        values = b"".join(
            _bytes(1, _bytes(1, tag.encode()) + b"\x15" + struct.pack("<f", value))
            for name, tag in TAGS.items()
            if isinstance(value := data.get(name), int | float)
        )
        if values:
            yield _record(_time(moment) + b"\x10" + _varint(int(data.get("step") or 0)) + _bytes(5, values))


def _record(message: bytes) -> bytes:
    length = struct.pack("<Q", len(message))
    return length + struct.pack("<I", _masked(length)) + message + struct.pack("<I", _masked(message))


def _masked(data: bytes) -> int:
    crc = _crc32c(data)
    return ((crc >> 15 | crc << 17) + _MASK_DELTA) & 0xFFFFFFFF


def _table() -> tuple[int, ...]:
    entries = []
    for entry in range(256):
        for _ in range(8):
            entry = entry >> 1 ^ (_POLYNOMIAL if entry & 1 else 0)
        entries.append(entry)
    return tuple(entries)


_TABLE = _table()


def _crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


def _time(seconds: float) -> bytes:
    return b"\x09" + struct.pack("<d", seconds)


def _bytes(field: int, value: bytes) -> bytes:
    return bytes([field << 3 | 2]) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*parts, value])
