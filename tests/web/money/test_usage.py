"""The usage page: sums by model and job, the ledger, and a CSV that no spreadsheet runs."""

import csv
import datetime
import io
import re
import tempfile
from collections.abc import Iterator
from decimal import Decimal

import pytest
from django.db import transaction
from django.test import RequestFactory

from apps.billing.budget_settings import set_budget
from apps.billing.models import LedgerTransaction, UsageSeries
from apps.billing.queries import get_spending
from apps.billing.usage.metering import UsageRecord, rate_usage, record_quantity, record_usage
from apps.billing.usage.slices import close_slice, lease_slice
from apps.billing.usage.storage import STORED
from apps.catalog.operations import set_price
from apps.core.database.clock import begin_of_day, db_now
from apps.core.http.csv_text import csv_chunks
from apps.core.ids import new_id
from apps.core.objects.downloads import download_csv
from apps.finetuning.jobs import control
from apps.finetuning.models import FineTuningJob
from apps.interfaces.web.billing import usage
from tests.factories.money import USD, give_credit
from tests.support.pages import csv_rows, text


@pytest.fixture
def prices(db):
    return [
        set_price(
            sku=f"inference:{direction}:anneal-demo",
            unit="tokens",
            price_nano=nano,
            per=1_000_000,
            by="system",
            now=db_now(),
        )
        for direction, nano in (("input", 100_000_000), ("output", 200_000_000))
    ]


@pytest.fixture
def use(organization, prices):
    """Return a function that records one request of a model."""

    def record(model_name: str, *, days_ago: int = 0) -> None:
        fields = {
            "id": new_id("use"),
            "organization_id": organization.pk,
            "key_id": "key_1",
            "model_name": model_name,
            "adapter_version_id": "",
            "slice_id": "",
            "input_price_id": prices[0].pk,
            "output_price_id": prices[1].pk,
            "input_tokens": 1_000_000,
            "cached_input_tokens": 0,
            "output_tokens": 500_000,
            "finish": "stop",
            "latency_ms": 10,
            "first_token_ms": 5,
            "occurred_at": db_now() - datetime.timedelta(days=days_ago),
        }
        record_usage(records=[UsageRecord(**fields)])

    return record


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/usage", "/usage/export"])
def test_members_see_their_own_usage(path, use, floor, client_for, alice, bob, vera, charlie, rival):
    use("ft:anneal-demo:acme:canary:01")

    answers = [client_for(person).get(path) for person in (alice, bob, vera)]
    other = client_for(charlie).get(path)

    assert [answer.status_code for answer in answers] == [200, 200, 200]
    body = b"".join(other.streaming_content).decode() if other.streaming else text(other)
    assert (other.status_code, "canary" in body) == (200, False)
    assert client_for(None).get(path).status_code == 302


@pytest.mark.slow
def test_what_a_model_cost_is_shown_before_and_after_it_is_charged(use, floor, client_for, vera):
    use("ft:anneal-demo:acme:triage:01")
    before = text(client_for(vera).get("/usage"))
    rate_usage()
    after = text(client_for(vera).get("/usage"))

    assert "$0.20" in before
    assert ">triage<" in before
    assert "Usage charged" not in before
    assert "Usage charged" in after
    assert "triage, input tokens" in after


@pytest.mark.slow
def test_what_is_held_for_requests_says_what_it_is_for(organization, floor, client_for, vera):
    leased = lease_slice(organization=organization, required_nano=10**9, by="gateway_1")
    held = text(client_for(vera).get("/usage"))
    close_slice(hold_id=leased.hold_id, by="gateway_1")
    released = text(client_for(vera).get("/usage"))

    row = re.search(r'<tr><td class="first">Held</td><td data-label="For">(.*?)</td>', held)[1]
    assert "requests in progress" in row
    assert (
        "Charge settled, hold released" in released
        and "requests, the unused part" in released
        and "slice" not in released
    )


