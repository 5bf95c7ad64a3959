"""Notification of the gateways, at commit, that their cached keys of an organization may be outdated."""

import pgtrigger

CHANNEL = "anneal_keys"
EVERYBODY = ""  # as the payload: the organization of the changed keys is unknown


def key_news(name: str, operation: pgtrigger.Operation, *, organization: str) -> pgtrigger.Trigger:
    """Return a trigger that notifies the channel. `organization` is an SQL expression over OLD and NEW."""
    return pgtrigger.Trigger(
        name=name,
        when=pgtrigger.After,
        operation=operation,
        func=f"PERFORM pg_notify('{CHANNEL}', {organization}); RETURN NULL;",
    )
