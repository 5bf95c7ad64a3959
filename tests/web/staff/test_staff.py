"""The operator console: who may open it, and what its forms do."""

import html
import re

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from apps.accounts.models import Organization
from apps.billing.queries import get_balance
from apps.catalog.models import BaseModel, PriceRequest, PriceRule
from apps.catalog.queries import active_price
from apps.core.database.clock import db_now
from apps.core.models import OutboxMessage
from apps.finetuning.jobs import control
from apps.finetuning.usage.quotas import get_quota
from tests.factories.accounts import make_organization, make_user
from tests.factories.finetuning import give_credit, make_job
from tests.factories.money import make_waiting_refund

PAGES = ("pools", "base-models", "prices", "quotas", "jobs", "organizations")


@pytest.mark.parametrize("page", PAGES)
def test_pages_are_for_operators_only(page, floor, client_for, olga, alice, bob):
    floor.job()

    assert client_for(olga).get(f"/staff/{page}").status_code == 200
    assert client_for(alice).get(f"/staff/{page}").status_code == 403
    assert client_for(bob).get(f"/staff/{page}").status_code == 403
    assert client_for(None).get(f"/staff/{page}").status_code == 302


def test_an_effect_that_keeps_failing_is_shown_to_operators(console):
    OutboxMessage.objects.create(topic="mail", key="mail_1", attempts=3, last_error="OSError: early")
    OutboxMessage.objects.create(topic="mail", key="mail_2", attempts=9, last_error="OSError: refused")

    page = console.get("/staff/pools").content.decode()

    assert "mail_2" in page and "OSError: refused" in page
    assert "mail_1" not in page


@pytest.mark.parametrize("sku", ["training:nonexistent", "inference:input:gpt-9", "storage:rows", "training:", ""])
def test_only_what_exists_here_gets_a_price(console, floor, sku):
    refused = console.post("/staff/prices", {"sku": sku, "price_usd": "1", "confirmed": f"{sku} 1  "})

    assert refused.status_code == 422
    assert "choose one from the list" in refused.content.decode() or not sku
    assert not PriceRule.objects.filter(sku=sku).exists()


def test_cancelling_a_queued_job_promises_no_checkpoint(console, floor):
    page = console.get(f"/staff/jobs/cancel?job={floor.job().pk}").content.decode()

    assert "It leaves the queue. The customer pays nothing." in page and "checkpoint" not in page


@pytest.mark.slow
def test_jobs_of_all_tenants_are_listed_with_whose_they_are(console, floor, rival):
    floor.job(suffix="ours")
    give_credit(rival)
    theirs = make_job(rival, floor.base_model, suffix="theirs")
    control.request_cancellation(job=theirs, by="key_test", now=db_now())

    def rows(query: str) -> list[tuple[str, str]]:
        page = console.get(f"/staff/jobs{query}")
        shown = [row["job"] for row in page.context["jobs"]]
        assert all(job.pk in page.content.decode() for job in shown)
        assert all(job.organization.name in page.content.decode() for job in shown)
        return [(job.organization.name, job.suffix) for job in shown]

    assert rows("") == [("Rival", "theirs"), ("Acme", "ours")]
    assert rows("?status=cancelled") == rows(f"?organization={rival.pk}") == [("Rival", "theirs")]
    of_rival = console.get(f"/staff/jobs?organization={rival.pk}").content.decode()
    assert "Jobs of Rival" in of_rival and f"?status=failed&amp;organization={rival.pk}" in of_rival
    assert f"/staff/jobs?organization={rival.pk}" in console.get(f"/staff/organizations/{rival.pk}").content.decode()
    assert len(rows("?organization=nobody")) == 2


@pytest.mark.parametrize("page", ["organizations", "quotas", "books"])
def test_organizations_are_searched_and_listed_25_a_page(console, organization, page):
    Organization.objects.bulk_create(
        Organization(name=f"Tenant {number:02}", slug=f"tenant-{number:02}") for number in range(60)
    )

    first = console.get(f"/staff/{page}?q=tenant").content.decode()
    after = html.unescape(re.search(r'href="([^"]+)" rel="next"', first)[1])
    second = console.get(after).content.decode()
    found = console.get(f"/staff/{page}?q={organization.pk}").content.decode()

    assert re.findall(r"Tenant \d\d</a>", first) == [f"Tenant {number:02}</a>" for number in range(25)]
    assert after.startswith(f"/staff/{page}?q=tenant&after=org_")
    assert "Tenant 25" in second and "Tenant 24" not in second and organization.name not in second
    assert organization.name in found and "Tenant" not in found


