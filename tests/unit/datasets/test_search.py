"""Search for a text in a file's rows, a bounded part at a time."""

import json

import pytest

from apps.datasets.inspection import search
from apps.datasets.inspection.search import search_rows
from tests.factories.datasets import chat_row, jsonl, jsonl_of, make_ready_version

pytestmark = pytest.mark.django_db


def lines(found: search.SearchResult) -> list[int]:
    return [row.line for row in found.rows]


@pytest.mark.parametrize(
    ("text", "line"), [("CAFÉ", 3), ('say "hi"', 5), ("user", 0), ("is card 7?", 8), ("messages", 0)]
)
def test_a_text_is_found_as_people_read_it_and_not_in_the_names_of_fields(organization, text: str, line: int) -> None:
    rows = [chat_row(f"Where is card {n}?") for n in range(12)]
    rows[2], rows[4] = chat_row("The Café is closed"), chat_row('They say "hi"')
    version = make_ready_version(organization, jsonl_of(*rows))
    assert "Caf\\u00e9" in json.dumps(rows[2])

    found = search_rows(version=version, text=text)

    assert lines(found) == ([line] if line else []) and found.is_whole


def test_a_search_reads_a_bounded_part_and_goes_on_where_it_ended(organization, monkeypatch) -> None:
    monkeypatch.setattr(search, "SEARCHED_LINES", 5)
    version = make_ready_version(organization, jsonl(12))

    first = search_rows(version=version, text="card 7?")
    second = search_rows(version=version, text="card 7?", first_line=first.last_line + 1)

    assert (lines(first), first.last_line, first.is_whole) == ([], 5, False)
    assert (lines(second), second.last_line, second.is_whole) == ([8], 10, False)


def test_a_search_stops_after_so_many_bytes_and_when_the_page_is_full(organization, monkeypatch) -> None:
    version = make_ready_version(organization, jsonl(12))

    full = search_rows(version=version, text="card", limit=4)
    monkeypatch.setattr(search, "SEARCHED_BYTES", 300)
    cut = search_rows(version=version, text="nothing has this")

    assert (lines(full), full.is_whole) == ([1, 2, 3, 4], False)
    assert cut.last_line < 5 and not cut.is_whole


def test_only_the_lines_of_a_finding_are_searched(organization, monkeypatch) -> None:
    monkeypatch.setattr(search, "SEARCHED_AMONG", 2)
    version = make_ready_version(organization, jsonl(12))

    found = search_rows(version=version, text="card", among=[2, 5, 9])
    rest = search_rows(version=version, text="card", among=[2, 5, 9], first_line=found.last_line + 1)

    assert (lines(found), found.is_whole) == ([2, 5], False)
    assert (lines(rest), rest.is_whole) == ([9], True)


def test_a_bad_row_is_searched_as_it_stands(organization) -> None:
    version = make_ready_version(organization, jsonl(12) + b'{"messages": "left over"}\n')

    assert lines(search_rows(version=version, text="Left over")) == [13]
