"""Input that no form sends: too large numbers, endless strings, NUL, halves of characters. No page breaks."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests.factories.finetuning import make_training_file
from tests.support.page_inputs import FORMS, PAGES, STAFF_FORMS, VALUES

together_or_alone = pytest.mark.parametrize(
    "alone", [pytest.param([], id="together"), pytest.param(VALUES, id="alone", marks=pytest.mark.nightly)]
)


@pytest.fixture
def browser(floor, organization, alice, client_for) -> Any:
    return client_for(alice)


@pytest.fixture
def file_id(floor) -> str:
    return make_training_file(floor.organization, floor.base_model).pk


@pytest.mark.slow
@together_or_alone
def test_no_query_breaks_a_page(alone, browser, floor, file_id) -> None:
    wizard = {"training_file": file_id, "model": "anneal-demo", "step": "compute"}
    criteria = {"criterion-0-kind": "json", "criterion-1-kind": "score_model"}
    chosen = {"/jobs/new": wizard, "/jobs/{job}": {"tab": "log"}, "/evals/new": criteria}
    job = floor.job()
    for page, names in PAGES:
        for query in _inputs(names, alone):
            answer = browser.get(page.format(file=file_id, job=job.pk), query | chosen.get(page, {}))
            assert answer.status_code < 500, (page, list(query), str(query)[:80])


@pytest.mark.slow
@together_or_alone
def test_no_form_breaks_a_page(alone, browser, file_id) -> None:
    for page, given, names in FORMS:
        for form in _inputs(names, alone):
            answer = browser.post(page.format(file=file_id), given | form)
            assert answer.status_code < 500, (page, list(form), str(form)[:80])


@pytest.mark.slow
@together_or_alone
def test_no_staff_form_breaks_a_page(alone, client_for, olga, floor, organization) -> None:
    browser = client_for(olga)
    for page, given, names in STAFF_FORMS:
        for form in _inputs(names, alone):
            answer = browser.post(page.format(organization=organization.pk), given | form)
            assert answer.status_code < 500, (page, list(form), str(form)[:80])


def _inputs(names: Sequence[str], alone: Sequence[str]) -> Iterator[dict[str, str | bytes]]:
    """Yield all fields of a page at once, so that each has every second value; then each with the values `alone`.

    With values `alone`, in `make nightly`, each field first has every value.
    """
    for turn in range(0, len(VALUES), 1 if alone else 2):
        yield {name: _sent(VALUES[(turn + place) % len(VALUES)]) for place, name in enumerate(names)}
    for name in names if len(names) > 1 else ():
        for value in alone:
            yield {name: _sent(value)}


def _sent(value: str) -> str | bytes:
    """Return a value as a browser could send it: half of a surrogate pair goes as its bytes."""
    return value.encode("utf-8", "surrogatepass") if "\ud800" in value else value
