"""The health check of a program."""

import http.client
import socket
from collections.abc import Callable
from urllib.parse import urlsplit

from scripts.embedded import is_postgres_ready, is_redis_ready
from scripts.environment import LOOPBACK, Prepared
from scripts.launch.ports import reach
from scripts.processes import Program
from scripts.supervision import Supervision


def health_check(prepared: Prepared, supervision: Supervision, program: Program) -> Callable[[], bool]:
    """Return a check that the program answers or, if it does not listen, that it keeps running."""
    services, known = prepared.services, prepared.known
    match program.name:
        case "postgres":
            return lambda: services is not None and is_postgres_ready(services)
        case "redis":
            return lambda: services is not None and is_redis_ready(services)
        case "web":
            address = reach(known["ANNEAL_WEB_HOST"], known["WEB_PORT"])
            # Another program may answer at a port, while ours cannot listen there.
            return lambda: supervision.is_running(program) and _answers(f"http://{address}", "/accounts/login/")
        case "internal":
            address = reach(LOOPBACK, known["INTERNAL_PORT"])
            return lambda: supervision.is_running(program) and _answers(f"http://{address}", "/internal/v1/claim")
        case "gateway":
            return lambda: _answers(known["ANNEAL_GATEWAY_URL"], "/v1/chat/completions")
        case "vllm":
            engine = prepared.place.fill("${replica_dir}/engine/vllm.sock")
            return lambda: _answers(f"unix://{engine}", "/health")
        case _:
            return lambda: supervision.is_running(program)


def _answers(url: str, path: str) -> bool:
    """Return whether a server answers a GET, even if it refuses."""
    connection = _connection(url)
    try:
        connection.request("GET", path)
        return connection.getresponse().status < 500
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _connection(url: str) -> http.client.HTTPConnection:
    if not url.startswith("unix://"):
        parts = urlsplit(url)
        return http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=10)
    connection = http.client.HTTPConnection("localhost", timeout=10)
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.settimeout(10)
    try:
        connection.sock.connect(url.removeprefix("unix://"))
    except OSError:  # the request then fails because the socket has no peer
        pass
    return connection
