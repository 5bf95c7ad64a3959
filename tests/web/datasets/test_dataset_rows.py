"""Filtering the rows of a dataset, without script."""

import html
import re

import pytest

from apps.datasets.inspection import search
from apps.datasets.models import DatasetVersion
from apps.datasets.tasks import inspect
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


# --- filters ----------------------------------------------------------------------------------------------------------


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
