"""Which rows of a training file repeat one of the validation file."""

from apps.contracts.chat import RowKind, TextRow, parse_row_as
from apps.contracts.splits.held_rows import Repeats, ValidationIndex, repeats_of

LONG = "the quick brown fox jumps over the lazy dog while the cat looks on from the warm window sill in the"
OTHER = "a slow grey wolf walks under one tired cow since a mouse hears nothing at any cold kitchen door of"


def texts(*said: str) -> list[TextRow]:
    return [TextRow(text=text, line_number=line) for line, text in enumerate(said, 1)]


def chat(system: str, question: str, answer: str) -> bytes:
    roles = zip(("system", "user", "assistant"), (system, question, answer), strict=True)
    messages = ", ".join(f'{{"role": "{role}", "content": "{content}"}}' for role, content in roles)
    return f'{{"messages": [{messages}]}}'.encode()


def test_equal_and_near_rows_are_told_apart_and_others_stay() -> None:
    held = ValidationIndex(texts(f"{LONG} sun", "too short", "unlike all others here in this file"))

    found = repeats_of(texts(f" {LONG.upper()}  SUN ", f"{LONG} rain", "Too short", "too short too", OTHER), held)

    assert list(found) == [
        Repeats.A_ROW, Repeats.NEARLY_A_ROW, Repeats.A_ROW, Repeats.NOTHING, Repeats.NOTHING,
    ]  # fmt: skip


def test_a_row_that_only_resembles_one_left_out_stays() -> None:
    validated, left_out, stays = (" ".join(f"word{place}" for place in range(at, at + 30)) for at in (0, 4, 8))
    held = ValidationIndex(texts(validated))

    assert [*repeats_of(texts(left_out, stays), held)] == [Repeats.NEARLY_A_ROW, Repeats.NOTHING]
    assert ValidationIndex(texts(left_out)).repeated_by(texts(stays)[0]) is Repeats.NEARLY_A_ROW


def test_a_system_message_that_all_rows_share_makes_none_of_them_repeat_another() -> None:
    held = ValidationIndex([parse_row_as(chat(LONG, "where is my card now", "here"), RowKind.CHAT, line_number=1)])
    row = parse_row_as(chat(LONG, "who was at my door today", "nobody"), RowKind.CHAT, line_number=1)

    assert held.repeated_by(row) is Repeats.NOTHING
