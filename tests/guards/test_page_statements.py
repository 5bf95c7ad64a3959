"""What the pages ask of the database: a GET writes nothing, and each page's number of statements is pinned.

A page that gains a statement fails here: fetch it with the others, or raise its number knowingly.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings
from django.db import connection, transaction
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from apps.core.database.clock import db_now
from apps.datasets.inspection.inspections import inspect_version
from apps.datasets.models import DatasetVersion
from apps.datasets.operations import count_tokens
from apps.finetuning.models import Worker
from apps.interfaces.web.jobs.tabs import LABELS
from apps.interfaces.web.wizard.steps.sequence import STEPS
from tests.guards.makers.tenants import Tenant, World, undone
from tests.guards.urls import URLS
from tests.guards.world import MAKERS, SHARED, build_world

pytestmark = pytest.mark.django_db
KINDS = ("page", "person", "staff", "public")
PAGES = sorted(
    name
    for name, url in URLS.items()
    if name.startswith(("web:", "staff:")) and url.kind in KINDS and "GET" in url.methods and name != "web:job_new"
)
PAGES += [f"web:job_new {step}" for step in STEPS] + [f"web:job_detail {tab}" for tab in LABELS if tab]
# What an open page of the console asks for again every few seconds.
NOW = " now"
PAGES += [f"staff:{name}{NOW}" for name in ("home", "job_detail", "pool_detail", "worker_detail")]
# A GET that writes, and why it may.
WRITES = {
    "web:audit_download": "a download is recorded in the audit log",
    "web:adapter_download": "a download is recorded in the audit log",
    "web:batch_download": "a download is recorded in the audit log",
    "web:checkpoint_download": "a download is recorded in the audit log",
    "web:dataset_download": "a download is recorded in the audit log",
}
NOT_SQL = re.compile(r"(RELEASE )?SAVEPOINT|ROLLBACK TO")
# Statements of each page for the owner of an organization with one object of each kind; staff pages for an operator.
STATEMENTS: dict[str, int] = {
    "staff:adjustment_create": 12,
    "staff:audit": 10,
    "staff:base_model_list": 11,
    "staff:base_model_retire": 10,
    "staff:books": 20,
    "staff:books_export": 8,
    "staff:home": 52,
    "staff:home now": 41,
    "staff:hub_lookup": 27,
    "staff:job_cancel": 10,
    "staff:job_detail": 35,
    "staff:job_detail now": 35,
    "staff:job_export": 7,
    "staff:job_list": 14,
    "staff:margin": 22,
    "staff:organization_detail": 44,
    "staff:organization_export": 9,
    "staff:organization_list": 13,
    "staff:payment_list": 17,
    "staff:payment_refund": 11,
    "staff:pool_calibrations": 14,
    "staff:pool_detail": 31,
    "staff:pool_detail now": 29,
    "staff:pool_list": 22,
    "staff:price_list": 20,
    "staff:quota_edit": 22,
    "staff:quota_export": 13,
    "staff:quota_list": 17,
    "staff:region_home": 10,
    "staff:region_list": 11,
    "staff:replica_detail": 13,
    "staff:replica_list": 11,
    "staff:search": 9,
    "staff:worker_detail": 15,
    "staff:worker_detail now": 15,
    "staff:worker_export": 7,
    "staff:worker_list": 14,
    "staff:worker_revoke": 12,
    "web:account": 9,
    "web:accuracy": 10,
    "web:adapter_delete": 10,
    "web:adapter_detail": 43,
    "web:adapter_download": 12,
    "web:adapter_export": 8,
    "web:adapter_list": 22,
    "web:adapter_push": 10,
    "web:adapter_stop": 10,
    "web:adapter_upload": 12,
    "web:alias_delete": 10,
    "web:audit": 13,
    "web:audit_download": 10,
    "web:batch_cancel": 10,
    "web:batch_detail": 11,
    "web:batch_download": 10,
    "web:batch_export": 8,
    "web:batch_list": 13,
    "web:billing": 20,
    "web:billing_page": 10,
    "web:brand_logo": 2,
    "web:brand_style": 2,
    "web:budget_end": 13,
    "web:budget_list": 21,
    "web:charge_why": 14,
    "web:checkpoint_download": 10,
    "web:completion_delete": 10,
    "web:completion_detail": 11,
    "web:completion_export": 9,
    "web:completion_list": 13,
    "web:credit": 11,
    "web:dataset_changes": 13,
    "web:dataset_columns": 10,
    "web:dataset_delete": 10,
    "web:dataset_delete_many": 10,
    "web:dataset_detail": 20,
    "web:dataset_download": 10,
    "web:dataset_export": 8,
    "web:dataset_list": 29,
    "web:dataset_repair": 11,
    "web:dataset_row": 12,
    "web:dataset_upload": 10,
    "web:dataset_upload_state": 8,
    "web:eval_cancel": 10,
    "web:eval_delete": 10,
    "web:eval_detail": 12,
    "web:eval_export": 8,
    "web:eval_list": 12,
    "web:eval_new": 14,
    "web:eval_run": 12,
    "web:eval_run_new": 16,
    "web:help": 14,
    "web:help_page": 14,
    "web:help_quickstart": 11,
    "web:help_reference": 14,
    "web:invitation_accept": 11,
    "web:invoice_csv": 9,
    "web:invoice_detail": 14,
    "web:invoice_list": 18,
    "web:invoice_pdf": 11,
    "web:job_cancel_many": 12,
    "web:job_chart": 13,
    "web:job_compare": 18,
    "web:job_detail": 51,
    "web:job_detail checkpoints": 48,
    "web:job_detail dataset": 49,
    "web:job_detail events": 48,
    "web:job_detail log": 48,
    "web:job_detail samples": 49,
    "web:job_export": 10,
    "web:job_list": 24,
    "web:job_log": 9,
    "web:job_new compute": 26,
    "web:job_new dataset": 29,
    "web:job_new method": 31,
    "web:job_new model": 30,
    "web:job_new review": 28,
    "web:job_retraining": 13,
    "web:job_retraining_delete": 10,
    "web:job_retraining_edit": 16,
    "web:job_retraining_new": 15,
    "web:job_stream": 8,
    "web:job_tensorboard": 9,
    "web:key_export": 9,
    "web:key_list": 15,
    "web:key_revoke": 11,
    "web:member_export": 8,
    "web:member_list": 14,
    "web:member_remove": 10,
    "web:notification_list": 10,
    "web:organization_create": 7,
    "web:organization_settings": 9,
    "web:overview": 46,
    "web:playground": 24,
    "web:playground_delete": 7,
    "web:playground_preset_delete": 10,
    "web:playground_saved": 11,
    "web:price_list": 12,
    "web:quota_end": 10,
    "web:project_archive": 10,
    "web:project_detail": 20,
    "web:project_list": 10,
    "web:quota_list": 35,
    "web:search": 7,
    "web:service_account_list": 12,
    "web:service_account_remove": 12,
    "web:session_list": 11,
    "web:status": 16,
    "web:styleguide": 6,
    "web:styleguide_metrics": 6,
    "web:tracker_list": 10,
    "web:usage": 28,
    "web:usage_export": 11,
    "web:usage_traffic": 12,
    "web:usage_traffic_export": 9,
    "web:webhook_delete": 10,
    "web:webhook_detail": 11,
    "web:webhook_list": 10,
}
_OF_OPERATORS = ("staff:", "web:styleguide")


@pytest.fixture(scope="module")
def world(django_db_setup: None, django_db_blocker: Any) -> Iterator[World]:
    """Two tenants. The files of the first one are counted and inspected, as after their validation."""
    with django_db_blocker.unblock(), transaction.atomic():
        built = build_world()
        for version in DatasetVersion.objects.filter(organization=built.acme.organization, status="ready"):
            count_tokens(version=version, base_model=built.installation.base_model)
            inspect_version(version=version)
        yield built
        transaction.set_rollback(True)


@pytest.fixture(scope="module")
def clients(world: World) -> dict[str, Client]:
    """Return a client of each user by the user's id."""
    made = {}
    for user in (world.operator, world.acme.owner, world.rival.owner):
        made[user.pk] = Client()
        made[user.pk].force_login(user, backend=settings.AUTHENTICATION_BACKENDS[0])
    return made


