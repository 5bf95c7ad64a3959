"""What nobody means to send: numbers beyond all columns, endless strings, NUL, halves of characters. No page breaks."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests.factories.finetuning import make_training_file

VALUES = [
    "", "-1", "99999999999999999", "9" * 5000, "1e400", "NaN", "a\x00b", "\ud800x", "x" * 70_000, "²", '{"a":' * 500,
    "9999-12-31T23:59:59-23:59", "2026-13-45", "🙂" * 200,
]  # fmt: skip
BREAK_MOST = VALUES[2:5]
PAGES = [
    ("/usage", ("by", "days")),
    ("/usage/export", ("days", "kind")),
    ("/billing", ("page", "waiting")),
    ("/jobs", ("status", "page")),
    ("/adapters", ("page",)),
    ("/datasets", ("page", "q")),
    ("/datasets/{file}", ("model", "view", "line", "limit", "find", "against", "train_on", "list")),
    ("/datasets/{file}/columns", ("format", "mapping")),
    (
        "/jobs/new",
        (
            "step",
            "q",
            "training_file",
            "validation_file",
            "model",
            "method",
            "epochs",
            "learning_rate",
            "seed",
            "batch_size",
            "max_length",
            "lora_rank",
            "lora_alpha",
            "validation_share",
            "needed_by",
            "cap",
            "pool",
            "sort",
            "auto",
            "pattern",
            "schema",
            "suffix",
        ),
    ),
    ("/playground", ("model", "line", "file")),
    ("/invoices", ("month",)),
    ("/budgets", ("month",)),
    ("/members", ("page",)),
    ("/keys", ("page",)),
    ("/accuracy", ("model",)),
    ("/why/x", ("page",)),
]
FORMS = [
    (
        "/keys",
        {"name": "k", "scopes": "view"},
        ("name", "scopes", "expires", "requests_per_minute", "tokens_per_minute", "concurrent_requests"),
    ),
    ("/organization/trackers", {"kind": "mlflow", "key": "0123456789"}, ("kind", "key", "url")),
    ("/organization/new", {}, ("name",)),
    ("/organization/switch", {}, ("organization",)),
    ("/organization", {}, ("name",)),
    ("/members/invite", {"role": "viewer"}, ("email", "role")),
    ("/theme", {}, ("theme",)),
    (
        "/budgets",
        {"scope": "organization", "limit_usd": "5", "mode": "block"},
        ("limit_usd", "thresholds", "scope", "label"),
    ),
    ("/budgets/key-labels", {}, ("key", "labels")),
    ("/billing/topups", {}, ("amount_usd",)),
    ("/billing/auto-recharge", {"is_on": "on"}, ("threshold_usd", "amount_usd", "monthly_cap_usd")),
    ("/datasets/uploads", {}, ("filename", "bytes", "name", "mapping")),
    ("/licences/accept", {}, ("model", "licence", "next")),
    ("/playground/rows", {}, ("model", "messages", "name")),
    ("/playground/prompt", {}, ("model", "messages")),
    ("/datasets/{file}/columns", {}, ("format", "messages", "mapping")),
    ("/datasets/{file}/delete", {}, ("confirm",)),
    ("/jobs/new", {}, ("cap_nano", "once", "training_file", "seed", "suffix")),
]

STAFF_FORMS = [
    (
        "/staff/quotas/{organization}",
        {"weight": "1"},
        (
            "concurrent_gpus",
            "queued_jobs",
            "gpu_seconds_per_month",
            "storage_bytes",
            "requests_per_minute",
            "tokens_per_minute",
            "concurrent_requests",
            "weight",
        ),
    ),
    (
        "/staff/organizations/{organization}/adjust",
        {"amount_usd": "1", "reason": "x", "once": "adj_" + "0" * 26},
        ("amount_usd", "refund_of", "reason", "once"),
    ),
]
few_or_all = pytest.mark.parametrize(
    "alone", [pytest.param(BREAK_MOST, id="few"), pytest.param(VALUES, id="all", marks=pytest.mark.nightly)]
)


@pytest.fixture
def browser(floor, organization, alice, client_for) -> Any:
    return client_for(alice)


@pytest.fixture
def file_id(floor) -> str:
    return make_training_file(floor.organization, floor.base_model).pk


@few_or_all
def test_no_query_breaks_a_page(alone, browser, file_id) -> None:
    chosen = {"training_file": file_id, "model": "anneal-demo", "step": "compute"}
    for page, names in PAGES:
        for query in _inputs(names, alone):
            answer = browser.get(page.format(file=file_id), (chosen if page == "/jobs/new" else {}) | query)
            assert answer.status_code < 500, (page, list(query), str(query)[:80])


@few_or_all
def test_no_form_breaks_a_page(alone, browser, file_id) -> None:
    for page, given, names in FORMS:
        for form in _inputs(names, alone):
            answer = browser.post(page.format(file=file_id), given | form)
            assert answer.status_code < 500, (page, list(form), str(form)[:80])


@few_or_all
def test_no_staff_form_breaks_a_page(alone, client_for, olga, floor, organization) -> None:
    browser = client_for(olga)
    for page, given, names in STAFF_FORMS:
        for form in _inputs(names, alone):
            answer = browser.post(page.format(organization=organization.pk), given | form)
            assert answer.status_code < 500, (page, list(form), str(form)[:80])


def _inputs(names: Sequence[str], alone: Sequence[str]) -> Iterator[dict[str, str | bytes]]:
    """Yield all fields of a page at once with each value, and each of several fields alone with the values `alone`."""
    for value in VALUES:
        yield dict.fromkeys(names, _sent(value))
    for name in names if len(names) > 1 else ():
        for value in alone:
            yield {name: _sent(value)}


def _sent(value: str) -> str | bytes:
    """Return a value as a browser could send it: half of a surrogate pair goes as its bytes."""
    return value.encode("utf-8", "surrogatepass") if "\ud800" in value else value
