"""Copies of a whole object store to another one, for backup and restore."""

from dataclasses import dataclass

from apps.core.objects.store import ObjectMissing, ObjectStore, read_chunks

_ROOTS = ("org", "platform")


@dataclass(frozen=True)
class Copied:
    objects: int
    bytes: int


def copy_objects(*, source: ObjectStore, target: ObjectStore) -> Copied:
    """Copy each object that the target lacks, or whose copy there is older or has another size. Delete nothing.

    An object that is deleted during the copy is left out.
    """
    count = byte_count = 0
    for root in _ROOTS:
        there = {key: (info.bytes, info.modified_at) for key, info in target.list_objects(root)}
        for key, info in source.list_objects(root):
            size, modified_at = there.get(key, (-1, 0.0))
            if size == info.bytes and modified_at >= info.modified_at:
                continue
            try:
                with source.open_stream(key) as stream:
                    byte_count += target.put_stream(key, read_chunks(stream)).bytes
            except ObjectMissing:
                continue
            count += 1
    return Copied(count, byte_count)
