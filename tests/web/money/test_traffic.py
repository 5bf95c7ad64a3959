"""The traffic page: requests over time, how they ended and how long they took, of one model or of all."""

import datetime

import pytest

from apps.accounts.models import User
from apps.billing.usage.metering import record_usage
from apps.core.database.clock import db_now
from apps.core.ids import new_id
from tests.factories.usage import make_record
from tests.support.pages import csv_rows, text

TRIAGE = "ft:anneal-demo:acme:triage:01"


@pytest.fixture
def send(organization):
    """Return a function that records one request; a count stands for refused ones."""

    def send(model_name: str = TRIAGE, *, hours_ago: int = 0, **fields) -> None:
        values = {
            "id": new_id("use"), "organization_id": organization.pk, "model_name": model_name, "slice_id": "",
            "input_price_id": None, "output_price_id": None, "latency_ms": 1_200, "first_token_ms": 90,
            "occurred_at": db_now() - datetime.timedelta(hours=hours_ago),
        }  # fmt: skip
        record_usage(records=[make_record(**values | fields)])

    return send


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/usage/traffic", "/usage/traffic/export"])
def test_members_see_their_own_traffic(path, send, floor, client_for, alice, bob, vera, charlie, rival):
    send("ft:anneal-demo:acme:canary:01")

    def body(person) -> str:
        answer = client_for(person).get(path, {"by": "model"})
        return b"".join(answer.streaming_content).decode() if answer.streaming else text(answer)

    assert ["canary" in body(person) for person in (alice, bob, vera, charlie)] == [True, True, True, False]
    assert client_for(None).get(path).status_code == 302


def test_ends_and_latencies_of_requests_are_shown(send, client_for, vera):
    send()
    send(finish="error")
    send("", finish="rate_limit", request_count=37)
    send(finish="quota", request_count=4)

    page = client_for(vera).get("/usage/traffic?days=1")

    total = page.context["total"]
    assert (total.requests, total.answered, total.refused, total.failed) == (43, 1, 41, 1)
    assert {end.label: end.count for end in page.context["endings"]}["Rate limit"] == 37
    assert len(page.context["requests"].columns) == 24
    assert 80 <= total.first_token_ms[0] <= 100
    assert "No model named" in text(page)


def test_one_model_has_its_own_numbers(send, client_for, vera):
    send()
    send("anneal-demo", hours_ago=30)

    page = client_for(vera).get("/usage/traffic", {"model": "anneal-demo", "days": "7"})

    assert page.context["total"].requests == 1
    assert len(page.context["requests"].columns) == 7 * 24
    assert [(row.requests, row.at.minute) for row in page.context["rows"]] == [(1, 0)]


def test_the_csv_has_every_hour_and_adds_up(send, client_for, vera):
    send()
    send(hours_ago=5)
    send(finish="not_found", request_count=9, model_name="")

    hours = csv_rows(client_for(vera).get("/usage/traffic/export?days=1"))
    models = csv_rows(client_for(vera).get("/usage/traffic/export?days=1&by=model"))

    assert len(hours) == 24
    assert sum(int(line["requests"]) for line in hours) == 11
    assert [(line["model"], line["requests"], line["model_not_found"]) for line in models] == [
        ("", "9", "9"),
        (TRIAGE, "2", "0"),
    ]
    assert float(models[1]["latency_p95_ms"]) == pytest.approx(1_200, rel=0.26)
    assert models[0]["latency_p50_ms"] == ""


def test_a_period_without_requests_says_so(send, client_for, vera):
    send(hours_ago=50)

    page = text(client_for(vera).get("/usage/traffic", {"days": "1", "model": TRIAGE}))

    assert "No requests in this period" in page
    assert "No requests to" in page


def test_longer_periods_are_shown_by_the_day(send, client_for, vera):
    send()

    page = client_for(vera).get("/usage/traffic?days=30")

    assert len(page.context["requests"].columns) == 30
    assert "Requests by day" in text(page)


def test_days_are_utc_in_every_zone(send, client_for, vera):
    send()
    User.objects.filter(pk=vera.pk).update(time_zone="America/New_York")

    page = client_for(vera).get("/usage/traffic?days=30")

    [row] = page.context["rows"]
    assert f'<td class="first nowrap">{row.at.astimezone(datetime.UTC):%-d %b %Y}</td>' in text(page)
