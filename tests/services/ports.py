"""Ports for servers that bind one by number."""

import errno
import random
import socket


def free_port(host: str = "127.0.0.1") -> int:
    """Return one below those the kernel gives to outgoing connections, which none of them takes before its server."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        while True:
            port = random.SystemRandom().randrange(15_000, 32_000)  # independent of the seeds that a test run sets
            try:
                probe.bind((host, port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
            else:
                return port


def has_ipv6() -> bool:
    """Return whether a server of a test can listen on IPv6; a container often has none."""
    try:
        free_port("::1")
    except OSError:
        return False
    return True