def test_the_page_lists_the_most_expensive_models_and_the_csv_all(organization, prices, floor, client_for, vera):
    UsageSeries.objects.bulk_create(
        UsageSeries(
            organization=organization, sku=prices[0].sku, price_rule=prices[0], subject=f"model-{number}",
            day=db_now().date(), quantity=number * 1_000_000, request_count=1, key_id=f"key_{number}",
        )
        for number in range(1, 52)
    )  # fmt: skip

    page = client_for(vera).get("/usage")
    exported = csv_rows(client_for(vera).get("/usage/export?table=models"))

    assert [label for label, _ in page.context["models"]] == [f"model-{number}" for number in range(51, 1, -1)]
    assert len(page.context["grouped"]) == 51
    assert page.context["grouped"][-1] == ("Everything else (1)", 100_000_000)
    assert text(page).count("The 50 most expensive are shown.") == 2
    assert page.context["inference_nano"] == sum(range(1, 52)) * 100_000_000
    assert [line["model"] for line in exported] == [f"model-{number}" for number in range(51, 0, -1)]


def test_storage_and_time_kept_warm_are_no_tokens(organization, use, client_for, vera):
    use("ft:anneal-demo:acme:triage:01")
    for sku, unit, quantity in (("storage:bytes", "byte_hours", 777_000_000), ("warm:anneal-demo", "warm_ms", 888_000)):
        price = set_price(sku=sku, unit=unit, price_nano=1000, per=1000, by="system", now=db_now())
        with transaction.atomic():
            record_quantity(
                organization_id=organization.pk, price=price, day=db_now().date(), quantity=quantity,
                subject=STORED if unit == "byte_hours" else "ft:anneal-demo:acme:triage:01",
            )  # fmt: skip

    page = client_for(vera).get("/usage")

    assert [(label, model.output_tokens) for label, model in page.context["models"]] == [("triage", 500_000)]
    assert page.context["storage_nano"] == 777_000_000
    assert 'href="/usage/traffic?days=30&model=ft%3A' in text(page)
    assert "Storage" in text(page)


def test_an_amount_far_below_a_cent_is_not_rounded_to_nothing(organization, client_for, vera):
    price = set_price(sku="storage:bytes", unit="byte_hours", price_nano=1000, per=1000, by="system", now=db_now())
    with transaction.atomic():
        record_quantity(
            organization_id=organization.pk, price=price, day=db_now().date(), quantity=4_600, subject=STORED
        )

    page = text(client_for(vera).get("/usage"))

    assert page.count("0.00046¢") in (6, 7)  # in sum, table, day, its part, legend, month and perhaps its forecast


@pytest.mark.slow
def test_a_finished_job_is_in_the_sum_and_in_the_ledger(floor, claim, client_for, vera):
    job = floor.job(suffix="triage")
    claim().start().succeed(floor.base_model, seconds=20.0)

    page = text(client_for(vera).get("/usage"))

    assert "1 job charged" in page
    assert page.count(f"/jobs/{job.pk}") == 2  # by job, held
    assert f"/why/{job.hold_id}" in page  # settled
    assert "Credit granted" in page
    earlier = text(client_for(vera).get("/usage?first=2026-01-01&last=2026-01-31"))
    assert "Credit granted" not in earlier and "No transactions in this period" in earlier


@pytest.mark.slow
@pytest.mark.usefixtures("metered")
def test_what_a_pause_charged_is_in_the_sum_while_the_job_goes_on(floor, organization, claim, client_for, vera):
    job = floor.job(spend_cap_nano=500_000_000)
    attempt = claim().start()
    control.request_pause(job=job, by="key_test", now=db_now())
    attempt.pause(step=3, seconds=120.0)

    for resumed in (False, True):
        if resumed:
            control.resume(job=FineTuningJob.objects.get(pk=job.pk), by="key_test", now=db_now())
        context = client_for(vera).get("/usage").context
        assert context["charged"].training_nano == get_spending(organization=organization).training_nano == 120_000_000
        assert [(use.job.pk, use.cost_nano, use.billed_seconds) for use in context["jobs"]] == [
            (job.pk, 120_000_000, 120.0)
        ]


