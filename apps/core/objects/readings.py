"""Stored files that separate threads read, so that no request waits while gigabytes are read."""

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future

from apps.core.errors import DomainError, Status

_THREADS = 2
_MAX_KNOWN = 1_000  # readings, of which each caller that repeats its call has one


class FilesUnread(DomainError):
    """The files are still being read. The same call gets the result when it is sent again."""

    code = "files_unread"
    status = Status.UNAVAILABLE
    type = "server_error"
    is_retryable = True


class Readings:
    """Carries out a few readings at once. Each owner has one at a time, and owners are served in order.

    A reading has a name for the files that it reads. Its success is remembered, and a failure is reported once.
    """

    def __init__(self, *, threads: int = _THREADS) -> None:
        self._places = threading.Semaphore(threads)
        self._lock = threading.Lock()
        self._known: OrderedDict[str, Future[None]] = OrderedDict()  # by name, most recent last
        self._of_owner: dict[str, Future[None]] = {}
        self._failed: OrderedDict[str, None] = OrderedDict()  # names, most recent last

    def require(self, name: str, read: Callable[[], None], *, owner: str) -> None:
        """Return if `read` has ended. Otherwise start it, if it is not running, and raise FilesUnread.

        If `read` failed, raise its error.
        """
        with self._lock:
            reading = self._known.get(name)
            if reading is None:
                self._begin(name, read, owner)
            elif reading.done() and reading.exception() is not None:
                del self._known[name]
                self._failed[name] = None
                while len(self._failed) > _MAX_KNOWN:
                    self._failed.popitem(last=False)
        if reading is None or not reading.done():
            raise FilesUnread("The files are still being read. Send the same call again.", retry_after_seconds=1)
        reading.result()

    def has_failed(self, name: str) -> bool:
        """Return whether a reading of this name has failed before."""
        with self._lock:
            return name in self._failed

    def _begin(self, name: str, read: Callable[[], None], owner: str) -> None:
        """Begin the reading, unless the owner has another one. Then it waits for that one's end."""
        self._of_owner = {one: reading for one, reading in self._of_owner.items() if not reading.done()}
        if owner in self._of_owner:
            return
        reading: Future[None] = Future()
        self._known[name] = self._of_owner[owner] = reading
        while len(self._known) > _MAX_KNOWN:
            self._known.popitem(last=False)
        # A daemon, so that a process that is told to stop does not read to the end.
        threading.Thread(target=self._run, args=(reading, read), name="reading", daemon=True).start()

    def _run(self, reading: "Future[None]", read: Callable[[], None]) -> None:
        with self._places:
            try:
                read()
            except Exception as error:  # noqa: BLE001 - the caller gets it
                reading.set_exception(error)
            else:
                reading.set_result(None)


readings = Readings()
