"""Ports for servers that bind one by number."""

import random
import socket
from contextlib import suppress


def free_port(host: str = "127.0.0.1") -> int:
    """Return one below those the kernel gives to outgoing connections, which none of them takes before its server."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        while True:
            port = random.SystemRandom().randrange(15_000, 32_000)  # independent of the seeds that a test run sets
            with suppress(OSError):
                probe.bind((host, port))
                return port
