"""Two tabs: what a page sends after its reader switched to another organization or project in another tab."""

import re
from collections.abc import Callable

import pytest
from django.test import Client

from apps.accounts.members.projects import archive_project, create_project
from apps.accounts.models import ApiKey, Invitation, Membership, Organization, Project, User
from apps.core.database.clock import db_now
from apps.datasets.models import Dataset
from tests.factories.accounts import make_organization
from tests.factories.finetuning import TrainingSetup
from tests.support.pages import text

pytestmark = pytest.mark.django_db
STEPS_BEFORE = ("prepare", "rehearse")
POLL = {"HX-Request": "true", "HX-Target": "jobs"}


@pytest.fixture
def browser(organization: Organization, alice: User, client_for: Callable[[User], Client]) -> Client:
    """Alice's browser, in Acme; she also owns Beta."""
    make_organization("Beta", owner=alice)
    client = client_for(alice)
    client.post("/organization/switch", {"organization": organization.pk})
    return client


@pytest.fixture
def project(organization: Organization, alice: User) -> Project:
    return create_project(organization=organization, name="Bots", is_private=False, by=alice, now=db_now())


def selection_on(client: Client, path: str) -> str:
    """Return what each form of the page sends, which is also what its scripts send."""
    page = text(client.get(path))
    in_forms = set(re.findall(r'name="selection" value="([^"]+)"', page))
    in_headers = re.findall(r'"X-Selection": "([^"]*)"', page)
    assert [in_forms] == [set(in_headers)] and len(in_forms) == 1
    return in_forms.pop()


def switch(client: Client, name: str) -> None:
    client.post("/organization/switch", {"organization": Organization.objects.get(name=name).pk})


def test_a_form_of_the_organization_that_was_left_changes_nothing(browser: Client) -> None:
    form = {"selection": selection_on(browser, "/members"), "email": "new@example.com", "role": "member"}
    switch(browser, "Beta")

    refused = browser.post("/members/invite", form)

    assert refused.status_code == 400
    assert "This page is from Acme, but you work in Beta now." in text(refused)
    assert not Invitation.objects.exists()
    switch(browser, "Acme")
    assert browser.post("/members/invite", form).status_code == 302
    assert Invitation.objects.get().organization.name == "Acme"


def test_a_page_is_not_updated_with_rows_of_another_organization(browser: Client) -> None:
    headers = POLL | {"X-Selection": selection_on(browser, "/jobs")}
    assert browser.get("/jobs", headers=headers).status_code == 200
    switch(browser, "Beta")

    assert browser.get("/jobs", headers=headers).status_code == 400
    assert browser.get("/jobs").status_code == 200


@pytest.mark.slow
@pytest.mark.usefixtures("version")
def test_the_playground_gets_no_token_for_another_organization(browser: Client) -> None:
    address = re.findall(r'data-token-url="([^"]+)"', text(browser.get("/playground")))[0]
    assert browser.post(address, content_type="application/json").status_code == 200
    switch(browser, "Beta")

    assert browser.post(address, content_type="application/json").status_code == 400


def test_a_script_is_told_why_it_was_refused(browser: Client) -> None:
    selection = selection_on(browser, "/jobs")
    switch(browser, "Beta")
    headers = {"X-Selection": selection}
    body = {"filename": "rows.jsonl", "bytes": 100}

    for accept in ("application/json", "application/json, text/html"):
        asked = headers | {"Accept": accept}
        refused = browser.post("/datasets/uploads", body, content_type="application/json", headers=asked)

        assert refused.status_code == 400
        assert "This page is from Acme" in refused.json()["error"]["message"]


def test_an_upload_goes_on_while_its_person_chooses_another_project(browser: Client, project: Project) -> None:
    headers = {"X-Selection": selection_on(browser, "/datasets/upload")}
    body = {"filename": "rows.jsonl", "bytes": 100}
    place = "/datasets/uploads"
    begun = browser.post(place, body, content_type="application/json", headers=headers).json()
    browser.post("/projects/choose", {"project": project.pk})

    def send(step: str, **sent: object) -> int:
        address = f"{place}/{begun['id']}/{step}"
        return browser.post(address, sent, content_type="application/json", headers=headers).status_code

    assert browser.get(f"{place}/{begun['id']}", headers=headers).status_code == 200
    assert send("sign", numbers=[1]) == 200
    assert send("cancel") == 200


@pytest.mark.slow
def test_the_page_of_a_job_follows_it_while_its_reader_chooses_another_project(
    browser: Client, project: Project, floor: TrainingSetup
) -> None:
    job = floor.job()
    headers = {"HX-Request": "true", "X-Selection": selection_on(browser, f"/jobs/{job.pk}")}
    browser.post("/projects/choose", {"project": project.pk})

    assert browser.get(f"/jobs/{job.pk}", headers=headers).status_code == 200
    assert browser.get(f"/jobs/{job.pk}/stream", headers=headers).status_code == 200
    switch(browser, "Beta")
    assert browser.get(f"/jobs/{job.pk}/stream", headers=headers).status_code == 400


