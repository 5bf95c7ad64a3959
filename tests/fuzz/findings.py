"""What was tried and what was found."""

import json
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from typing import Any

KINDS = ("server_errors", "undocumented_statuses", "hangs", "faults")
_MAX_KEPT = 100
_SHOWN = 2_000


class Findings:
    """Counts inputs by surface; keeps the first finding of each kind with its input."""

    def __init__(self, seed: int) -> None:
        self.kept: list[dict[str, Any]] = []
        self.seed = seed
        self.not_sent = 0  # inputs that no client could send
        self._surface = ""
        self._tried, self._found = Counter[str](), Counter[str]()
        self._answers: dict[str, Counter[int]] = {}
        self._called: dict[str, set[str]] = {}
        self._accepted: dict[str, set[str]] = {}
        self._known: set[tuple[str, str]] = set()

    def begin(self, surface: str, *, seed: int) -> None:
        self._surface, self.seed = surface, seed

    def note(self, kind: str, what: str, given: object) -> None:
        """Count a finding: `kind` is one of KINDS, `what` tells equal ones apart."""
        self._found[kind] += 1
        if (kind, what) in self._known or len(self.kept) >= _MAX_KEPT:
            return
        self._known.add((kind, what))
        finding = {
            "kind": kind,
            "surface": self._surface,
            "seed": self.seed,
            "what": what,
            "input": repr(given)[:_SHOWN],
        }
        self.kept.append(finding)
        sys.stdout.write(json.dumps(finding) + "\n")
        sys.stdout.flush()

    def count(self) -> None:
        self._tried[self._surface] += 1

    def count_answer(self, status: int, where: str) -> None:
        """Count an answer by its status: a surface that only refuses for its limits or keys tests nothing."""
        self._answers.setdefault(self._surface, Counter())[status] += 1
        self._called.setdefault(self._surface, set()).add(where)
        if status < 400:
            self._accepted.setdefault(self._surface, set()).add(where)

    def read(self, function: Callable[[Any], object], given: object, *, most_seconds: float) -> None:
        """Call a reader of this process: it may return or refuse, and takes so much processor time at the most."""
        self.count()
        began = time.process_time()
        try:
            function(given)
        except Exception as error:  # noqa: BLE001 - any exception is what is looked for
            where = traceback.extract_tb(error.__traceback__)[-1]
            self.note("faults", f"{type(error).__name__} at {where.filename}:{where.lineno}", given)
        took = time.process_time() - began
        if took > most_seconds:
            self.note("hangs", f"{getattr(function, '__name__', function)} took more than {most_seconds} s", given)

    def summary(self) -> dict[str, Any]:
        answers = {surface: dict(found) for surface, found in self._answers.items()}
        counts = {kind: self._found[kind] for kind in KINDS}
        requests = sum(sum(found.values()) for found in self._answers.values())
        return {
            "requests": requests,
            "inputs": dict(self._tried),
            "answers": answers,
            "not_sent": self.not_sent,
            "called": {surface: len(found) for surface, found in self._called.items()},
            "accepted": {surface: len(found) for surface, found in self._accepted.items()},
        } | counts
