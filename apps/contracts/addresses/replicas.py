"""Addresses of replicas: valid URLs, and the machines the gateway may connect to.

An address is `unix:///path` or `http(s)://host:port`. Loopback, link-local and metadata addresses of clouds are refused
unless the installation names them; so are sockets outside its folders. A name is resolved at each connection, because
its address may change (DNS rebinding).
"""

import ipaddress
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import urlsplit

from apps.contracts.addresses.networks import Ip, Network, is_local, is_own_name

MAX_URL = 300
_HOST = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)(?:\.(?!-)[a-z0-9_-]{1,63}(?<!-))*")
_PATH = re.compile(r"/[A-Za-z0-9_./@:+-]*")


class AddressRefused(ValueError):
    """The address is not allowed for a replica; the message gives the reason and a remedy."""


@dataclass(frozen=True)
class AddressRules:
    """The addresses an installation allows for its replicas. They may be local and need no operator's acceptance.

    `sockets` are sockets, or folders that directly contain sockets.
    """

    networks: tuple[Network, ...] = ()
    hosts: frozenset[str] = frozenset()
    sockets: tuple[str, ...] = ()

    @classmethod
    def read(cls, entries: Iterable[str]) -> "AddressRules":
        """Return the rules for networks (`10.1.0.0/16`), host names, and sockets or their folders (`unix:///path`).

        Raises ValueError for an entry that is none of them.
        """
        networks: list[Network] = []
        hosts: set[str] = set()
        sockets: list[str] = []
        for entry in entries:
            if entry.startswith("unix:"):
                sockets.append(os.path.realpath("/" + entry.removeprefix("unix:").lstrip("/")))
            elif re.fullmatch(r"[\d.]+(?:/\d+)?|[\da-fA-F:.]*:[\da-fA-F:.]*(?:/\d+)?", entry):
                networks.append(ipaddress.ip_network(entry))
            elif _HOST.fullmatch(entry.lower()):
                hosts.add(entry.lower())
            else:
                raise ValueError(f"{entry!r} is no network, host name or unix:// path")
        return cls(tuple(networks), frozenset(hosts), tuple(sockets))

    def check(self, url: str) -> bool:
        """Return whether the URL is allowed without an operator's acceptance. Raises AddressRefused."""
        if len(url) > MAX_URL:
            raise AddressRefused(f"The address has more than {MAX_URL} characters.")
        if url.startswith("unix:"):
            path = url.removeprefix("unix://")
            if (
                not url.startswith("unix:///")
                or _PATH.fullmatch(path) is None
                or ".." in path.split("/")
                or path[-1] == "/"
            ):
                raise AddressRefused(
                    "A socket's address is unix:// and its absolute path: letters, digits and _ . / @ : + -"
                )
            self.check_socket(path)
            return True
        host = _host_of(url)
        if (ip := _ip_of(host)) is None:
            if is_own_name(host):
                self.check_ip("127.0.0.1")
            return host in self.hosts
        self.check_ip(ip)
        return self._names(ip)

    def check_socket(self, path: str) -> str:
        """Return the socket's real path. Raises AddressRefused unless it or its folder is named."""
        real = os.path.realpath(path)
        if real not in self.sockets and os.path.dirname(real) not in self.sockets:
            raise AddressRefused(
                "ANNEAL_REPLICA_ADDRESSES names neither this socket nor its folder: add one of them as unix:///path."
            )
        return real

    def check_ip(self, ip: Ip | str) -> None:
        """Raise AddressRefused for this machine, its link, reserved ranges and metadata services, unless named."""
        ip = ipaddress.ip_address(ip) if isinstance(ip, str) else ip
        if self._names(ip):
            return
        if is_local(ip):
            raise AddressRefused(
                f"The address {ip} is local, reserved or of a metadata service. Add it to ANNEAL_REPLICA_ADDRESSES"
                " where a replica is really there."
            )

    def _names(self, ip: Ip) -> bool:
        return any(ip.version == network.version and ip in network for network in self.networks)


def is_ip(host: str) -> bool:
    """Return whether the host is an IP address."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _host_of(url: str) -> str:
    """Return the host of an http address that has only scheme, host and port."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        raise AddressRefused("The address is no URL.") from None
    shown = f"[{host}]" if ":" in host else host
    plain = f"{parts.scheme}://{shown}" + (f":{port}" if port is not None else "")
    if parts.scheme not in ("http", "https") or not host or url.lower() not in (plain, plain + "/") or port == 0:
        raise AddressRefused("An address is http://host:port, https://host:port or unix:///path, and nothing more.")
    return host


def _ip_of(host: str) -> Ip | None:
    """Return the host as an IP address, None for a name. Raises AddressRefused for other notations of numbers."""
    if is_ip(host):
        return ipaddress.ip_address(host)
    last = host.rpartition(".")[2]
    if _HOST.fullmatch(host) is None or re.fullmatch(r"\d+|0x[0-9a-f]*", last):
        raise AddressRefused(
            f"{host[:100]!r} is no host name and no IP address: write four decimal numbers, or IPv6 in brackets."
        )
    return None