@pytest.mark.parametrize(("days", "is_shown"), [("7", False), ("30", True), ("90", True), ("nonsense", True)])
def test_the_period_is_in_the_address(days, is_shown, use, client_for, vera):
    use("ft:anneal-demo:acme:older:01", days_ago=12)

    assert (">older<" in text(client_for(vera).get(f"/usage?days={days}"))) == is_shown


@pytest.mark.slow
def test_a_week_is_shown_by_the_hour_and_adds_up(use, floor, claim, client_for, vera):
    use("ft:anneal-demo:acme:triage:01")
    use("ft:anneal-demo:acme:triage:01", days_ago=2)
    floor.job()
    claim().start().succeed(floor.base_model, seconds=20.0)

    plot = client_for(vera).get("/usage?days=7").context["plot"]

    assert len(plot.columns) == 7 * 24
    assert [(part.label, part.value) for part in plot.series] == [("Training", 20_000_000), ("triage", 400_000_000)]


def test_two_dates_choose_the_period(use, client_for, vera):
    use("ft:anneal-demo:acme:older:01", days_ago=100)
    day = (db_now() - datetime.timedelta(days=100)).date()

    shown = client_for(vera).get(f"/usage?first={day}&last={day + datetime.timedelta(days=20)}")
    exported = csv_rows(client_for(vera).get(f"/usage/export?first={day}&last={day}"))

    assert ">older<" in text(shown)
    assert len(shown.context["plot"].columns) == 21
    assert {line["day"] for line in exported} == {str(day)}


@pytest.mark.parametrize(
    ("first", "last", "message"),
    [
        ("2026-01-02", "2026-01-01", "Choose a day that is not before the first one."),
        ("2024-01-01", "2026-01-01", "Choose at most 366 days."),
        ("2026-01-01", "9999-12-31", "or an earlier day."),
        ("yesterday", "2026-01-01", "Write the day as 2026-11-03."),
        ("2026-01-01", "", "Choose the last day."),
    ],
)
def test_a_period_that_cannot_be_says_why_at_its_field(first, last, message, organization, client_for, vera):
    page = client_for(vera).get("/usage", {"first": first, "last": last})

    assert message in text(page)
    assert page.context["period"].words == "30 days"


def test_the_month_is_forecast_against_the_budget(organization, use, client_for, vera, monkeypatch):
    use("anneal-demo")
    today = UsageSeries.objects.latest("day").day
    monkeypatch.setattr(usage, "db_now", lambda: begin_of_day(today))
    set_budget(
        organization=organization,
        scope="organization",
        target="",
        limit_nano=200_000_000,
        mode="alert",
        by="user_1",
        now=db_now(),
    )

    page = client_for(vera).get("/usage")

    left = (today.replace(day=28) + datetime.timedelta(days=4)).replace(day=1) - today - datetime.timedelta(days=1)
    assert page.context["forecast"].expected_nano == 200_000_000 + 200_000_000 * left.days // 7
    assert "Budget of the organization" in text(page) and "$0.20" in text(page)


@pytest.mark.slow
def test_every_table_has_its_csv(use, floor, claim, client_for, vera):
    use("ft:anneal-demo:acme:triage:01")
    job = floor.job()
    claim().start().succeed(floor.base_model, seconds=20.0)

    def exported(table: str) -> list[dict[str, str]]:
        return csv_rows(client_for(vera).get(f"/usage/export?table={table}"))

    assert exported("models") == [
        {"model": "ft:anneal-demo:acme:triage:01", "requests": "1", "input_tokens": "1000000",
         "output_tokens": "500000", "cost_usd": "0.2"}
    ]  # fmt: skip
    assert [(line["job"], line["gpu_seconds"], line["cost_usd"]) for line in exported("jobs")] == [
        (job.pk, "20.0", "0.02")
    ]
    assert {line["key"]: line["cost_usd"] for line in exported("key")}["key_1"] == "0.2"
    assert sum(float(line["cost_usd"]) for line in exported("label")) == pytest.approx(0.22)
    assert "Credit granted" in {line["what"] for line in exported("ledger")}


