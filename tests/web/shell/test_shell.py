"""The frame of pages that belong to no organization: errors and the operator console show the reader's own one."""

import gzip
import re

import pytest
from django.test import Client

from tests.factories.accounts import make_organization
from tests.factories.datasets import make_ready_version
from tests.support.pages import text


@pytest.mark.parametrize(
    ("address", "status"), [("/nowhere", 404), ("/jobs/ftjob-unknown", 404), ("/staff/pools", 403)]
)
def test_an_error_keeps_the_navigation_the_organization_and_the_balance(address, status, floor, client_for, bob):
    page = client_for(bob).get(address)

    assert page.status_code == status
    assert 'aria-label="Main"' in text(page) and 'class="trunc">Acme<' in text(page)
    assert "Balance" in text(page) and "$100.00" in text(page)


def test_an_error_shows_people_who_are_not_signed_in_no_navigation(client_for, db):
    page = client_for(None).get("/nowhere")

    assert page.status_code == 404
    assert 'aria-label="Main"' not in text(page) and "Balance" not in text(page)


def test_the_operator_console_shows_an_operators_own_organization(floor, organization, client_for, olga):
    without = text(client_for(olga).get("/staff/pools"))
    make_organization("Olga's lab", owner=olga)
    within = text(client_for(olga).get("/staff/pools"))

    assert 'id="org-menu"' not in without and "Balance" not in without
    assert "Olga's lab" in within and "Balance" in within and "$0.00" in within
    assert "$100.00" not in within.partition("<main")[0]  # Acme's


def test_the_chosen_organization_stays_chosen_on_the_console(organization, client_for, olga):
    make_organization("First", owner=olga)
    second = make_organization("Second", owner=olga)
    client = client_for(olga)
    client.post("/organization/switch", {"organization": second.pk})

    assert '<span class="trunc">Second</span><span class="ms-auto' in text(client.get("/staff/pools"))


def test_pages_are_compressed_for_browsers_and_other_answers_are_not(organization, bob):
    client = Client()  # reads no content
    client.force_login(bob)
    asked = {"Accept-Encoding": "gzip, br"}

    page = client.get("/jobs", headers=asked)
    table = client.get("/jobs", headers=asked | {"HX-Request": "true", "HX-Target": "jobs"})
    plain, file = client.get("/jobs"), client.get("/jobs/export", headers=asked)

    assert [each.get("Content-Encoding") for each in (page, table, plain, file)] == ["gzip", "gzip", None, None]
    assert "Accept-Encoding" in page["Vary"] and int(page["Content-Length"]) == len(page.content)
    assert b"<h1" in gzip.decompress(page.content) and len(page.content) < len(plain.content) / 4


@pytest.mark.slow
def test_what_is_replaced_names_its_links_and_buttons_so_focus_stays(version, floor, organization, client_for, bob):
    job, file, client = floor.job(), make_ready_version(organization), client_for(bob)
    parts = (
        (f"/adapters/{version.pk}", "adapter-state"), (f"/adapters/{version.pk}", "adapter-exports"),
        (f"/jobs/{job.pk}", "job-state"), (f"/datasets/{file.pk}", "viewer"), ("/", "running"),
    )  # fmt: skip
    for address, target in parts:
        part = text(client.get(address, headers={"HX-Request": "true", "HX-Target": f"div#{target}"}))
        tags = re.findall(r"<(?:a|button)\b[^>]*>", part)
        ids = re.findall(r' id="([^"]+)"', part)

        assert tags and len(set(ids)) == len(ids), target
        own = [tag for tag in tags if ' class="btn btn-sm"' not in tag]
        assert [tag for tag in own if " id=" not in tag] == [], target
