"""Statuses of an adapter version. An engine must load it before it is served."""

from enum import StrEnum

from apps.core.database.transitions import Transitions


class AdapterVersionStatus(StrEnum):
    CHECKING = "checking"
    READY = "ready"
    UNCERTIFIED = "uncertified"  # served: an engine loaded it, without a parity probe
    REFUSED = "refused"  # another engine may accept it by the same probe
    FILES_ONLY = "files_only"  # no engine loads it as an adapter: files, or a whole model


VERSION_TRANSITIONS: Transitions = {
    AdapterVersionStatus.CHECKING: frozenset(
        {AdapterVersionStatus.READY, AdapterVersionStatus.REFUSED, AdapterVersionStatus.UNCERTIFIED}
    ),
    AdapterVersionStatus.UNCERTIFIED: frozenset({AdapterVersionStatus.READY, AdapterVersionStatus.REFUSED}),
    AdapterVersionStatus.REFUSED: frozenset({AdapterVersionStatus.READY}),
    AdapterVersionStatus.READY: frozenset(),
    AdapterVersionStatus.FILES_ONLY: frozenset(),
}