@pytest.mark.parametrize("page", ["organizations", "quotas", "books"])
def test_more_organizations_need_no_more_statements(console, organization, page, django_assert_max_num_queries):
    console.get(f"/staff/{page}")
    with CaptureQueriesContext(connection) as captured:
        console.get(f"/staff/{page}")
    for number in range(5):
        make_organization(f"Tenant {number}", owner=make_user(f"owner{number}"))

    with django_assert_max_num_queries(len(captured)):
        console.get(f"/staff/{page}")


@pytest.mark.slow
@pytest.mark.parametrize("is_for_everybody", [False, True])
def test_a_price_that_gives_something_away_waits_for_a_second_operator(
    is_for_everybody, console, client_for, organization, floor
):
    sku = f"training:{floor.pool.name}"
    price = {"sku": sku, "price_usd": "0"} | ({} if is_for_everybody else {"organization": organization.pk})
    previewed = console.post("/staff/prices", price)
    console.post("/staff/prices", price | {"confirmed": previewed.context["form"].previewed()})
    wanted = PriceRequest.objects.get()
    own = console.get("/staff/prices").content.decode()
    console.post(f"/staff/prices/requests/{wanted.pk}", {"decision": "approve"})
    before = active_price(sku=sku, organization=organization)
    second = client_for(make_user("otto", is_operator=True))

    both = second.get("/staff/prices").content.decode(), console.get("/staff/prices").content.decode()

    assert "Withdraw" in own and "Approve" not in own and "<code>python manage.py createoperator" in own
    assert "Approve" in both[0] and all("manage.py createoperator" not in page for page in both)
    second.post(f"/staff/prices/requests/{wanted.pk}", {"decision": "approve"})
    after = active_price(sku=sku, organization=organization)
    assert before and after and (before.price_nano > 0, after.price_nano) == (True, 0)


def test_a_large_refund_waits_on_the_payments_page(console, client_for, organization):
    refund = make_waiting_refund(organization)

    assert "Approve" in console.get("/staff/payments").content.decode()
    console.post(f"/staff/payments/refunds/{refund.pk}", {"decision": "approve"})

    refund.refresh_from_db()
    assert refund.status == "requested"


def test_a_base_model_is_retired_once_its_name_is_typed(console, floor):
    base_model = floor.base_model
    address = f"/staff/base-models/retire?model={base_model.pk}"
    asked = console.get(address).content.decode()
    refused = console.post(address, {"model": base_model.pk, "confirm": ""})
    kept = BaseModel.objects.get(pk=base_model.pk).retired_at
    console.post(address, {"model": base_model.pk, "confirm": base_model.display_name})

    assert "Its adapters keep answering" in asked
    assert (refused.status_code, kept) == (422, None)
    assert BaseModel.objects.get(pk=base_model.pk).retired_at is not None


def test_limits_are_set_and_an_empty_field_lifts_one(console, organization):
    body = {"concurrent_gpus": "3", "queued_jobs": "", "weight": "2"}
    console.post(f"/staff/quotas/{organization.pk}", body)

    quota = get_quota(organization=organization)
    assert (quota.concurrent_gpus, quota.queued_jobs, quota.weight) == (3, None, 2)


def test_limits_have_units_beside_what_the_organization_uses(console, floor, organization):
    floor.job()
    path = f"/staff/quotas/{organization.pk}"
    page = console.get(path).content.decode()
    body = {"weight": "1", "storage_bytes": "1.5 TB", "gpu_seconds_per_month": "90 hours a month"}

    wrong = console.post(path, body | {"queued_jobs": "many"})
    console.post(path, body | {"tokens_per_minute": "2 million tokens"})

    assert 'value="20 GB"' in page and 'value="100 hours"' in page
    assert "Now 1. At most 1 in the last 30 days." in page
    assert wrong.status_code == 422
    assert "Write a number with its unit, such as 20 jobs." in wrong.content.decode()
    quota = get_quota(organization=organization)
    assert (quota.storage_bytes, quota.gpu_seconds_per_month) == (1_500 * 10**9, 90 * 3600)
    assert quota.tokens_per_minute == 2_000_000
    listed = console.get("/staff/quotas").content.decode()
    assert "0s of 90 hours" in listed and "of 1.5 TB" in " ".join(listed.split())


def test_credit_granted_twice_by_one_form_is_granted_once(console, organization):
    url = f"/staff/organizations/{organization.pk}/adjust"
    once = console.get(url).context["form"]["once"].value()
    for _ in range(2):
        console.post(url, {"amount_usd": "12.50", "reason": "Welcome", "once": once})

    assert get_balance(organization=organization).available_nano == 12_500_000_000


@pytest.mark.parametrize("path", ["/staff/pools/pool_x", "/staff/quotas/org_x", "/staff/organizations/org_x/adjust"])
def test_an_unknown_id_is_not_found(console, path):
    assert console.get(path).status_code == 404
