"""The serving agent's verdict on each adapter that it should serve. Verdicts outlive the agent."""

import asyncio
import logging
from collections.abc import Callable, Iterable

import msgspec

from apps.contracts.parity import ParityResult
from apps.contracts.serving import LoadState, ObservedAdapter
from gpu_workers.serving.agent_memory import MemoryFile

log = logging.getLogger("anneal.serving")

MAX_SUSPICIONS = 3  # alone counts twice: the base model or the hardware may be at fault once
RETRY_SECONDS = 10.0


class Trial(msgspec.Struct):
    """The agent's knowledge of one desired adapter."""

    state: LoadState = LoadState.LOADING
    reason: str = ""
    retry_at: float = 0.0
    suspicions: int = 0
    parity: ParityResult | None = None
    compared: object = None  # the files and the kind of engine that `parity` is about


class Trials:
    """One `Trial` for each desired adapter, by its engine name. Each reportable change sets `changed`."""

    def __init__(self, memory: MemoryFile, *, changed: asyncio.Event, clock: Callable[[], float]) -> None:
        self._memory = memory
        self._changed = changed
        self._clock = clock
        self._trials: dict[str, Trial] = {}

    def __getitem__(self, name: str) -> Trial:
        return self._trials[name]

    def follow(self, wanted: set[str]) -> None:
        """Track exactly these adapters. Earlier rejections stay."""
        for name in set(self._trials) - wanted:
            del self._trials[name]
            self._changed.set()
        kept = self._memory.content
        for name in wanted - set(self._trials):
            trial = Trial(suspicions=kept.suspicions.get(name, 0))
            if name in kept.rejected:
                trial.state, trial.reason = LoadState.REJECTED, kept.rejected[name]
            self._trials[name] = trial
            self._changed.set()

    def observe(self) -> tuple[ObservedAdapter, ...]:
        """Return the reported state of each adapter."""
        return tuple(
            ObservedAdapter(lora_name=name, state=trial.state, reason=trial.reason[:300], parity=trial.parity)
            for name, trial in sorted(self._trials.items())
        )

    def is_rejected(self, name: str) -> bool:
        """Return whether this adapter is permanently bad, even if it is not desired."""
        return name not in self._trials or self._trials[name].state is LoadState.REJECTED

    def is_due(self, name: str) -> bool:
        """Return whether to test it now."""
        return not self.is_rejected(name) and self._clock() >= self._trials[name].retry_at

    def list_expected(self) -> list[str]:
        """Return the adapters that may still be served."""
        return [name for name in self._trials if not self.is_rejected(name)]

    def record_engine_lost(self) -> None:
        for trial in self._trials.values():
            if trial.state is LoadState.LOADED:
                trial.state = LoadState.LOADING

    # --- verdicts ---------------------------------------------------------------------------------------------------

    def settle(self, name: str, state: LoadState, reason: str) -> None:
        trial = self._trials[name]
        if (trial.state, trial.reason) != (state, reason):
            trial.state, trial.reason = state, reason
            self._changed.set()

    def reject(self, name: str, reason: str) -> None:
        """Mark the adapter as permanently bad, for the next agent too."""
        log.warning("%s is rejected: %s", name, reason)
        self._memory.change(rejected=self._memory.content.rejected | {name: reason})
        self.settle(name, LoadState.REJECTED, reason)

    def postpone(self, name: str, reason: str) -> None:
        log.warning("%s is not loaded: %s", name, reason)
        self.settle(name, LoadState.FAILED, reason)
        self._trials[name].retry_at = self._clock() + RETRY_SECONDS

    def suspect(self, names: Iterable[str]) -> None:
        """Record that invalid numbers appeared while these were in use. Reject an adapter after too many suspicions."""
        suspects = set(names)
        for name in suspects & self._trials.keys():  # not of those that are no longer wanted
            trial = self._trials[name]
            trial.suspicions += 2 if len(suspects) == 1 else 1
            self._memory.change(suspicions=self._memory.content.suspicions | {name: trial.suspicions})
            if trial.suspicions >= MAX_SUSPICIONS:
                self.reject(name, "Requests to the adapter gave invalid numbers.")
            else:
                reason = "In quarantine: invalid numbers appeared while it was in use."
                self.settle(name, LoadState.FAILED, reason)

    # --- canary engine ----------------------------------------------------------------------------------------------

    def has_passed(self, name: str, folder_name: str) -> bool:
        """Return whether exactly these files passed on the canary engine."""
        return self._memory.content.passed.get(name) == folder_name

    def record_passed(self, name: str, folder_name: str) -> None:
        known = {other: folder for other, folder in self._memory.content.passed.items() if other in self._trials}
        self._memory.change(passed=known | {name: folder_name})
