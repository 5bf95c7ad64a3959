"""State transitions: one table of legal moves feeds a guarded UPDATE, a database trigger and the diagram.

`advance` is the only way to change a status. If two callers see the old state, only one can succeed: the UPDATE names
the states that the row may leave, and exactly one row must change.
"""

from collections.abc import Mapping
from typing import Any

import pgtrigger
from django.db import DEFAULT_DB_ALIAS, connection, models
from django.db.models.sql import UpdateQuery

from apps.core.database.prepared import columns_of, read_row

Transitions = Mapping[str, frozenset[str]]  # state -> states it may move to


class IllegalTransition(Exception):
    """The row was not in a state from which the move is legal, or a guard did not hold. Nothing was changed."""


def sources_of(transitions: Transitions, target: str) -> list[str]:
    """Return the states that may move to `target`. Raises ValueError if there are none."""
    sources = sorted(state for state, targets in transitions.items() if target in targets)
    if not sources:
        raise ValueError(f"no state may move to {target!r}")
    return sources


def terminal_states(transitions: Transitions) -> frozenset[str]:
    reachable = frozenset(transitions) | frozenset().union(*transitions.values())
    return frozenset(state for state in reachable if not transitions.get(state))


def advance(
    row: models.Model,
    *,
    to: str,
    transitions: Transitions,
    guard: Mapping[str, object] | None = None,
    **changes: object,
) -> None:
    """Move `row` to state `to` and set `changes` with it.

    If the move is illegal, raises IllegalTransition and changes nothing. `guard` holds further conditions of the
    UPDATE, such as a fencing token. `row` is refreshed in place on success.
    """
    if not try_advance(row, to=to, transitions=transitions, guard=guard, **changes):
        raise IllegalTransition(f"{type(row).__name__} {row.pk} may not move to '{to}' from where it is")


def try_advance(
    row: models.Model,
    *,
    to: str,
    transitions: Transitions,
    guard: Mapping[str, object] | None = None,
    **changes: object,
) -> bool:
    """Move `row` as `advance` does, and return whether it moved. Use it if losing the race is normal."""
    model = type(row)
    condition = {"pk": row.pk, "status__in": sources_of(transitions, to)} | dict(guard or {})
    update: Any = model._base_manager.filter(**condition).query.chain(UpdateQuery)
    update.add_update_values({"status": to, **changes})
    sql, parameters = update.get_compiler(DEFAULT_DB_ALIAS).as_sql()
    columns = columns_of(model, connection.ops.quote_name(model._meta.db_table))
    with connection.cursor() as cursor:
        cursor.execute(f"{sql} RETURNING {columns}", parameters)
        changed = cursor.fetchone()
    if changed is None:
        return False
    now = read_row(model, iter(changed))
    for field in model._meta.concrete_fields:
        setattr(row, field.attname, getattr(now, field.attname))
    return True


def status_trigger(name: str, transitions: Transitions) -> pgtrigger.FSM:
    """Return the trigger that refuses every other move, from any client."""
    moves = [(source, target) for source, targets in transitions.items() for target in sorted(targets)]
    return pgtrigger.FSM(name=name, field="status", transitions=sorted(moves))


def choices_of(transitions: Transitions) -> list[tuple[str, str]]:
    states = sorted(frozenset(transitions) | frozenset().union(*transitions.values()))
    return [(state, state.replace("_", " ")) for state in states]
