"""Moves between states: legal ones happen once and others never, for every caller."""

import pytest
from django.db import ProgrammingError, transaction

from apps.accounts.models import Organization, User
from apps.core.database.transitions import (
    IllegalTransition,
    Transitions,
    advance,
    choices_of,
    sources_of,
    terminal_states,
    try_advance,
)
from apps.datasets.lifecycle import VERSION_TRANSITIONS
from apps.datasets.models import DatasetVersion
from tests.factories.accounts import make_organization, make_user
from tests.factories.datasets import make_version
from tests.support.database import at_once

MOVES: Transitions = {"draft": frozenset({"sent", "dropped"}), "sent": frozenset({"read"})}


def test_sources_of_a_state() -> None:
    assert sources_of(MOVES, "read") == ["sent"]
    with pytest.raises(ValueError, match="may move to"):
        sources_of(MOVES, "draft")


def test_terminal_states_have_no_way_out() -> None:
    assert terminal_states(MOVES) == {"read", "dropped"}


def test_choices_name_every_state() -> None:
    assert {value for value, _ in choices_of(MOVES)} == {"draft", "sent", "read", "dropped"}


def test_a_legal_move_changes_the_row_and_what_comes_with_it(organization: Organization) -> None:
    version = make_version(organization)

    advance(version, to="validating", transitions=VERSION_TRANSITIONS, filename="renamed.jsonl")

    assert (version.status, version.filename) == ("validating", "renamed.jsonl")


def test_an_illegal_move_changes_nothing(organization: Organization) -> None:
    version = make_version(organization)

    with pytest.raises(IllegalTransition):
        advance(version, to="ready", transitions=VERSION_TRANSITIONS, filename="renamed.jsonl")

    version.refresh_from_db()
    assert (version.status, version.filename) == ("uploaded", "train.jsonl")


def test_a_guard_that_does_not_hold_stops_the_move(organization: Organization) -> None:
    version = make_version(organization)

    moved = try_advance(version, to="validating", transitions=VERSION_TRANSITIONS, guard={"filename": "another.jsonl"})

    assert not moved
    assert version.status == "uploaded"


def test_the_database_refuses_an_illegal_move_by_any_other_way(organization: Organization) -> None:
    version = make_version(organization)

    with pytest.raises(ProgrammingError, match="Invalid transition"), transaction.atomic():
        DatasetVersion.objects.filter(pk=version.pk).update(status="ready")


@pytest.mark.django_db(transaction=True)
def test_of_many_who_move_at_once_one_wins() -> None:
    owner: User = make_user("owner")
    version = make_version(make_organization("Racing", owner=owner))
    rows = [DatasetVersion.objects.get(pk=version.pk) for _ in range(6)]

    outcomes = at_once(lambda number: try_advance(rows[number], to="validating", transitions=VERSION_TRANSITIONS), 6)

    assert sorted(outcomes) == [False] * 5 + [True]
