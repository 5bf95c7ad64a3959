"""An operator closes an organization and opens it again."""

import pytest

from apps.accounts.models import Organization
from apps.accounts.queries import find_key
from apps.core.database.clock import db_now
from apps.core.messages.outbox import deliver_due
from apps.core.models import AuditEntry
from apps.finetuning.runs.queue.queue_order import queue_order


def move(browser, organization, verb, reason="Abuse of the playground"):
    body = {"reason": reason, "confirm": organization.name}
    return browser.post(f"/staff/organizations/{organization.pk}/{verb}", body, follow=True)


@pytest.mark.slow
def test_everything_of_it_is_refused_until_it_is_reinstated(
    organization, alice, key, olga, client_for, api_client, floor
):
    console, browser = client_for(olga), client_for(alice)
    job = floor.job()

    def is_open() -> list[bool]:
        runs = queue_order(pool=floor.pool, now=db_now(), limit=1)
        return [
            browser.get("/members").status_code == 200,
            browser.post("/playground/token").status_code == 200,
            find_key(secret=key.secret) is not None,
            api_client(key).get("/api/v1/me").status_code == 200,
            [run.job_id for run in runs] == [job.pk],
        ]

    assert is_open() == [True] * 5
    move(console, organization, "suspend")
    assert is_open() == [False] * 5
    assert "is suspended" in browser.get("/members").content.decode()
    move(console, organization, "reinstate", "Cleared up")
    assert is_open() == [True] * 5

    for place in (None, organization):
        rows = AuditEntry.objects.filter(
            organization=place, action__in=["organization.suspend", "organization.reinstate"]
        )
        found = list(rows.order_by("id").values_list("actor", "target", "details__reason"))
        assert found == [
            (olga.pk, organization.pk, "Abuse of the playground"), (olga.pk, organization.pk, "Cleared up"),
        ]  # fmt: skip


@pytest.mark.slow
def test_its_running_jobs_are_asked_to_pause(organization, olga, client_for, floor, claim):
    job = floor.job()
    claim()

    move(client_for(olga), organization, "suspend")
    deliver_due()

    job.refresh_from_db()
    assert job.status == "pausing"


@pytest.mark.parametrize(
    ("verb", "reason", "says"), [("suspend", "  ", "reason is required"), ("reinstate", "x", "is not suspended")]
)
def test_what_makes_no_sense_is_refused_with_a_sentence(organization, olga, client_for, verb, reason, says):
    page = move(client_for(olga), organization, verb, reason)

    assert says in page.content.decode()
    assert Organization.objects.get(pk=organization.pk).suspended_at is None
    assert not AuditEntry.objects.filter(action__startswith="organization.s").exists()


def test_its_name_is_typed_and_the_page_that_asked_shows_the_answer(organization, olga, client_for):
    console, page, listed = client_for(olga), f"/staff/organizations/{organization.pk}", "/staff/organizations?q=acme"

    def send(verb: str, confirm: str, sender: str) -> str:
        body = {"reason": "Abuse", "confirm": confirm}
        headers = {"Referer": f"http://testserver{sender}"}
        return console.post(f"{page}/{verb}", body, headers=headers).headers["Location"]

    refused = send("suspend", "another", page)
    assert f"Type {organization.name} to confirm." in console.get(page).content.decode()
    assert Organization.objects.get(pk=organization.pk).suspended_at is None

    assert f'data-typed="{organization.name}"' in console.get(page).content.decode()
    places = [refused, send("suspend", organization.name, listed), send("reinstate", "", page)]
    assert places == [f"http://testserver{place}" for place in (page, listed, page)]


def test_suspending_twice_is_audited_once(organization, olga, client_for):
    console = client_for(olga)
    move(console, organization, "suspend")

    assert "suspended already" in move(console, organization, "suspend").content.decode()
    assert AuditEntry.objects.filter(action="organization.suspend", organization=organization).count() == 1
