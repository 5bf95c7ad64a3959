"""What a pass over a version finds: copies, conflicts, personal data; its rows' split; what a limit cuts."""

import functools
import json
import time
from array import array
from typing import Any

import pytest

from apps.contracts.chat import RowKind, parse_row_as
from apps.contracts.splits.near_copies import NearCopies
from apps.contracts.splits.split import Split
from apps.datasets import operations
from apps.datasets.inspection import inspections, inspector
from apps.datasets.inspection.inspector import Finding, inspect_rows
from apps.datasets.inspection.personal_data import Hint, find_hints
from apps.datasets.intake.lanes import ReadingTime
from apps.datasets.models import DatasetVersion, VersionInspection
from apps.datasets.tasks import inspect
from tests.factories.catalog import make_base_model
from tests.factories.datasets import chat_row, jsonl_of, make_ready_version

LONG = "The quick brown fox jumps over the lazy dog while the cat looks on from the warm window sill in the sun"


def findings_of(*rows: dict[str, Any], kind: RowKind = RowKind.CHAT) -> dict[str, Finding]:
    parsed = (parse_row_as(json.dumps(row).encode(), kind, line_number=line) for line, row in enumerate(rows, 1))
    return {finding.code: finding for finding in inspect_rows(parsed).findings}


def find(version: DatasetVersion) -> VersionInspection:
    found = inspections.find_inspection(version=version)
    assert found is not None
    return found


def places(finding: Finding) -> list[tuple[int, int]]:
    return [(row.line, row.other) for row in finding.first]


def test_copies_near_copies_and_conflicts_name_both_rows() -> None:
    found = findings_of(
        chat_row(LONG, "fox"), chat_row("What is due?", "monday"), chat_row(LONG.upper(), " fox "),
        chat_row(LONG + " today", "fox"), chat_row("What is due?", "friday"), chat_row("Nothing alike here", "no"),
    )  # fmt: skip

    assert {code: places(finding) for code, finding in found.items()} == {
        "exact_copy": [(3, 1)], "near_copy": [(4, 1)], "conflicting_answers": [(5, 2)],
    }  # fmt: skip


@pytest.mark.parametrize(
    "text", ["eyJ-" * 250_000, "a@" + "1." * 500_000, "a" * 10**6 + "@", "-----BEGIN " + "A" * 10**6]
)
def test_hints_are_found_in_time_that_grows_with_the_text(text: str) -> None:
    began = time.process_time()

    assert find_hints(text) == set()
    assert time.process_time() - began < 5  # 0.17 s; a pattern that begins again at each place takes minutes


def test_rows_between_blank_lines_keep_their_lines(organization) -> None:
    rows = [b"\n" * (number % 3) + jsonl_of(chat_row(f"Where is card {number}?")) for number in range(12)]
    spaced, dense = (make_ready_version(organization, text) for text in (b"".join(rows), jsonl_of(*[chat_row()] * 12)))
    for version in (spaced, dense):
        inspect(version.pk)

    lines = [inspections.lines_of_rows(version=each, inspection=find(each)) for each in (spaced, dense)]

    assert list(lines[0]) == [1, 3, 6, 7, 9, 12, 13, 15, 18, 19, 21, 24]
    assert list(lines[1]) == list(range(1, 13)) and find(dense).line_steps == b""


def test_a_common_system_message_makes_no_near_copies() -> None:
    rows = []
    for number in range(5):
        row = chat_row(
            f"Please look up order {number * 7919} and tell {'abcde'[number] * 9} what became of it then", "ok"
        )
        row["messages"].insert(0, {"role": "system", "content": LONG * 5})
        rows.append(row)

    assert "near_copy" not in findings_of(
        rows[0], {"messages": [*rows[1]["messages"][:1], *chat_row("Hi you", "ok")["messages"]]}
    )


