"""The terminal output of the main job: a line for each stage, a moving bar, and a hint if nothing moves."""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from demo.main_job.platform import DemoFailed, Platform

BAR_WIDTH = 28
BAR_SECONDS = 30.0  # between two lines if no bar can be drawn
HINT_SECONDS = 20.0
GIVE_UP_SECONDS = 900.0
POLL_SECONDS = 0.5

T = TypeVar("T")


@dataclass
class Stage:
    """A line for each stage, and a moving bar while it lasts. Seconds count from `began_at`."""

    began_at: float = field(default_factory=time.time)
    is_terminal: bool = field(default_factory=sys.stdout.isatty)
    seconds: dict[str, float] = field(default_factory=dict)
    _marked_at: float = field(default_factory=time.monotonic)
    _bar_at: float = field(default_factory=time.monotonic)

    def line(self, name: str, text: str) -> None:
        clear = "\r\033[K" if self.is_terminal else ""
        sys.stdout.write(f"{clear}{time.time() - self.began_at:7.1f} s  {name:<17} {text}\n")
        sys.stdout.flush()

    def bar(self, share: float, text: str) -> None:
        """Draw the bar; without a terminal, print a line now and then."""
        if self.is_terminal:
            full = round(BAR_WIDTH * min(max(share, 0.0), 1.0))
            sys.stdout.write(f"\r\033[K           {'█' * full}{'░' * (BAR_WIDTH - full)} {share:4.0%}  {text}")
            sys.stdout.flush()
        elif time.monotonic() - self._bar_at > BAR_SECONDS:
            self._bar_at = time.monotonic()
            self.line("", text)

    def mark(self, name: str) -> None:
        """Record how long the stage that ends now took."""
        now = time.monotonic()
        self.seconds[name], self._marked_at = round(now - self._marked_at, 1), now


class Quiet:
    """The time since the last change, and the moments that call for a hint."""

    def __init__(self) -> None:
        self._last: object = None
        self._since = time.monotonic()
        self._hint_after = HINT_SECONDS

    def see(self, value: object, *, hint_after: float = HINT_SECONDS) -> None:
        if value != self._last:
            self._last, self._since, self._hint_after = value, time.monotonic(), hint_after

    @property
    def is_begun(self) -> bool:
        return self._last is not None

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._since

    @property
    def is_too_long(self) -> bool:
        return self.seconds > GIVE_UP_SECONDS

    @property
    def is_hint_due(self) -> bool:
        """Return whether to print a hint now: the first after a short while, later ones at growing intervals."""
        if self.seconds < self._hint_after:
            return False
        self._hint_after = self.seconds * 3
        return True


def until(
    fetch: Callable[[], T | None], hint: Callable[[], str], platform: Platform, stage: Stage, name: str, *, process: str
) -> T:
    """Return the first true result of `fetch`; after a while print `hint` and the log of `process`."""
    quiet = Quiet()
    while not (found := fetch()):
        if quiet.is_too_long:
            raise DemoFailed(f"Nothing happened for {quiet.seconds:.0f} s. {hint()}", process=process)
        if quiet.is_hint_due:
            stage.line(name, f"{hint()} Log: {platform.log(process)}")
        time.sleep(POLL_SECONDS)
    return found
