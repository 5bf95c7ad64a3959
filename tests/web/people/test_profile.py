"""A person's own account: name, theme and mails."""

import zoneinfo

from django.utils import timezone

from apps.accounts.models import Organization
from tests.support.pages import text


def test_a_person_changes_their_name_and_turns_mails_off(organization, alice, client_for):
    client = client_for(alice)
    assert "checked" in text(client.get("/account")).partition("wants_job_mail")[2][:200]

    client.post("/account", {"name": "  Alice   Adams "})

    alice.refresh_from_db()
    assert (alice.name, alice.wants_job_mail, alice.wants_invoice_mail) == ("Alice Adams", False, False)
    assert "Alice Adams" in text(client.get("/account"))


def test_times_are_shown_in_the_zone_that_a_person_chose(organization, alice, client_for):
    client = client_for(alice)
    made = Organization.objects.get(pk=organization.pk).created_at
    assert "data-time" in text(client.get("/members"))

    client.post("/account", {"time_zone": "Asia/Kathmandu"})
    page = text(client.get("/organization/audit"))

    local = made.astimezone(zoneinfo.ZoneInfo("Asia/Kathmandu"))
    assert f"{local:%-d %b %Y, %H:%M} +0545" in page and "data-time" not in page
    assert f'title="{made:%Y-%m-%d %H:%M}' in page and "All times in UTC" not in page
    assert timezone.get_current_timezone_name() == "UTC"


def test_a_zone_that_does_not_exist_is_refused_at_its_field(organization, alice, client_for):
    response = client_for(alice).post("/account", {"time_zone": "Mars/Olympus"})

    assert response.status_code == 422 and 'id="id_time_zone_error"' in text(response)


def test_the_three_themes_are_offered_and_the_chosen_one_is_marked(organization, alice, client_for):
    client = client_for(alice)

    client.post("/theme", {"theme": "dark"})
    dark = text(client.get("/account"))
    client.post("/theme", {"theme": ""})
    system = text(client.get("/account"))

    assert 'data-theme="dark"' in dark and "data-theme=" not in system.partition("<body")[0]
    assert all(label in dark for label in ("System", "Light", "Dark"))


def test_a_person_without_an_organization_has_an_account_page(charlie, client_for):
    assert client_for(charlie).get("/account").status_code == 200


def test_a_name_that_is_too_long_is_said_at_its_field(organization, alice, client_for):
    response = client_for(alice).post("/account", {"name": "x" * 121})

    assert response.status_code == 422 and 'id="id_name_error"' in text(response)