def test_a_page_of_an_organization_that_its_reader_left_sends_nobody_back(browser: Client, alice: User) -> None:
    form = {"selection": selection_on(browser, "/members"), "email": "new@example.com", "role": "member"}
    Membership.objects.filter(user=alice, organization__name="Acme").delete()

    refused = browser.post("/members/invite", form)

    assert refused.status_code == 400 and not Invitation.objects.exists()
    assert "from another organization, in which you do not work now" in text(refused)
    assert "Switch back" not in text(refused)


def test_work_goes_to_no_project_that_the_page_did_not_have(browser: Client, project: Project) -> None:
    selection = selection_on(browser, "/projects")
    choose = {"project": project.pk, "selection": selection}
    assert browser.post("/projects/choose", choose).status_code == 302

    refused = browser.post(
        "/keys", {"selection": selection, "name": "nightly", "scopes": ["inference"], "expires": "90"}
    )

    assert refused.status_code == 400 and "You chose another project" in text(refused)
    assert browser.post("/projects/choose", choose | {"project": ""}).status_code == 302


@pytest.mark.parametrize("address", ["/playground/rows", "/playground/token"])
def test_work_of_a_project_that_is_archived_meanwhile_goes_to_no_other(
    address: str, browser: Client, organization: Organization, project: Project, alice: User
) -> None:
    browser.post("/projects/choose", {"project": project.pk})
    archive_project(organization=organization, id=project.pk, by=alice, now=db_now())
    body = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}

    refused = browser.post(address, body, content_type="application/json")

    assert refused.status_code == 400
    assert not Dataset.objects.exists() and not ApiKey.objects.exists()
    assert "is archived or hidden from you now" in refused.json()["error"]["message"]
    assert browser.post(address, body, content_type="application/json").status_code == 200


def test_a_page_of_one_person_does_nothing_for_the_next_who_signs_in(
    browser: Client, bob: User, client_for: Callable[[User], Client]
) -> None:
    token = {"selection": selection_on(browser, "/jobs"), "listing": "web:job_list", "query": "q=a", "name": "Mine"}

    refused = client_for(bob).post("/views", token)

    assert refused.status_code == 400 and "with another account" in text(refused)


@pytest.mark.parametrize("address", ["/jobs/new", "/first-job"])
def test_a_job_of_a_project_that_is_archived_meanwhile_is_refused_where_it_is_seen(
    address: str, browser: Client, organization: Organization, project: Project, alice: User
) -> None:
    browser.post("/projects/choose", {"project": project.pk})
    archive_project(organization=organization, id=project.pk, by=alice, now=db_now())
    in_background = [browser.post(f"/jobs/new/{each}", headers={"HX-Request": "true"}) for each in STEPS_BEFORE]

    refused = browser.post(address, {"once": "1", "cap_nano": "0"}, follow=True)

    assert all("is archived" not in text(each) for each in in_background)
    assert "is archived or hidden from you now" in text(refused)
    assert "is archived" not in text(browser.post(address, {"once": "1", "cap_nano": "0"}, follow=True))


def test_a_form_sent_to_an_address_for_json_is_refused(browser: Client) -> None:
    token = {"selection": selection_on(browser, "/jobs")}

    for address in ("/playground/code", "/playground/conversations", "/datasets/uploads"):
        assert browser.post(address, token).status_code == 400, address


def test_a_script_gets_the_error_of_a_page_as_json(browser: Client) -> None:
    body = {"content_type": "application/json", "headers": {"Accept": "application/json"}}
    foreign = browser.get("/jobs/ftjob-none/chart", headers=body["headers"])
    browser.logout()

    refused = browser.post("/playground/token", **body)
    page = browser.post("/playground/token", headers={"Accept": "text/html,*/*;q=0.8"})

    assert (foreign.status_code, foreign["Content-Type"]) == (404, "application/json")
    assert (refused.status_code, refused.json()["error"]["code"]) == (401, "signed_out")
    assert "Sign in in another tab" in refused.json()["error"]["message"]
    assert page.status_code == 302


def test_a_script_with_a_stale_token_gets_an_error_that_it_can_show(alice: User) -> None:
    strict = Client(enforce_csrf_checks=True)
    strict.force_login(alice)

    refused = strict.post("/playground/token", headers={"Accept": "application/json", "X-CSRFToken": "a" * 32})

    assert refused.status_code == 403
    assert "reload the page" in refused.json()["error"]["message"]
