"""Lists of the console that grow with the installation are shown in parts, and say so."""

import datetime
import html
from urllib.parse import quote

import pytest

from apps.accounts.models import Organization
from apps.billing.books.credit_requests import request_credit
from apps.catalog.models import PriceRule
from apps.catalog.operations import set_price
from apps.core.database.clock import db_now
from apps.core.objects import page_tables
from apps.finetuning.models import FineTuningJob, Run, RunMember, Worker
from apps.interfaces.staff.money import books, payments
from apps.payments.models import CardDispute, CardRefund, ReconciliationDifference, TopUp
from tests.factories.accounts import make_organization, make_user
from tests.factories.finetuning import give_credit, make_job, make_pool, make_worker
from tests.factories.many_rows import copy_rows, numbered
from tests.factories.money import make_waiting_refund
from tests.support.pages import csv_rows

pytestmark = pytest.mark.django_db


def text(console, path: str) -> str:
    response = console.get(path)
    assert response.status_code == 200
    return html.unescape(response.content.decode())


@pytest.mark.slow
def test_jobs_are_listed_25_a_page_from_the_last_one_shown(console, floor) -> None:
    copy_rows(
        floor.job(), count=60, id=numbered("ftjob-"), status="'cancelled'",
        created_at="now() - number * interval '1 day'", finished_at="now()",
    )  # fmt: skip
    listed = list(FineTuningJob.objects.order_by("-created_at", "-id").values_list("pk", flat=True))

    def shown(query: str) -> list[str]:
        return [row["job"].pk for row in console.get(f"/staff/jobs{query}").context["jobs"]]

    assert shown("") == listed[:25]
    assert f"?after={listed[24]}" in text(console, "/staff/jobs")
    assert shown(f"?after={listed[24]}") == listed[25:50]
    assert shown(f"?after={listed[49]}") == listed[50:]
    assert shown(f"?before={listed[50]}") == listed[25:50]
    cancelled = text(console, f"/staff/jobs?status=cancelled&after={listed[30]}")
    assert f"?status=cancelled&after={listed[55]}" in cancelled and f"before={listed[31]}" in cancelled
    assert shown("?after=ftjob-x") == shown("?status=nothing") == listed[:25]


def csv(console, path: str) -> list[dict[str, str]]:
    return csv_rows(console.get(path))


@pytest.mark.slow
def test_jobs_are_searched_filtered_sorted_and_sent_as_csv(console, floor, rival) -> None:
    give_credit(rival)
    ours, theirs = floor.job(suffix="ours"), make_job(rival, floor.base_model, suffix="theirs")
    long_ago = db_now() - datetime.timedelta(days=40)
    FineTuningJob.objects.filter(pk=theirs.pk).update(
        status="running", pool=make_pool("other"), created_at=long_ago, cost_nano=10**7, method="qlora"
    )

    def shown(query: str) -> list[str]:
        found = [row["job"].pk for row in console.get(f"/staff/jobs?{query}").context["jobs"]]
        assert [row["id"] for row in csv(console, f"/staff/jobs/export?{query}")] == found
        return found

    assert shown("") == [ours.pk, theirs.pk] and shown("sort=cost") == shown("sort=oldest") == [theirs.pk, ours.pk]
    for query in ("q=rival", f"q={theirs.pk}", "q=theirs", "status=running", "method=qlora"):
        assert shown(query) == [theirs.pk], query
    for query in (f"pool={floor.pool.pk}", "days=30", f"organization={floor.organization.pk}"):
        assert shown(query) == [ours.pk], query
    assert shown(f"organization={rival.pk}&days=7") == []
    row = csv(console, "/staff/jobs/export?q=theirs")[0]
    assert (row["organization"], row["cost_usd"], row["pool"]) == ("Rival", "0.01", "other")


@pytest.mark.slow
def test_several_jobs_are_cancelled_once_their_number_is_typed(console, floor, rival) -> None:
    give_credit(rival)
    jobs = [floor.job(), make_job(rival, floor.base_model)]
    body = {"job": [job.pk for job in jobs], "confirm": "2 jobs"}
    asked = text(console, f"/staff/jobs/cancel?job={jobs[0].pk}&job={jobs[1].pk}")

    console.post("/staff/jobs/cancel", body)

    assert "Acme: It leaves the queue." in asked and "Rival: It leaves the queue." in asked
    assert set(FineTuningJob.objects.values_list("status", flat=True)) == {"cancelled"}


