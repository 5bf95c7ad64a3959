"""The states of an adapter version: what was trained is served only after an engine has certified it."""

from apps.core.database.transitions import Transitions

VERSION_TRANSITIONS: Transitions = {
    "checking": frozenset({"ready", "refused", "uncertified"}),
    "uncertified": frozenset({"ready", "refused"}),  # served, made without a probe: an engine tried it, no more
    "refused": frozenset({"ready"}),  # another engine may prove the first one wrong, by the same probe
    "ready": frozenset(),
    "files_only": frozenset(),  # what the engine cannot load as an adapter: delivered, not served
}
