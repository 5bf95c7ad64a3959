"""Filtering the rows of a dataset and editing them, without script."""

import html
import json
import re
from urllib.parse import parse_qsl, urlsplit

import pytest
from django.urls import reverse

from apps.core.database.clock import db_now
from apps.datasets.inspection import search
from apps.datasets.models import DatasetVersion
from apps.datasets.tasks import inspect
from apps.datasets.validation.leases import validate_version
from apps.interfaces.web.datasets.viewer import pretty
from tests.factories.catalog import make_base_model
from tests.factories.datasets import chat_row, jsonl, jsonl_of, make_ready_version
from tests.web.pages import page_of

pytestmark = pytest.mark.django_db


@pytest.fixture
def version(organization) -> DatasetVersion:
    """Fourteen rows; the fourth has an e-mail address, the last two repeat the first."""
    make_base_model()
    rows = [chat_row(f"Where is card {n}?") for n in range(12)] + [chat_row("Where is card 0?")] * 2
    rows[3] = chat_row("Write to mira@example.com about card 3, please.")
    version = make_ready_version(organization, jsonl_of(*rows))
    inspect(version.pk)
    return version


def lines_of(body: str) -> list[int]:
    return [int(line) for line in re.findall(r'<span class="n">(\d+)</span>', body)]


def row_page(version: DatasetVersion, line: object) -> str:
    return f"{reverse('web:dataset_row', args=[version.pk])}?line={line}"


@pytest.mark.parametrize(("rows", "has_next"), [(20, False), (21, True)])
def test_the_last_page_leads_to_no_other(rows, has_next, organization, alice, client_for) -> None:
    version = make_ready_version(organization, jsonl(rows))

    body = client_for(alice).get(page_of(version)).content.decode()

    assert lines_of(body) == list(range(1, 21)) and ('rel="next"' in body) is has_next


def test_long_rows_after_the_first_ones_are_listed_without_their_tokens(organization, alice, client_for) -> None:
    make_base_model()
    version = make_ready_version(organization, jsonl_of(*(chat_row("word " * 14_000) for _ in range(4))))

    body = client_for(alice).get(page_of(version)).content.decode()

    listed = re.findall(r'<a\s+id="row-\d+".*?</a>', body, re.DOTALL)
    assert len(listed) == 4 and [bool(re.search(r"\btok\b", row)) for row in listed] == [True, True, False, False]


# --- filters ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_rows_are_filtered_by_finding_and_by_text(version, alice, client_for) -> None:
    client = client_for(alice)
    page = client.get(page_of(version)).content.decode()

    assert re.findall(r'<option value="(\w+)" *>([^<]+\(2\))</option>', page) == [("exact_copy", "Copies (2)")]
    assert lines_of(client.get(page_of(version, find="exact_copy")).content.decode()) == [13, 14]
    assert lines_of(client.get(page_of(version, q="CARD 3")).content.decode()) == [4]
    assert lines_of(client.get(page_of(version, q="card", find="personal_email")).content.decode()) == [4]
    assert lines_of(client.get(page_of(version, q="user")).content.decode()) == []


def test_a_filter_stays_while_the_page_is_used(version, alice, client_for) -> None:
    body = client_for(alice).get(page_of(version, q="card 1", share=20, view="json")).content.decode()

    assert lines_of(body) == [2, 11, 12]
    assert re.search(r'href="[^"]*line=11[^"]*q=card\+1[^"]*"', body), "the link to a row keeps it"
    assert '<input type="hidden" name="view" value="json">' in body
    assert '<input type="hidden" name="share" value="20">' in body


@pytest.mark.slow
def test_the_page_says_how_far_it_searched_and_goes_on(version, alice, client_for, monkeypatch) -> None:
    monkeypatch.setattr(search, "SEARCHED_LINES", 10)
    client = client_for(alice)

    first = client.get(page_of(version, q="card 11")).content.decode()
    link = re.search(r'href="([^"]*)"\s*>Keep searching', first)
    assert link
    second = client.get(html.unescape(link[1])).content.decode()

    assert "lines 1 to 10" in first and lines_of(first) == []
    assert lines_of(second) == [12] and "from line 11 to the end" in second
    assert "Keep searching" not in second


def test_rows_with_errors_are_listed(organization, alice, client_for) -> None:
    version = make_ready_version(organization, jsonl(12) + b'{"messages": []}\n' + jsonl(1))

    body = client_for(alice).get(page_of(version, find="errors")).content.decode()

    assert lines_of(body) == [13]


# --- edits ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("caller", "status"), [("alice", 200), ("bob", 200), ("vera", 403), ("charlie", 404), (None, 302)]
)
def test_who_may_open_a_row(request, version, rival, client_for, caller, status) -> None:
    client = client_for(request.getfixturevalue(caller) if caller else None)

    assert client.get(row_page(version, 4)).status_code == status
    if caller != "charlie" and caller:
        shown = row_page(version, "").partition("?")[0] in client.get(page_of(version, line=4)).content.decode()
        assert shown is (status == 200)