@pytest.mark.slow
def test_workers_are_searched_filtered_and_sent_as_csv(console, floor, claim) -> None:
    job = floor.job()
    claim()
    other, revoked = (make_worker(floor.pool, credential=f"annw_{name}") for name in ("other", "revoked"))
    Worker.objects.filter(pk=other.pk).update(hostname="b-machine", cordoned_at=db_now(), kind="replica")
    Worker.objects.filter(pk=revoked.pk).update(revoked_at=db_now())

    def shown(query: str) -> set[str]:
        found = {row["worker"].pk for row in console.get(f"/staff/workers?{query}").context["rows"]}
        assert {row["id"] for row in csv(console, f"/staff/workers/export?{query}")} == found
        return found

    both = {floor.worker.pk, other.pk}
    assert shown("") == shown(f"pool={floor.pool.pk}") == both and shown("state=revoked") == {revoked.pk}
    assert shown("q=b-mach") == shown("state=cordoned") == shown("kind=replica") == {other.pk}
    assert shown("state=open") == {floor.worker.pk}
    page = text(console, "/staff/workers")
    assert f'href="/staff/jobs/{job.pk}"' in page and f'name="worker" value="{other.pk}"' in page
    assert 'name="worker"' not in text(console, "/staff/workers?state=revoked")


@pytest.mark.slow
def test_organizations_quotas_and_balances_are_sent_as_csv(console, organization, floor) -> None:
    make_organization("Empty", owner=make_user("empty"))

    listed, limits, balances = (csv(console, f"/staff/{page}/export") for page in ("organizations", "quotas", "books"))

    assert [row["name"] for row in listed] == [row["name"] for row in limits] == ["Acme", "Empty"]
    assert float(listed[0]["available_usd"]) > 0 == float(listed[1]["available_usd"])
    assert (limits[1]["weight"], balances[1]["paid_left_usd"]) == ("1", "0")
    assert [row["name"] for row in csv(console, "/staff/quotas/export?standing=empty&sort=newest")] == ["Empty"]


@pytest.mark.slow
def test_prices_in_force_and_to_come_are_listed_50_a_page_and_past_ones_apart(console, floor) -> None:
    sku, now = "training:other", db_now()
    coming = now + datetime.timedelta(days=1)
    for price_nano, begin in ((1_000_000_000, None), (2_000_000_000, None), (3_000_000_000, coming)):
        set_price(
            sku=sku, unit="gpu_ms", price_nano=price_nano, per=3_600_000, effective_from=begin, by="system",
            now=db_now(),
        )  # fmt: skip
    past, current, future = PriceRule.objects.filter(sku=sku).order_by("effective_from")

    def shown(query: str) -> list[PriceRule]:
        return [rule for rule, _ in console.get(f"/staff/prices{query}").context["rules"]]

    assert {current, future} <= set(shown("")) and past not in shown("")
    assert past in shown("?show=past") and shown(f"?show=past&sku={sku}") == [past]
    assert f"?show=past&sku={quote(sku)}" in text(console, "/staff/prices")
    assert "No past prices" in text(console, "/staff/prices?show=past&sku=nothing")

    copy_rows(past, count=60, id=numbered("price_"), sku="'warm:' || number", effective_to="NULL")
    listed = list(PriceRule.objects.filter(effective_to=None).order_by("sku", "id").values_list("pk", flat=True))
    first = shown("")
    assert len(first) == 50 and f"?after={first[-1].pk}" in text(console, "/staff/prices")
    assert [rule.pk for rule in shown(f"?after={first[-1].pk}")][-1] == listed[-1]


@pytest.mark.slow
def test_organizations_are_filtered_by_their_standing(console, organization, floor):
    for name in ("Closed", "Empty"):
        make_organization(name, owner=make_user(name))
    Organization.objects.filter(name="Closed").update(suspended_at=db_now())

    def shown(query: str) -> list[str]:
        return [row.organization.name for row in console.get(f"/staff/organizations{query}").context["rows"]]

    assert shown("?standing=suspended") == ["Closed"]
    assert shown("?standing=empty") == ["Closed", "Empty"]
    assert shown("?standing=empty&q=emp") == ["Empty"]
    assert shown("?standing=nothing") == shown("") and shown("?sort=newest")[0] == "Empty"
    assert 'name="standing" value="empty"' in console.get("/staff/organizations?standing=empty").content.decode()


