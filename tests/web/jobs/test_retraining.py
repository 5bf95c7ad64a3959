"""The page of retraining plans: what each does, what came of it, and who may start and stop it."""

import pytest

from apps.finetuning.models import Retraining, RetrainingPlan
from tests.factories.retraining import make_plan, make_production
from tests.support.pages import text


@pytest.fixture
def plan(floor, key, claim) -> RetrainingPlan:
    return make_plan(make_production(floor, key, claim), key)


def test_a_plan_says_when_it_begins_what_it_costs_and_what_came_of_it(plan, client_for, vera, charlie, rival):
    shares = {
        "rows": 200, "new_passed": 170, "old_passed": 150, "only_new": 30, "only_old": 10,
        "difference": {"value": 0.1, "low": 0.04, "high": 0.16},
    }  # fmt: skip
    Retraining.objects.create(
        organization=plan.organization, plan=plan, trigger="growth", trigger_key="1", max_nano=1, created_by="key",
        held_out_result=shares,
    )  # fmt: skip

    page = text(client_for(vera).get("/jobs/retraining"))

    for words in ("When the dataset has 4 more rows", "$20.00", "support-held-out", "New rows", "Waiting"):
        assert words in page
    assert "85.0 %, production 75.0 %" in page and "10.0 points (4.0 to 16.0)" in page
    assert "Start now" not in page and "Stop" not in page  # a viewer changes nothing
    assert plan.name not in text(client_for(charlie).get("/jobs/retraining"))
    assert client_for(None).get("/jobs/retraining").status_code == 302


def test_members_start_stop_and_resume_a_plan(plan, client_for, bob, vera, charlie, rival):
    url = f"/jobs/retraining/{plan.pk}"
    for person, status in ((vera, 403), (charlie, 404)):
        assert client_for(person).post(f"{url}/start").status_code == status
        assert client_for(person).post(f"{url}/switch").status_code == status
    assert not Retraining.objects.exists()
    browser = client_for(bob)

    started = text(browser.post(f"{url}/start", follow=True))
    again = text(browser.post(f"{url}/start", follow=True))

    assert Retraining.objects.get().created_by == bob.pk
    assert "starts within a minute" in started and "Start now" not in started
    assert "has not ended" in again
    for enabled in ("0", "1"):
        browser.post(f"{url}/switch", {"enabled": enabled})
        plan.refresh_from_db()
        assert (plan.is_enabled, plan.acts_as) == (enabled == "1", bob.pk)