@pytest.fixture(autouse=True)
def _all_is_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "STRIPE_WEBHOOK_SECRET", "whsec_guard")
    monkeypatch.setattr(settings, "BRAND_HUE", 20)
    monkeypatch.setattr(settings, "BRAND_LOGO", Path(__file__).parents[2] / "static" / "favicon.svg")


def test_every_page_has_a_number_and_every_number_a_page() -> None:
    assert set(STATEMENTS) == set(PAGES)
    assert set(WRITES) <= set(PAGES)


@pytest.mark.parametrize("name", PAGES)
def test_a_get_writes_nothing_and_sends_its_number_of_statements(
    name: str, world: World, clients: dict[str, Client]
) -> None:
    client = clients[_reader(name, world, world.acme)]
    with undone():
        asked = _asked(name, world.acme)
        Worker.objects.update(last_seen_at=db_now())  # however long the earlier pages took
        _refuse_writes(name)
        headers = {"HX-Request": "true"} if name.endswith(NOW) else {}
        response = client.get(*asked, headers=headers)  # what a process keeps is asked for once
        assert response.status_code < 400, response.content[-2000:]
        with CaptureQueriesContext(connection) as captured:
            client.get(*asked, headers=headers)
    sent = [query["sql"] for query in captured if not NOT_SQL.match(query["sql"])]

    assert len(sent) == STATEMENTS[name], "\n".join(sent)


@pytest.mark.parametrize("name", PAGES)
def test_a_get_writes_nothing_of_files_that_are_not_counted(
    name: str, world: World, clients: dict[str, Client]
) -> None:
    with undone():
        asked = _asked(name, world.rival)
        _refuse_writes(name)
        response = clients[_reader(name, world, world.rival)].get(*asked)

    assert response.status_code < 400, response.content[-2000:]


def _refuse_writes(name: str) -> None:
    """Django and PostgreSQL refuse a write in a read-only transaction, so the page would fail."""
    if name not in WRITES:
        connection.cursor().execute("SET TRANSACTION READ ONLY")


def _reader(name: str, world: World, tenant: Tenant) -> str:
    return world.operator.pk if name.startswith(_OF_OPERATORS) else tenant.owner.pk


def _asked(name: str, tenant: Tenant) -> tuple[str, dict[str, str]]:
    """Return a page's address and the query that names objects of the tenant."""
    view, _, part_of_page = name.removesuffix(NOW).partition(" ")
    url = URLS[view]
    ids = {
        part: tenant.ids[kind] if kind in MAKERS else SHARED[kind](tenant.installation)
        for part, kind in {**url.ids, **url.refs}.items()
    }
    query = {**url.data, "tab" if view == "web:job_detail" else "step": part_of_page} if part_of_page else {}
    return (
        reverse(view, kwargs={part: ids[part] for part in url.ids}),
        query | {part: ids[part] for part in url.refs},
    )
