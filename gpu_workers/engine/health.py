"""Questions that the engine's keeper sends to its socket, without an event loop."""

import http.client
import json
import socket
from pathlib import Path


class _EngineConnection(http.client.HTTPConnection):
    """HTTP over the engine's socket, without an event loop."""

    def __init__(self, path: Path) -> None:
        super().__init__("engine", timeout=1.0)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


def count_requests(path: Path) -> int | None:
    """Return how many requests the engine is answering, or None if it does not report it."""
    connection = _EngineConnection(path)
    try:
        connection.request("GET", "/load")
        return int(json.loads(connection.getresponse().read())["server_load"])
    except (OSError, ValueError, KeyError, http.client.HTTPException):
        return None
    finally:
        connection.close()


def is_listening(path: Path) -> bool:
    """Return whether a request may be in progress. vLLM binds early, but listens only once it is ready."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
        return True
