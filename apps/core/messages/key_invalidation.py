"""Telling the gateways, the moment it is committed, that what they remember of an organization's keys may be wrong."""

from typing import Any

import pgtrigger

CHANNEL = "anneal_keys"
EVERYBODY = ""  # as the payload: whose keys changed is not known


def key_news(name: str, operation: Any, *, organization: str) -> pgtrigger.Trigger:
    """Return a trigger that notifies the channel; `organization` is an SQL expression over OLD and NEW."""
    return pgtrigger.Trigger(
        name=name,
        when=pgtrigger.After,
        operation=operation,
        func=f"PERFORM pg_notify('{CHANNEL}', {organization}); RETURN NULL;",
    )
