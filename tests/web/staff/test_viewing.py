"""Viewing as an organization: what an operator sees, for how long, and that nothing can be changed."""

import time

import pytest

from apps.accounts.models import Membership
from apps.core.models import AuditEntry
from apps.finetuning.models import FineTuningJob
from tests.factories.accounts import make_organization
from tests.factories.finetuning import give_credit, make_job
from tests.support.pages import text


def path_of(organization) -> str:
    return f"/staff/organizations/{organization.pk}/view"


@pytest.fixture
def viewer_browser(olga, client_for, organization):
    """The browser of an operator who views Acme."""
    browser = client_for(olga)
    assert browser.post(path_of(organization)).headers["Location"] == "/"
    return browser


def end_time(browser) -> None:
    session = browser.session
    session["viewing"] = session["viewing"] | {"ends_at": time.time() - 1}
    session.save()


@pytest.mark.slow
def test_an_operator_sees_the_pages_as_a_viewer_with_a_banner(viewer_browser, floor, rival):
    job = floor.job(suffix="ours")
    give_credit(rival)
    foreign = make_job(rival, floor.base_model, suffix="theirs")

    page = text(viewer_browser.get(f"/jobs/{job.pk}"))
    console = text(viewer_browser.get("/staff/pools"))

    assert "You are viewing as" in page and "<b>Acme</b>" in page
    assert "Stop viewing" in page and "Stop viewing" in console
    assert "Cancel the job" not in page and f"/jobs/{job.pk}/cancel" not in page
    assert viewer_browser.get(f"/jobs/{foreign.pk}").status_code == 404
    assert viewer_browser.get("/organization/audit").status_code == 403
    assert Membership.objects.filter(organization=floor.organization).count() == 1


def test_each_request_is_in_both_audit_logs(viewer_browser, organization, olga):
    viewer_browser.get("/members?page=1")
    # a page of the console in another tab
    viewer_browser.get("/staff/", headers={"HX-Request": "true", "X-Poll": "1"})
    viewer_browser.get("/staff/search?q=x", headers={"HX-Request": "true"})
    viewer_browser.post("/members/invite", {"email": "x@example.com", "role": "owner"})
    viewer_browser.post("/staff/viewing/stop")

    for log in (None, organization):
        rows = AuditEntry.objects.filter(organization=log, action__startswith="organization.view").order_by("id")
        assert [(row.actor, row.action, row.details.get("path")) for row in rows] == [
            (olga.pk, "organization.view_started", None),
            (olga.pk, "organization.viewed", "/members"),
            (olga.pk, "organization.viewed", "/staff/search"),
            (olga.pk, "organization.view_refused", "/members/invite"),
            (olga.pk, "organization.view_stopped", None),
        ]


@pytest.mark.slow
def test_nothing_can_be_changed_until_the_viewing_is_stopped(viewer_browser, floor, organization):
    job = floor.job()
    body = {"job": job.pk, "confirm": job.pk}
    grant = {"amount_usd": "5", "reason": "x", "once": "adj_" + "0" * 26}

    refused = [
        viewer_browser.post(f"/jobs/{job.pk}/cancel"),
        viewer_browser.post("/staff/jobs/cancel", body),
        viewer_browser.post(f"/staff/organizations/{organization.pk}/adjust", grant),
        viewer_browser.post(path_of(organization)),
        viewer_browser.post("/accounts/password/change/"),
        viewer_browser.delete(f"/jobs/{job.pk}"),
    ]
    stopped = viewer_browser.post("/staff/viewing/stop")

    assert [answer.status_code for answer in refused] == [403] * len(refused)
    assert "Stop viewing first" in text(refused[0])
    assert FineTuningJob.objects.get(pk=job.pk).status == job.status
    assert stopped.headers["Location"] == f"/staff/organizations/{organization.pk}"
    assert viewer_browser.get("/members").headers["Location"] == "/staff/"
    assert viewer_browser.post("/staff/jobs/cancel", body).status_code == 302


def test_a_page_that_would_write_is_refused_by_the_database(viewer_browser, floor):
    version = floor.job().training_file

    refused = viewer_browser.get(f"/datasets/{version.pk}/download")

    assert refused.status_code == 403
    assert "cannot change anything" in text(refused)
    assert not AuditEntry.objects.filter(action="dataset.downloaded").exists()


def test_it_ends_after_half_an_hour_and_the_last_form_is_refused(viewer_browser, organization, olga):
    own = make_organization("Own", owner=olga)
    assert "Acme" in text(viewer_browser.get("/members"))

    end_time(viewer_browser)
    late = viewer_browser.post("/organization", {"name": "Renamed"})
    page = text(viewer_browser.get("/members"))

    assert late.status_code == 403
    own.refresh_from_db()
    assert own.name == "Own"
    assert viewer_browser.get("/nowhere").status_code == 404
    assert "Own" in page and "Acme" not in page and "Stop viewing" not in page


def test_someone_who_is_no_operator_can_neither_start_nor_carry_it(client_for, charlie, rival, organization):
    browser = client_for(charlie)
    assert browser.post(path_of(organization)).status_code == 403
    session = browser.session
    session["viewing"] = {"operator": charlie.pk, "organization": organization.pk, "ends_at": time.time() + 900}
    session.save()

    page = text(browser.get("/members"))

    assert "Rival" in page and "Acme" not in page and "Stop viewing" not in page
    assert "viewing" not in browser.session


def test_it_ends_with_the_operators_right(viewer_browser, olga):
    type(olga).objects.filter(pk=olga.pk).update(is_operator=False)

    answer = viewer_browser.get("/members")

    assert answer.headers["Location"] == "/organization/new"


def test_signing_out_ends_it(viewer_browser, olga):
    assert viewer_browser.post("/accounts/logout/").status_code == 302
    viewer_browser.force_login(olga, backend="allauth.account.auth_backends.AuthenticationBackend")

    assert viewer_browser.get("/members").headers["Location"] == "/staff/"


def test_a_key_that_was_made_before_is_not_shown_while_viewing(client_for, olga, organization):
    make_organization("Own", owner=olga)
    browser = client_for(olga)
    browser.post("/keys", {"name": "k", "scopes": ["view"], "expires": "30"})
    browser.post(path_of(organization))

    viewed = text(browser.get("/keys"))
    browser.post("/staff/viewing/stop")

    assert "shown only once" not in viewed.lower() and "Stop viewing" in viewed
    assert browser.session["issued_key"]


def test_an_operator_without_a_second_factor_cannot_start_it(client_for, olga, organization, settings):
    settings.OPERATOR_MFA = True
    browser = client_for(olga)

    assert browser.post(path_of(organization)).headers["Location"].startswith("/accounts/second-factor/")
    assert "viewing" not in browser.session


def test_an_unknown_organization_is_not_found(client_for, olga):
    assert client_for(olga).post("/staff/organizations/org_x/view").status_code == 404
