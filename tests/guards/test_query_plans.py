"""Operator pages, customers' lists and tasks that run every few seconds read a small part of each large table.

Each of their statements runs again under EXPLAIN ANALYZE, over a year of jobs of many organizations.
"""

import re
from collections.abc import Iterator
from typing import Any

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext

from apps.accounts.models import Organization, User
from apps.billing.models import Hold, LedgerTransaction, UsageSeries
from apps.billing.tasks import close_expired_holds, rate_usage
from apps.finetuning.models import FineTuningJob, Run
from apps.finetuning.tasks import admit_waiting, reclaim
from tests.factories.finetuning import TrainingSetup
from tests.factories.many_rows import copy_rows, numbered

pytestmark = pytest.mark.django_db
ROWS, ORGANIZATIONS, WORKERS = 3_000, 30, 20
LARGE = ("finetuning_finetuningjob", "finetuning_run", "billing_hold", "billing_usageseries",
         "billing_ledgertransaction")  # fmt: skip
STAFF = (
    "/staff/", "/staff/jobs", "/staff/jobs?after={job}", "/staff/jobs?status=queued", "/staff/jobs?days=7",
    "/staff/jobs?pool={pool}", "/staff/jobs/{job}", "/staff/workers", "/staff/workers/{worker}",
    "/staff/pools", "/staff/pools/{pool}", "/staff/books", "/staff/margin",
    "/staff/payments", "/staff/organizations", "/staff/organizations/{organization}", "/staff/quotas",
)  # fmt: skip
LISTS = ("/", "/jobs", "/jobs?after={job}", "/jobs?status=paused", "/usage", "/usage?by=label", "/invoices")
TASKS = (admit_waiting, reclaim, close_expired_holds, rate_usage)
AT = f"now() - ({ROWS} - number) * interval '365 days' / {ROWS}"


@pytest.fixture
def places(organization: Organization) -> dict[str, str]:
    """Make a year of ended jobs, and return ids of things to look at."""
    floor = TrainingSetup(organization)
    job = floor.job()
    run, hold = job.runs.get(), Hold.objects.get(source=job.pk)
    of_others = numbered("org_", f"1 + mod(number, {ORGANIZATIONS - 1})")
    owner = f"CASE WHEN mod(number, {ORGANIZATIONS}) = 0 THEN '{organization.pk}' ELSE {of_others} END"
    series = UsageSeries.objects.create(
        organization=organization, sku="inference:input:tiny", price_rule_id=job.price_rule_id, subject="tiny",
        day=job.created_at.date(),
    )  # fmt: skip
    copy_rows(organization, count=ORGANIZATIONS - 1, id=numbered("org_"), slug="'tenant-' || number")
    copy_rows(floor.worker, count=WORKERS, id=numbered("worker_"), credential_sha256="lpad(number::text, 64, '0')")
    copy_rows(
        job, count=ROWS, id=numbered("ftjob-"), organization_id=owner, status="'succeeded'", created_at=AT,
        finished_at=f"{AT} + interval '1 hour'",
    )  # fmt: skip
    copy_rows(
        run, count=ROWS, id=numbered("run_"), job_id=numbered("ftjob-"), organization_id=owner, status="'succeeded'",
        worker_id=numbered("worker_", f"1 + mod(number, {WORKERS})"), created_at=AT, leased_at=AT,
        finished_at=f"{AT} + interval '1 hour'",
    )  # fmt: skip
    copy_rows(
        hold, count=ROWS, id=numbered("hold_"), source=numbered("ftjob-"), organization_id=owner, status="'closed'",
        created_at=AT, closed_at=AT,
    )  # fmt: skip
    copy_rows(series, count=ROWS, organization_id=owner, subject="'model-' || number", day=f"({AT})::date")
    copy_rows(
        LedgerTransaction.objects.filter(source=job.pk).first() or LedgerTransaction.objects.latest("created_at"),
        count=ROWS, id=numbered("txn_"), idempotency_key="'copy-' || number", organization_id=owner, created_at=AT,
        source=numbered("ftjob-"),
    )  # fmt: skip
    with connection.cursor() as cursor:
        cursor.execute(f"ANALYZE {', '.join(LARGE)}")
        cursor.execute("SET LOCAL random_page_cost = 1")  # as where the tables are in memory
    last = FineTuningJob.objects.filter(status="succeeded").latest("created_at")
    return {
        "job": last.pk, "worker": Run.objects.filter(job=last).values_list("worker_id", flat=True).get(),
        "organization": last.organization_id, "pool": floor.pool.pk,
    }  # fmt: skip


def rows_read(plan: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield each table that the plan reads, with the rows it looks at."""
    if "Relation Name" in plan:
        removed = sum(plan.get(f"Rows Removed by {cause}", 0) for cause in ("Filter", "Index Recheck"))
        yield plan["Relation Name"], (plan["Actual Rows"] + removed) * plan["Actual Loops"]
    for part in plan.get("Plans", ()):
        yield from rows_read(part)


def whole_reads(statements: list[str]) -> list[tuple[str, str]]:
    """Return the statements that read more than a sixth of a large table, each with the table."""
    found = []
    for statement in {each for each in statements if re.match(r"\s*(SELECT|WITH)\b", each) and "$1" not in each}:
        if not any(table in statement for table in LARGE):
            continue
        with connection.cursor() as cursor:
            cursor.execute("EXPLAIN (ANALYZE, FORMAT JSON, COSTS OFF, TIMING OFF) " + statement)
            (((plan,),),) = cursor.fetchall()
        found += [(table, statement) for table, rows in rows_read(plan["Plan"]) if table in LARGE and rows > ROWS / 6]
    return found


@pytest.mark.slow
def test_no_page_list_or_frequent_task_reads_a_large_table_whole(places, client_for, olga: User, alice: User) -> None:
    console, browser = client_for(olga), client_for(alice)
    visits: list[tuple[Client, str]] = [(console, path.format(**places)) for path in STAFF]
    visits += [(browser, path.format(**places)) for path in LISTS]

    with CaptureQueriesContext(connection) as captured:
        for client, path in visits:
            assert client.get(path).status_code == 200, path
        for task in TASKS:
            task()

    assert whole_reads([query["sql"] for query in captured]) == []
