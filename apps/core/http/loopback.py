"""Whether an address is this machine's own. Imports no Django."""

import ipaddress
from urllib.parse import urlsplit


def is_loopback(url: str) -> bool:
    """Tell whether a URL names this machine alone."""
    host = urlsplit(url).hostname or ""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
