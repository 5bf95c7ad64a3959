"""The addresses of clients. Requests without a valid key are limited by them.

The front door reaches the gateway over a Unix socket, and nginx from an address in FORWARDED_ALLOW_IPS. Either replaces
`X-Forwarded-For` by the address of its own client, so that no client can name one. The header of any other peer is
ignored.
"""

from apps.core.http.connections import is_proxy
from apps.core.http.origin import network_of


def address_of(peer: tuple[str, int] | None, forwarded: bytes) -> str:
    """Return the network that limits count as one: an IPv4 address, or the /64 of one IPv6 customer.

    `forwarded` is the header of a request. The result is empty if the front did not name its client.
    """
    host = peer[0] if peer else ""
    if not host or is_proxy(host):
        host = forwarded.rpartition(b",")[2].strip().decode("latin-1")
    try:
        return network_of(host)
    except ValueError:
        return ""
