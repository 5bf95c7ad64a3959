"""The ports of a launch, which no other launch on this machine chooses while it lasts."""

import errno
import socket


def choose_port(wanted: int, *, host: str, taken: int) -> int:
    """Return the first free port of `host` from `wanted` on, or any free one if the next hundred are taken.

    Another error than a taken port is left to the server, whose log names it.
    """
    for port in (*range(wanted, min(wanted + 100, 65_536)), 0):
        try:
            with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((host, port))
                found = int(probe.getsockname()[1])
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                continue
            found = port
        if found != taken and _hold(found):
            return found
    raise OSError(f"no free port on {host}")


def reach(host: str, port: int | str) -> str:
    """Return the host and port at which this machine reaches a server that listens on `host`."""
    own = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104  nothing is bound
    return f"[{own}]:{port}" if ":" in own else f"{own}:{port}"


def _hold(port: int) -> bool:
    """Keep other launches from choosing this port until this process ends; return whether none has chosen it.

    The server itself listens only seconds later. The name of the socket is no file; the kernel frees it with us.
    """
    holder = socket.socket(socket.AF_UNIX)
    try:
        holder.bind(f"\0anneal-port-{port}")
    except OSError:
        holder.close()
        return False
    holder.detach()
    return True