@pytest.mark.parametrize(
    ("text", "hints"),
    [
        ("Write to mira.k@example.co.uk.", {Hint.EMAIL}),
        ("Call +49 30 901820 or (415) 555-0132", {Hint.PHONE}),
        ("Card 4111 1111 1111 1111, thanks", {Hint.CARD}),
        ("Card 4111 1111 1111 1112, thanks", set()),
        ("IBAN DE89 3704 0044 0532 0130 00", {Hint.IBAN}),
        ("IBAN DE88 3704 0044 0532 0130 00", set()),
        ("key = sk-proj-abcdefghijklmnopqrstuvwxyz012345", {Hint.KEY}),
        ("AKIAIOSFODNN7EXAMPLE", {Hint.KEY}),
        ("-----BEGIN RSA PRIVATE KEY-----", {Hint.KEY}),
        ("Order 20240117 for 12,345.67 on 2024-01-17 at 10:30, pi is 3.14159265358979", set()),
        ("@mention, a@b, 1111111111111111", set()),
    ],
)
def test_hints_at_personal_data_pass_their_checksums(text: str, hints: set[Hint]) -> None:
    assert find_hints(text) == hints


def test_near_copies_stop_being_looked_for_where_memory_would_grow() -> None:
    near = NearCopies(most_rows=1)

    assert [near.find(LONG, 1), near.find("quite another " + LONG[::-1], 2), near.find(LONG + "!", 3)] == [
        None,
        None,
        None,
    ]


def test_rows_compared_in_parts_give_what_all_at_once_give(monkeypatch) -> None:
    numbers = array("Q", [5, 0, 9, 5, 7, 9, 0, 5])

    at_once = sorted(inspector.repeats(numbers))
    monkeypatch.setattr(inspector, "_ROWS_COMPARED_AT_ONCE", 2)

    assert sorted(inspector.repeats(numbers)) == at_once == [(3, 0), (5, 2), (7, 0)]


@pytest.mark.django_db
def test_an_inspection_is_made_once_by_a_task_and_kept(organization) -> None:
    rows = [chat_row(f"Where is card {n}?", "here") for n in range(12)] + [chat_row("Mail a@b.com", "x")] * 2
    version = make_ready_version(organization, jsonl_of(*rows))

    inspect(version.pk)
    inspect(version.pk)

    made = VersionInspection.objects.get()
    assert {finding["code"]: finding["rows"] for finding in made.findings} == {"exact_copy": 1, "personal_email": 2}
    assert made.distinct_rows == 13
    held = inspections.held_out_rows(inspection=made, split=Split(0.3, 5))
    assert len(held) == 14 and held[12] == held[13] and 0 < sum(held) < 14


@pytest.mark.django_db
def test_a_file_that_takes_longer_than_its_size_allows_is_not_inspected(organization, monkeypatch) -> None:
    version = make_ready_version(organization)
    ticks = iter(range(0, 10_000, 10))
    monkeypatch.setattr(inspections, "ReadingTime", functools.partial(ReadingTime, clock=lambda: next(ticks)))

    for _ in range(2):
        inspect(version.pk)

    made = VersionInspection.objects.get()
    assert [(finding["code"], finding["rows"]) for finding in made.findings] == [("not_inspected", 12)]
    assert inspections.held_out_rows(inspection=made, split=Split(0.3, 5)) == []


@pytest.mark.django_db
@pytest.mark.parametrize("kind", ["chat", "text", "preference"])
def test_tokens_of_every_kind_are_counted_with_what_each_limit_cuts(organization, kind: str) -> None:
    long = "word " * 400
    rows: dict[str, list[dict[str, Any]]] = {
        "chat": [chat_row(f"q{n}") for n in range(11)] + [chat_row(long)],
        "text": [{"text": f"short text {n}"} for n in range(11)] + [{"text": long}],
        "preference": [
            {
                "input": {"messages": [{"role": "user", "content": f"q{n}"}]},
                "preferred_output": [{"role": "assistant", "content": long if n == 11 else "good"}],
                "non_preferred_output": [{"role": "assistant", "content": "bad"}],
            }
            for n in range(12)
        ],
    }
    version = make_ready_version(organization, jsonl_of(*rows[kind]))
    assert (version.status, version.kind) == ("ready", kind)

    count = operations.count_tokens(version=version, base_model=make_base_model())

    cut = count.cuts[0]
    assert (cut["limit"], cut["over"], cut["over_lines"]) == (256, 1, [12])
    assert (cut["untrained"], cut["untrained_lines"]) == ((1, [12]) if kind == "chat" else (0, []))
    assert 0 < cut["trained_tokens"] < count.trained_tokens or kind == "chat"
    assert cut["tokens"] < count.tokens
