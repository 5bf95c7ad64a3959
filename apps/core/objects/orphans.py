"""Orphaned objects, left by requests that failed after they stored their bytes, and by killed processes."""

import datetime
from collections.abc import Callable, Collection, Iterator
from itertools import islice

from apps.core.objects.store import store

# Longer than any request or validation. A younger object may belong to one that still runs.
ORPHAN_AGE = datetime.timedelta(days=1)
_BATCH = 500


def sweep(*, kinds: Collection[str], known: Callable[[list[str]], set[str]], now: datetime.datetime) -> int:
    """Delete folders `org/<organization>/<kind>/<id>` last written a day ago; return how many.

    `known` returns those of the given ids that must stay.
    """
    swept = 0
    folders = iter(_old_folders(kinds, (now - ORPHAN_AGE).timestamp()))
    while batch := list(islice(folders, _BATCH)):
        kept = known([folder.rsplit("/", 1)[1] for folder in batch])
        for folder in batch:
            if folder.rsplit("/", 1)[1] not in kept:
                store().delete_prefix(folder)
                swept += 1
    return swept


def _old_folders(kinds: Collection[str], before: float) -> Iterator[str]:
    newest: dict[str, float] = {}
    for key, info in store().list_objects("org"):
        parts = key.split("/")
        if len(parts) > 4 and parts[2] in kinds:
            folder = "/".join(parts[:4])
            newest[folder] = max(newest.get(folder, 0.0), info.modified_at)
    yield from (folder for folder, modified_at in newest.items() if modified_at < before)
