"""Which servers a customer may name for us to call: public ones, in any notation of their address."""

import ipaddress
import re
from urllib.parse import SplitResult, urlsplit

PORT = 443
LONGEST_URL = 400

_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")  # RFC 6052 §2.1
_V4_COMPATIBLE = ipaddress.IPv6Network("::/96")  # RFC 4291 §2.5.5.1
_NAME = re.compile(r"(?=.{1,253}\.?$)([a-z0-9]([a-z0-9_-]{0,61}[a-z0-9])?\.)+[a-z]([a-z0-9-]{0,61}[a-z0-9])\.?")
# RFC 6761, RFC 6762, RFC 9476, and what networks use for themselves.
_PRIVATE_NAMES = ("localhost", "local", "internal", "intranet", "lan", "home", "corp", "alt", "test", "invalid", "arpa")


def is_public(address: str) -> bool:
    """Tell whether an address of a network card is one of the public internet, also inside of an IPv6 address."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return False
    if isinstance(found, ipaddress.IPv6Address):
        if found.scope_id or found.is_site_local:
            return False
        if (inner := _inner_address(found)) is not None:
            return is_public(str(inner))
    return found.is_global and not (found.is_multicast or found.is_reserved or found.is_unspecified)


def check_server(url: str) -> SplitResult:
    """Return the parts of a server's address. Raises ValueError, with a sentence that says what to give.

    A name is looked up where it is called, each time; here only a name that cannot be public is refused.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        parts, host, port = urlsplit(""), "", None
    if len(url) > LONGEST_URL or not (url.isascii() and url.isprintable()):
        raise ValueError(f"An address has at most {LONGEST_URL} ASCII characters.")
    if parts.scheme != "https" or not host or parts.username is not None or parts.query or parts.fragment:
        raise ValueError("Give an https address, such as https://mlflow.example.com, without user or query.")
    if port not in (None, PORT):
        raise ValueError(f"Only port {PORT} is called: leave the port out.")
    is_name = _NAME.fullmatch(host) is not None and host.rstrip(".").rsplit(".", 1)[-1] not in _PRIVATE_NAMES
    if not (is_name or is_public(host)):
        raise ValueError("Give a server of the public internet: this address is a private one.")
    return parts


def _inner_address(address: ipaddress.IPv6Address) -> ipaddress.IPv4Address | None:
    """Return the IPv4 address to which packets for this one go, if there is one."""
    if address.ipv4_mapped or address.sixtofour:
        return address.ipv4_mapped or address.sixtofour
    if address.teredo:
        return address.teredo[1]
    if address in _NAT64 or address in _V4_COMPATIBLE:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return None
