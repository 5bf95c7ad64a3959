"""Topics of the outbox. The table is settings.OUTBOX_TOPICS, so core depends on no product code."""

from typing import NamedTuple

CONTROL = "control"  # the default lane and queue


class Topic(NamedTuple):
    """The task that carries out the messages of a topic, and their lane.

    `task` is the dotted path of an idempotent function; the payload is its keyword arguments. Urgent messages precede
    the others of their lane. Messages of a waiting topic stay until their organization is no longer suspended.
    """

    task: str
    lane: str = CONTROL
    is_urgent: bool = False
    waits_while_suspended: bool = False
