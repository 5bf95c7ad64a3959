"""Where the machines that train a run together meet."""

import ipaddress
import socket

from apps.contracts.addresses.networks import is_local, is_own_name
from apps.contracts.struct import Struct


class NodeGroup(Struct, frozen=True, kw_only=True):
    """One machine's place among those that train a run together. All meet at the first one, whose rank is 0."""

    rank: int
    node_count: int
    master_address: str
    master_port: int
    address: str  # of this machine, for the others


def leads_elsewhere(address: str) -> bool:
    """Return whether other machines may connect to this name or IP address, in any notation that resolvers accept.

    False for addresses that mean the connecting machine itself, its link, a reserved range or a metadata service.
    """
    name = address.lower().rstrip(".")  # resolvers take "127.0.0.1." as well
    if not name or is_own_name(name):
        return False
    try:
        return not is_local(ipaddress.ip_address(name))
    except ValueError:
        pass
    try:
        return not is_local(ipaddress.IPv4Address(socket.inet_aton(name)))  # "127.1", "0x7f000001", "2130706433"
    except OSError:
        return ":" not in name
