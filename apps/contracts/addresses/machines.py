"""Where the machines that train a run together meet."""

from apps.contracts.struct import Struct


class NodeGroup(Struct, frozen=True, kw_only=True):
    """One machine's place among those that train a run together. All meet at the first one, whose rank is 0."""

    rank: int
    node_count: int
    master_address: str
    master_port: int
    address: str  # of this machine, for the others
