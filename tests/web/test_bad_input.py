"""What nobody means to send: numbers beyond all columns, endless strings, NUL, halves of characters. No page breaks."""

from typing import Any

import pytest

from tests.factories.finetuning import make_training_file

VALUES = [
    "", "-1", "99999999999999999", "9" * 5000, "1e400", "NaN", "a\x00b", "\ud800x", "x" * 70_000, "²", '{"a":' * 500,
    "9999-12-31T23:59:59-23:59", "2026-13-45", "🙂" * 200,
]  # fmt: skip
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


@pytest.fixture
def browser(floor, organization, alice, client_for) -> Any:
    return client_for(alice)


@pytest.fixture
def file_id(floor) -> str:
    return make_training_file(floor.organization, floor.base_model).pk


def test_no_query_breaks_a_page(browser, file_id) -> None:
    """All fields of a page at once, and each alone with the values that break most."""
    chosen = {"training_file": file_id, "model": "anneal-demo", "step": "compute"}
    for page, names in PAGES:
        asked = [dict.fromkeys(names, value) for value in VALUES]
        asked += [{name: value} for name in names for value in VALUES[2:5]]
        for query in asked:
            given = (chosen if page == "/jobs/new" else {}) | {name: _sent(value) for name, value in query.items()}
            answer = browser.get(page.format(file=file_id), given)
            assert answer.status_code < 500, (page, list(query), str(query)[:80])


def test_no_form_breaks_a_page(browser, file_id) -> None:
    for page, given, names in FORMS:
        for name in names:
            for value in VALUES:
                answer = browser.post(page.format(file=file_id), given | {name: _sent(value)})
                assert answer.status_code < 500, (page, name, value[:60])


def test_no_staff_form_breaks_a_page(client_for, olga, floor, organization) -> None:
    browser = client_for(olga)
    names = (
        "concurrent_gpus",
        "gpu_seconds_per_month",
        "requests_per_minute",
        "weight",
        "amount_usd",
        "reason",
        "note",
    )
    for page in (f"/staff/quotas/{organization.pk}", f"/staff/organizations/{organization.pk}/adjust"):
        for name in names:
            for value in VALUES:
                answer = browser.post(page, {"weight": "1", "amount_usd": "1", "reason": "x"} | {name: _sent(value)})
                assert answer.status_code < 500, (page, name, value[:60])


def _sent(value: str) -> str | bytes:
    """Return a value as a browser could send it: half of a surrogate pair goes as its bytes."""
    return value.encode("utf-8", "surrogatepass") if "\ud800" in value else value
