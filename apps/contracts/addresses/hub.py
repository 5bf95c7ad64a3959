"""Addresses that a client of the hub may ask: the hub itself, and the hosts that it sends downloads to.

What a hub answers is not trusted: a redirect to any other host is refused, and the token goes to the hub alone.
"""

from urllib.parse import SplitResult, urlsplit

from apps.contracts.struct import Struct

_PORTS = {"https": 443, "http": 80}
_HUGGING_FACE = (".huggingface.co", ".hf.co")  # its content delivery network, by domain


class HubAddresses(Struct, frozen=True, kw_only=True):
    """`endpoint` and `blob_hosts` (host or host:port) are the operator's, so they may be private addresses."""

    endpoint: str
    blob_hosts: tuple[str, ...] = ()

    def is_hub(self, url: str) -> bool:
        """Return whether the URL has the hub's own origin: only such requests carry the token."""
        return _origin(urlsplit(url)) == _origin(urlsplit(self.endpoint))

    def is_allowed(self, url: str) -> bool:
        """Return whether a request to this URL may be sent."""
        address = urlsplit(url)
        host = (address.hostname or "").lower()
        if self.is_hub(url) or host in self.blob_hosts or f"{host}:{_origin(address)[2]}" in self.blob_hosts:
            return True
        return _origin(address)[::2] == ("https", 443) and host.endswith(_HUGGING_FACE)


def _origin(address: SplitResult) -> tuple[str, str, int]:
    host = (address.hostname or "").lower()
    try:
        return address.scheme, host, address.port or _PORTS.get(address.scheme, 0)
    except ValueError:  # out of range
        return address.scheme, host, 0