@pytest.mark.slow
def test_a_saved_row_makes_a_version_and_leads_to_it(version, alice, client_for) -> None:
    client = client_for(alice)
    form = client.get(row_page(version, 4)).content.decode()
    assert "&quot;content&quot;: &quot;Write to mira@example.com" in form

    saved = client.post(row_page(version, 4), {"row": json.dumps(chat_row("Hello")), "newest": 1})

    made = DatasetVersion.objects.get(number=2)
    assert saved["Location"] == page_of(made, line=4)
    assert "Version 2 has your change" in client.get(saved["Location"]).content.decode()
    validate_version(version_id=made.pk, now=db_now())
    assert "with line 4 changed" in client.get(saved["Location"]).content.decode()


def test_an_edit_returns_to_the_rows_that_were_listed(version, alice, client_for) -> None:
    client, query = client_for(alice), {"q": "card 1", "share": 20, "view": "json", "limit": 512, "train_on": "all"}
    page = client.get(page_of(version, line=11, **query)).content.decode()
    editor = html.unescape(re.search(r'href="([^"]*/row\?[^"]*)"', page)[1])

    saved = client.post(f"{editor}&next=elsewhere", {"row": json.dumps(chat_row("Where is card 1?")), "newest": 1})

    made = DatasetVersion.objects.get(number=2)
    returned = dict(parse_qsl(urlsplit(saved["Location"]).query))
    assert returned == {"model": "anneal-demo", "first": "9", "seed": "42", "line": "11"} | {
        name: str(value) for name, value in query.items()
    }
    assert html.escape(saved["Location"]) in client.get(f"{editor}".replace(version.pk, made.pk)).content.decode()


def test_a_refused_row_comes_back_with_the_text_and_the_field(version, alice, client_for) -> None:
    text = json.dumps({"messages": [{"role": "robot", "content": "<b>kept</b>"}]})

    refused = client_for(alice).post(row_page(version, 4), {"row": text, "newest": 1})

    body = refused.content.decode()
    assert refused.status_code == 422
    assert "<code>messages[0]</code>" in body and 'aria-invalid="true"' in body
    assert html.escape(text) in body
    assert DatasetVersion.objects.count() == 1


def test_the_second_of_two_people_is_told_and_loses_nothing(version, alice, bob, client_for) -> None:
    first, second = client_for(bob), client_for(alice)
    theirs = {"row": json.dumps(chat_row("from bob")), "newest": 1}
    mine = {"row": json.dumps(chat_row("from alice")), "newest": 1}
    assert first.post(row_page(version, 2), theirs).status_code == 302

    told = second.post(row_page(version, 2), mine)

    body = told.content.decode()
    assert told.status_code == 422 and "A newer version was saved after you opened this row" in body
    assert "from alice" in body and bob.name in body
    assert DatasetVersion.objects.count() == 2
    newest = re.search(r'name="newest" value="(\d+)"', body)
    assert newest
    assert second.post(row_page(version, 2), mine | {"newest": newest[1]}).status_code == 302
    assert DatasetVersion.objects.filter(derived_from=version).count() == 2


def test_a_row_is_deleted_into_a_new_version(version, alice, client_for) -> None:
    client = client_for(alice)

    deleted = client.post(row_page(version, 14), {"action": "delete", "newest": 1})

    made = DatasetVersion.objects.get(number=2)
    assert deleted.status_code == 302
    validate_version(version_id=made.pk, now=db_now())
    made.refresh_from_db()
    assert (made.rows, version.rows) == (13, 14)


def test_a_row_that_is_not_there_is_not_found(version, alice, client_for) -> None:
    assert client_for(alice).get(row_page(version, 99)).status_code == 404
    for line in (0, 10**30, "x"):
        assert client_for(alice).post(row_page(version, line), {"row": "{}", "newest": 1}).status_code == 404


def test_half_of_a_surrogate_pair_is_shown_as_it_is_written(organization, alice, client_for) -> None:
    bad = b'{"messages": [{"role": "user", "content": "A\\ud800"}, {"role": "assistant", "content": "x"}]}\n'
    version = make_ready_version(organization, jsonl(12) + bad)
    client = client_for(alice)

    assert "A\\ud800" in client.get(page_of(version, line=13, view="json")).content.decode()
    assert "A\\ud800" in client.get(row_page(version, 13)).content.decode()


def test_the_numbers_of_a_row_stay_as_they_are_written() -> None:
    row = '{"a": 1.50, "b": [1e400, 12345678901234567890123], "c": "\\u00fc"}'

    assert pretty(row) == '{\n  "a": 1.50,\n  "b": [\n    1e400,\n    12345678901234567890123\n  ],\n  "c": "ü"\n}'
    for unchanged in ('{"a": NaN}', '{"a": 1, "a": 2}'):
        assert pretty(unchanged) == unchanged
