"""States of an adapter version. An engine must load it before it is served."""

from apps.core.database.transitions import Transitions

VERSION_TRANSITIONS: Transitions = {
    "checking": frozenset({"ready", "refused", "uncertified"}),
    "uncertified": frozenset({"ready", "refused"}),  # served: an engine loaded it, without a parity probe
    "refused": frozenset({"ready"}),  # another engine may accept it by the same probe
    "ready": frozenset(),
    "files_only": frozenset(),  # no engine loads it as an adapter: files, or a whole model
}