def test_the_books_and_payments_show_part_of_what_waits_and_say_so(console, organization, monkeypatch) -> None:
    monkeypatch.setattr(books, "_SHOWN", 1)
    monkeypatch.setattr(payments, "_SHOWN", 1)
    others = [make_user("second"), make_user("third")]
    for number, owner in enumerate(others):
        asking = make_organization(f"Tenant {number}", owner=owner)
        request_credit(organization=asking, amount_nano=10**9, note=f"for test {number}", by=owner)
        ReconciliationDifference.objects.create(source_id=f"ch_{number}", ours_cents=1, theirs_cents=2)

    waiting, differing = text(console, "/staff/books"), text(console, "/staff/payments")

    assert "for test 0" in waiting and "for test 1" not in waiting
    assert "The others follow when these are decided." in waiting
    assert ("ch_0" in differing) != ("ch_1" in differing)
    assert "The others follow when these are resolved." in differing
    asked = csv(console, "/staff/books?csv=credit-requests")
    assert len(asked) == len(csv(console, "/staff/payments?csv=differences")) == 2, "a file has all of them"
    assert len(console.get("/staff/payments?csv=refunds").context["differences"]) == 1
    monkeypatch.setattr(page_tables, "MAX_ROWS", 1)
    for path in ("/staff/books?csv=credit-requests", "/staff/payments?csv=differences"):
        refused = console.get(path)
        assert refused.status_code == 400 and "A file has at most 1 rows." in refused.content.decode(), path


@pytest.mark.slow
def test_payments_refunds_and_disputes_are_listed_50_a_page_so_that_none_is_out_of_reach(console, organization) -> None:
    refund = make_waiting_refund(organization)
    dispute = CardDispute.objects.create(
        organization=organization, topup=refund.topup, stripe_id="dp_0", status="needs_response", amount_cents=100
    )
    ago = "now() - number * interval '1 day'"
    copy_rows(refund.topup, count=120, id=numbered("topup_"), created_at=ago)
    copy_rows(refund, count=120, id=numbered("refund_"), created_at=ago)
    copy_rows(dispute, count=120, id=numbered("dispute_"), stripe_id="'dp_' || number", created_at=ago)

    for name, model in (("topups", TopUp), ("refunds", CardRefund), ("disputes", CardDispute)):
        listed = list(model.objects.order_by("-created_at", "-id").values_list("pk", flat=True))

        def shown(query: str, name: str = name) -> list[str]:
            return [each.pk for each in console.get(f"/staff/payments?{query}").context[name].rows]

        assert shown("") == listed[:50]
        assert f"?{name}_after={listed[49]}" in text(console, "/staff/payments")
        assert shown(f"{name}_after={listed[99]}") == listed[100:]
        assert shown(f"{name}_before={listed[100]}") == listed[50:100]
        assert shown(f"{name}_after=x") == listed[:50]
        file = csv(console, f"/staff/payments?csv={'payments' if name == 'topups' else name}&{name}_after=x")
        assert len(file) == len(listed)
        assert shown("csv=differences") == listed[:50], "only the list that is asked for is read whole"
    both = f"disputes_before=x&refunds_after={refund.pk}"
    assert f"?{both}&topups_after=topup_" in text(console, f"/staff/payments?{both}&other=1"), "the others stay"


@pytest.mark.slow
def test_a_worker_shows_the_runs_that_it_led_and_those_that_it_joined(console, floor, claim) -> None:
    led, joined = floor.job(), floor.job()
    claim(), claim()
    other = make_worker(floor.pool, credential="annw_other")
    run = Run.objects.get(job=joined)
    RunMember.objects.create(
        organization=floor.organization, run=run, rank=1, worker=other, address="here", heartbeat_at=db_now()
    )

    page = text(console, f"/staff/workers/{other.pk}")

    assert f"/staff/jobs/{joined.pk}" in page and f"/staff/jobs/{led.pk}" not in page


@pytest.mark.slow
def test_the_workers_of_a_pool_are_listed_25_a_page_with_their_jobs(console, floor, claim) -> None:
    job = floor.job()
    claim()
    copy_rows(
        Worker.objects.get(), count=30, id=numbered("worker_"), credential_sha256="lpad(number::text, 64, '0')",
        created_at="now() + number * interval '1 minute'",
    )  # fmt: skip
    listed = list(Worker.objects.order_by("created_at").values_list("pk", flat=True))

    def shown(query: str) -> list[str]:
        page = console.get(f"/staff/pools/{floor.pool.pk}{query}")
        return [each["worker"].pk for each in page.context["members"]]

    first = text(console, f"/staff/pools/{floor.pool.pk}")
    assert shown("") == listed[:25] and f"?after={listed[24]}" in first
    assert first.count(f"/staff/jobs/{job.pk}") == 2  # of the worker that holds it, and of its drain
    assert shown(f"?after={listed[24]}") == listed[25:] and shown(f"?before={listed[25]}") == listed[:25]
