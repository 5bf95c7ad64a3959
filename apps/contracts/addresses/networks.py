"""Classification of IP addresses: local, private, a cloud's metadata service, or public.

One list serves every check of an address from outside, including IPv6 addresses that lead to IPv4.
"""

import ipaddress
from urllib.parse import urlsplit

Ip = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

# Metadata services that are not link-local: Alibaba Cloud, Oracle Cloud, Azure's wire server, AWS over IPv6.
_METADATA: list[Network] = [
    ipaddress.ip_network(text) for text in ("100.100.100.200/32", "192.0.0.0/24", "168.63.129.16/32", "fd00:ec2::/32")
]
# First labels of the names that systems give themselves and the groups of their link in /etc/hosts: Debian, Fedora,
# SUSE, BSD and macOS.
_OWN_NAMES = frozenset({
    "localhost", "localhost4", "localhost6", "loopback", "ip6-localhost", "ip6-loopback", "ipv6-localhost",
    "ipv6-loopback", "broadcasthost", "ip6-localnet", "ip6-mcastprefix", "ip6-allnodes", "ip6-allrouters",
    "ip6-allhosts", "ipv6-localnet", "ipv6-mcastprefix", "ipv6-allnodes", "ipv6-allrouters", "ipv6-allhosts",
})  # fmt: skip
_OWN_NAT64 = ipaddress.IPv6Network("64:ff9b:1::/48")  # RFC 8215: a translator of the local network
# Prefixes that contain an IPv4 address, and the number of bits after it: NAT64 (RFC 6052, 8215), 6to4, IPv4-compatible,
# IPv4-translated (RFC 2765).
_WRAPPED = [
    (ipaddress.IPv6Network("64:ff9b::/96"), 0),
    (_OWN_NAT64, 0),
    (ipaddress.IPv6Network("2002::/16"), 80),
    (ipaddress.IPv6Network("::/96"), 0),
    (ipaddress.IPv6Network("::ffff:0:0:0/96"), 0),
]


def is_own_name(name: str) -> bool:
    """Return whether a host name means the machine that looks it up, wherever that is. Nothing is resolved."""
    labels = name.lower().rstrip(".").split(".")
    return labels[-1] == "localhost" or labels[0] in _OWN_NAMES


def is_loopback(url: str) -> bool:
    """Return whether a URL names only this machine."""
    host = urlsplit(url).hostname or ""
    if is_own_name(host):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_local(ip: Ip) -> bool:
    """Return whether an address is, or leads to, this machine, its link, a reserved range or a metadata service."""
    return any(_is_local(one) for one in (ip, *_inner_addresses(ip)))


def is_public(address: str) -> bool:
    """Return whether an IP address and each IPv4 address inside it are public."""
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return False
    if isinstance(ip, ipaddress.IPv6Address) and (ip.scope_id or ip in _OWN_NAT64):
        return False
    if inner := _inner_addresses(ip):
        return all(is_public(str(one)) for one in inner)
    return ip.is_global and not _is_local(ip)


def _is_local(ip: Ip) -> bool:
    if any(ip.version == network.version and ip in network for network in _METADATA):
        return True
    is_site_local = isinstance(ip, ipaddress.IPv6Address) and ip.is_site_local
    return ip.is_loopback or ip.is_link_local or ip.is_multicast or ip.is_unspecified or ip.is_reserved or is_site_local


def _inner_addresses(ip: Ip) -> list[Ip]:
    """Return the IPv4 addresses to which an IPv6 address may lead."""
    if isinstance(ip, ipaddress.IPv4Address):
        return []
    found: list[Ip] = [ipaddress.IPv4Address((int(ip) >> bits) & 0xFFFFFFFF) for net, bits in _WRAPPED if ip in net]
    if ip.ipv4_mapped is not None:
        found.append(ip.ipv4_mapped)
    if ip.teredo is not None:
        found += ip.teredo
    return found
