"""The addresses of clients. Requests without a valid key are limited by them.

The front door reaches the gateway over a Unix socket, and nginx from an address in FORWARDED_ALLOW_IPS. Either replaces
`X-Forwarded-For` by the address of its own client, so that no client can name one. The header of any other peer is
ignored.
"""

import ipaddress

from django.conf import settings
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from apps.core.http.connections import refuse_head


def address_of(peer: tuple[str, int] | None, forwarded: bytes) -> str:
    """Return the network that limits count as one: an IPv4 address, or the /64 of one IPv6 customer.

    `forwarded` is the header of a request. The result is empty if the front did not name its client.
    """
    host = peer[0] if peer else ""
    if not host or _is_proxy(host):
        host = forwarded.rpartition(b",")[2].strip().decode("latin-1")
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return ""
    if isinstance(address, ipaddress.IPv6Address):
        address = address.ipv4_mapped or ipaddress.ip_network((int(address), 64), strict=False).network_address
    return str(address)


def _is_proxy(host: str) -> bool:
    if not settings.TRUSTED_PROXIES:
        return False
    proxies = ProxyHeadersMiddleware(refuse_head, trusted_hosts=settings.TRUSTED_PROXIES)  # type: ignore[arg-type]
    return host in proxies.trusted_hosts