@pytest.mark.slow
def test_the_csv_of_jobs_is_written_in_parts(floor, claim, client_for, vera, monkeypatch):
    monkeypatch.setattr(usage, "_READ_AT_ONCE", 1)
    find_jobs, sizes = usage._by_job, []
    monkeypatch.setattr(usage, "_by_job", lambda owner, part: sizes.append(len(part)) or find_jobs(owner, part))
    jobs = [floor.job(), floor.job()]
    for _ in jobs:
        claim().start().succeed(floor.base_model, seconds=20.0)

    lines = csv_rows(client_for(vera).get("/usage/export?table=jobs"))

    assert (sizes, {line["job"] for line in lines}) == ([1, 1], {job.pk for job in jobs})


def test_the_csv_of_the_ledger_has_every_movement_and_is_written_in_parts(floor, client_for, vera, monkeypatch):
    monkeypatch.setattr(usage, "_READ_AT_ONCE", 2)
    monkeypatch.setattr(usage, "_MOST_EXPORTED", 1)
    find_movements, sizes = usage._movements, []
    monkeypatch.setattr(usage, "_movements", lambda owner, part: sizes.append(len(part)) or find_movements(owner, part))
    for number in range(5):
        give_credit(floor.organization, USD, key=f"gift-{number}")

    lines = csv_rows(client_for(vera).get("/usage/export?table=ledger"))

    assert max(sizes) == 2
    assert len(lines) == LedgerTransaction.objects.filter(organization=floor.organization).count() > 5


@pytest.mark.slow
def test_the_export_adds_up(use, floor, claim, client_for, vera):
    use("anneal-demo")
    use("anneal-demo")
    job = floor.job()
    claim().start().succeed(floor.base_model, seconds=20.0)

    response = client_for(vera).get("/usage/export")
    lines = csv_rows(response)

    by_sku = {line["sku"]: line for line in lines}
    assert by_sku["inference:input:anneal-demo"]["quantity"] == "2000000"
    assert by_sku["inference:input:anneal-demo"]["cost_usd"] == "0.2"
    assert by_sku["training:local-cpu"] | {"day": "", "key": "", "price_version": ""} == {
        "day": "",
        "kind": "training",
        "subject": job.pk,
        "sku": "training:local-cpu",
        "unit": "gpu_ms",
        "quantity": "20000",
        "requests": "0",
        "key": "",
        "member": "",
        "adapter_version": "",
        "labels": "",
        "price_version": "",
        "cost_usd": "0.02",
    }
    assert response["Content-Disposition"].startswith("attachment")


@pytest.mark.parametrize(
    ("cell", "harmless"),
    [
        *((cell, f"'{cell}") for cell in ("=1+1", "+1", "-1", "@SUM(A1)", "\t1", "\r1")),
        ("x;=1+1;y", "x;'=1+1;y"),
        ("x\n@SUM(A1)\r\n-1\t+1", "x\n'@SUM(A1)\r\n'-1\t'+1"),
        ('x;"=1+1;', "x;'\"=1+1;"),
        ('"=1+1', "'\"=1+1"),
        ("a-b = c; d + e", "a-b = c; d + e"),
    ],
)
def test_text_that_looks_like_a_formula_is_text(cell, harmless):
    body = b"".join(csv_chunks((cell, "amount", "exact"), [(cell, -1, Decimal("-0.5"))])).decode()

    written = next(iter(csv.DictReader(io.StringIO(body, newline=""))))
    assert written == {harmless: harmless, "amount": "-1", "exact": "-0.5"}


def test_a_long_export_is_written_to_a_file_while_its_rows_are_read(rf: RequestFactory, monkeypatch):
    made: list[tempfile.SpooledTemporaryFile[bytes]] = []
    real = tempfile.SpooledTemporaryFile

    def note(**options: int) -> tempfile.SpooledTemporaryFile[bytes]:
        made.append(real(**options))
        return made[0]

    def rows() -> Iterator[tuple[str]]:
        for _ in range(300):
            yield ("x" * 10_000,)
        assert made[0]._rolled, "a third of the rows fit into memory"

    monkeypatch.setattr(tempfile, "SpooledTemporaryFile", note)
    answer = download_csv(rf.get("/"), ("name",), rows(), filename="usage.csv")
    assert sum(map(len, answer.streaming_content)) > 3_000_000
