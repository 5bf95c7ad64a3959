"""The held-out share: a function of text and seed, equal rows on one side, the share what was asked."""

import json

from hypothesis import given
from hypothesis import strategies as st

from apps.contracts.chat import RowKind, parse_row, parse_row_as
from apps.contracts.splits.split import Split, row_identity, split_keys
from tests.factories.chat import assistant, line, user


def identity(question: str, answer: str = "yes") -> int:
    return row_identity(parse_row(line(user(question), assistant(answer)), line_number=1))


def test_equal_texts_share_an_identity_whatever_their_case_and_spacing():
    assert identity("Where is my card?") == identity(" where  is MY\ncard?", "Yes")
    assert identity("Where is my card?") != identity("Where is your card?")
    assert identity("a", "b c") != identity("a b", "c")
    assert identity("!") != identity("?")


def test_every_kind_of_row_has_an_identity():
    text = parse_row_as(b'{"text": "Once"}', RowKind.TEXT, line_number=1)
    pair = {"input": {"messages": [user()]}, "preferred_output": [assistant("a")]}
    one = json.dumps(pair | {"non_preferred_output": [assistant("b")]}).encode()
    other = json.dumps(pair | {"non_preferred_output": [assistant("c")]}).encode()

    found = {row_identity(parse_row_as(raw, RowKind.PREFERENCE, line_number=1)) for raw in (one, other)}

    assert len(found | {row_identity(text)}) == 3


def test_the_share_is_kept_and_the_seed_decides_which():
    identities = [identity(f"question {n}") for n in range(4_000)]

    held = Split(0.1, 7).held_out(identities)

    assert 330 < sum(held) < 470
    assert held == Split(0.1, 7).held_out(identities)
    assert held != Split(0.1, 8).held_out(identities)
    assert Split(0.0, 7).held_out(identities) == [False] * 4_000


@given(st.lists(st.integers(0, 30), min_size=1, max_size=60), st.floats(0.001, 0.5), st.integers(0, 2**31 - 1))
def test_equal_rows_are_never_on_both_sides_and_a_share_always_holds_one(rows: list[int], share: float, seed: int):
    held = Split(share, seed).held_out(rows)

    sides = dict(zip(rows, held, strict=True))
    assert [sides[row] for row in rows] == held
    assert any(held)


def test_near_copies_and_copies_of_those_are_on_one_side():
    words = [f"word{n}" for n in range(100)]
    chain = [" ".join(words[3 * n : 3 * n + 60]) for n in range(12)]  # the first and the last are not alike
    others = [f"quite another question number {n * 7919} about {n} things nobody asked before {n}" for n in range(30)]
    rows = [parse_row(line(user(text), assistant("yes")), line_number=1) for text in (*chain, *others, chain[3])]

    keys = split_keys(rows)

    assert len({*keys[:12], keys[-1]}) == 1
    assert len(set(keys)) == 31
    for seed in range(40):
        held = Split(0.3, seed).held_out(keys)
        assert len({*held[:12], held[-1]}) == 1


def test_copies_that_are_more_than_the_share_are_trained():
    keys = [1] * 60 + [2] * 30 + list(range(10, 20))

    for seed in range(20):
        held = Split(0.1, seed).held_out(keys)
        assert not any(held[:90]) and 1 <= sum(held) <= 10
