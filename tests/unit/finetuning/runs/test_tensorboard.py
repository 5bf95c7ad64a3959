"""The event file is one that TensorBoard reads: records with their checks, messages with its fields."""

import struct

from apps.finetuning.results.tensorboard import _crc32c, event_file


def records(data: bytes) -> list[bytes]:
    """Take the file apart as TensorFlow's record reader does."""
    found, at = [], 0
    while at < len(data):
        [length] = struct.unpack_from("<Q", data, at)
        for start, size in ((at, 8), (at + 12, length)):
            crc = _crc32c(data[start : start + size])
            masked = ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
            assert struct.unpack_from("<I", data, start + size) == (masked,)
        found.append(data[at + 12 : at + 12 + length])
        at += 16 + length
    return found


def test_the_checksum_is_castagnolis():
    assert _crc32c(b"123456789") == 0xE3069283


def test_a_report_becomes_one_event_with_its_step_and_values():
    points = [(1_700_000_000.0, {"step": 300, "train_loss": 0.5, "grad_norm": None}), (1_700_000_001.0, {"note": "x"})]

    version, event = records(b"".join(event_file(points, began_at=1_699_999_999.0)))

    assert version.endswith(b"\x1a\x0dbrain.Event:2")
    value = b"\x0a\x0atrain/loss\x15" + struct.pack("<f", 0.5)
    summary = b"\x0a" + bytes([len(value)]) + value
    wall_time, step = b"\x09" + struct.pack("<d", 1_700_000_000.0), b"\x10\xac\x02"
    assert event == wall_time + step + b"\x2a" + bytes([len(summary)]) + summary
