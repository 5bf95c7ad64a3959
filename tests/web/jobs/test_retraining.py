"""The pages of retraining plans: what each does, what came of it, its price, and who may make, change and start it."""

import re

import pytest
from django.http import QueryDict

from apps.billing.models import Hold
from apps.datasets.models import Dataset
from apps.finetuning.jobs.retraining.schedules import Schedule
from apps.finetuning.lifecycle import Cadence
from apps.finetuning.models import FineTuningJob, Retraining, RetrainingPlan
from apps.interfaces.web.evals.criteria_forms import criteria_in
from apps.serving.models import Alias
from tests.factories.retraining import DATASET, HELD_OUT, REGRESSION, make_plan, make_production
from tests.support.pages import text

NEW = "/jobs/retraining/new"
CRITERION = {
    "criterion-0-kind": "string_check", "criterion-0-name": "exact", "criterion-0-operation": "eq",
    "criterion-0-input": "{{sample.output_text}}", "criterion-0-reference": "{{item.reference}}",
}  # fmt: skip


@pytest.fixture
def job(floor, key, claim) -> FineTuningJob:
    return make_production(floor, key, claim)


@pytest.fixture
def plan(job, key) -> RetrainingPlan:
    return make_plan(job, key)


def form(job: FineTuningJob, **changes: str) -> dict[str, str]:
    """Return what the form sends."""
    ids = dict(Dataset.objects.values_list("name", "pk"))
    sent = {
        "name": "support, weekly", "source_job": job.pk, "dataset": ids[DATASET], "held_out": ids[HELD_OUT],
        "alias": Alias.objects.get().pk, "schedule": "week-1", "hour_utc": "3", "min_gain_points": "1",
        "min_new_rows": "", "regression": "", "max_loss_points": "", "max_usd": "20", **CRITERION,
    }  # fmt: skip
    return sent | {name: ids.get(value, value) for name, value in changes.items()}


def confirmation(page: str) -> dict[str, str]:
    """Return what a page with a price lets its reader confirm."""
    found = re.search(r'name="confirmed" value="(\w+)"', page)
    assert found is not None, page
    return {"confirmed": found[1]}


@pytest.mark.slow
def test_a_plan_says_when_it_begins_what_it_costs_and_what_came_of_it(plan, job, key, client_for, vera, charlie, rival):
    shares = {
        "rows": 200, "new_passed": 170, "old_passed": 150, "only_new": 30, "only_old": 10,
        "difference": {"value": 0.1, "low": 0.04, "high": 0.16},
    }  # fmt: skip
    for each in (plan, make_plan(job, key, name="nightly")):
        Retraining.objects.create(
            organization=plan.organization, plan=each, trigger="growth", trigger_key="1", max_nano=1, created_by="key",
            held_out_result=shares,
        )  # fmt: skip

    page = text(client_for(vera).get("/jobs/retraining"))

    for words in ("When the dataset has 4 more rows", "$20.00", "support-held-out", "New rows", "Waiting"):
        assert words in page
    assert "85.0 %, production 75.0 %" in page and "10.0 points (4.0 to 16.0)" in page
    assert "Start now" not in page and "Stop" not in page  # a viewer changes nothing
    assert len(set(re.findall(r'data-csv="([^"]+)"', page))) == 2, "each plan's table is a file of its own"
    assert plan.name not in text(client_for(charlie).get("/jobs/retraining"))
    assert client_for(None).get("/jobs/retraining").status_code == 302


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_plan_is_made_from_a_finished_job_after_its_price_was_shown(job, client_for, bob, vera):
    browser, holds = client_for(bob), Hold.objects.count()
    address = f"{NEW}?job={job.pk}"
    first = text(browser.get(address))
    assert f'href="{address}"' in text(browser.get(f"/jobs/{job.pk}"))
    assert address not in text(client_for(vera).get(f"/jobs/{job.pk}"))
    for chosen in (job.pk, job.training_file.dataset_id, Alias.objects.get().pk, "week-1"):
        assert f'value="{chosen}" selected' in first

    shown, part = browser.post(NEW, form(job)), browser.post(NEW, form(job), headers={"HX-Request": "true"})
    page = text(shown)

    assert shown.status_code == 200 and "Training now, at most" in page and "would not start now" not in page
    assert "at most $20.00 each" in page and "$100.00" in page, "five Mondays in a month"
    assert "at most $20.00 each" in text(part) and "<h1" not in text(part)
    other = text(browser.post(NEW, form(job, max_usd="30") | confirmation(page)))
    assert "at most $30.00 each" in other, "the price of these values was not shown"
    assert not RetrainingPlan.objects.exists()
    assert (FineTuningJob.objects.count(), Hold.objects.count()) == (1, holds), "a price keeps nothing"
    assert browser.post(NEW, form(job) | confirmation(page))["Location"] == "/jobs/retraining"
    made = RetrainingPlan.objects.get()
    assert (made.acts_as, made.cadence, made.cadence_value, made.hour_utc) == (bob.pk, "week", 1, 3)
    assert (made.max_nano, made.min_gain_points, made.alias) == (20 * 10**9, 1.0, Alias.objects.get())
    assert (made.dataset.name, made.held_out.name, made.regression) == (DATASET, HELD_OUT, None)
    assert made.testing_criteria[0]["reference"] == "{{item.reference}}"
    again = browser.post(NEW, form(job) | confirmation(page))
    assert again.status_code == 422 and "Another retraining plan has this name" in text(again)


@pytest.mark.slow
def test_what_is_wrong_stands_at_its_field_and_nothing_is_kept(job, client_for, bob):
    browser = client_for(bob)
    wrong = [
        ({"schedule": ""}, "schedule", "Choose a schedule, a number of new rows, or both."),
        ({"min_new_rows": "0"}, "min_new_rows", "greater than or equal to 1"),
        ({"held_out": DATASET}, "held_out", "a dataset other than the training dataset"),
        ({"regression": REGRESSION}, "max_loss_points", "Give both"),
        ({"max_loss_points": "5"}, "regression", "Give both"),
        ({"max_usd": "0"}, "max_usd", "greater than or equal to 0.01"),
        ({"max_usd": "0.01"}, "max_usd", "The training alone may cost $"),
        ({"alias": ""}, "alias", "This field is required"),
        ({"source_job": "ftjob-unknown"}, "source_job", "Select a valid choice"),
        ({"name": "n" * 81}, "name", "at most 80"),
    ]
    for changes, field, words in wrong:
        answer = browser.post(NEW, form(job, **changes))
        page = text(answer)
        part = text(browser.post(NEW, form(job, **changes), headers={"HX-Request": "true"}))
        assert answer.status_code == 422 and words in page.partition(f'id="id_{field}_error"')[2][:300], (field, page)
        assert words in part and "confirmed" not in page + part
    assert not RetrainingPlan.objects.exists()


@pytest.mark.slow
def test_a_plan_grades_by_the_criteria_of_its_form(job, client_for, bob):
    browser, model = client_for(bob), job.base_model.name
    scored = {
        "criterion-1-kind": "score_model", "criterion-1-name": "kind", "criterion-1-model": model,
        "criterion-1-system": "Be fair.", "criterion-1-question": "{{sample.output_text}}", "criterion-1-lowest": "0",
        "criterion-1-highest": "1", "criterion-1-pass_threshold": "0.5",
    }  # fmt: skip
    shaped = text(browser.post(NEW, form(job) | {"add": "1"}, headers={"HX-Request": "true"}))
    assert "criterion-1-kind" in shaped and "A model that compares" not in shaped, "each model is graded by itself"
    wrong = browser.post(NEW, form(job, **(scored | {"criterion-1-model": "gone"})))
    assert wrong.status_code == 422 and "does not exist" in text(wrong).partition('id="id_criterion-1-model_error"')[2]

    page = text(browser.post(NEW, form(job, **scored)))
    browser.post(NEW, form(job, **scored) | confirmation(page))

    made = RetrainingPlan.objects.get()
    assert [each["type"] for each in made.testing_criteria] == ["string_check", "score_model"]
    shown = text(browser.get(f"/jobs/retraining/{made.pk}"))
    assert "Be fair." in shown and 'value="score_model" selected' in shown


@pytest.mark.slow
def test_the_address_fills_in_a_new_plan_and_replaces_values_of_a_kept_one(job, key, client_for, bob):
    browser = client_for(bob)
    second = {"criterion-1-kind": "text_similarity", "criterion-1-name": "near", "criterion-1-reference": "a&b"}
    given = form(job, regression=REGRESSION, max_loss_points="2.5", schedule="days-45", hour_utc="17") | second

    page = text(browser.get(NEW, given))

    for name in ("source_job", "dataset", "held_out", "regression", "alias", "schedule", "hour_utc"):
        assert f'value="{given[name]}" selected' in page, name
    for words in ('value="support, weekly"', 'value="2.5"', 'value="20"', 'value="near"', 'value="a&b"'):
        assert words in page, words
    assert 'value="text_similarity" selected' in page and "criterion-2-kind" not in page
    plan = make_plan(job, key, schedule=Schedule(Cadence.WEEK, 1, 5))
    url = f"/jobs/retraining/{plan.pk}"
    page = text(browser.get(url, {"name": "Daily", "schedule": "", "hour_utc": "99"} | second))
    assert 'value="Daily"' in page and 'value="week-1" selected' not in page, "it was emptied"
    assert 'value="4"' in page and 'value="text_similarity" selected' in page, "the address does not name these rows"
    left_out = {f"criterion-0-{name}": value for name, value in {"kind": "string_check", "name": "exact"}.items()}
    kept = text(browser.get(url, left_out))
    other = text(browser.get(url, left_out | {"criterion-0-kind": "text_similarity", "criterion-0-name": "x"}))
    assert 'value="{{item.reference}}"' in kept and 'value="eq" selected' in kept
    assert 'value="fuzzy_match" selected' not in other and "criterion-0-operation" not in other
    unchanged = RetrainingPlan.objects.get()
    assert (unchanged.name, unchanged.cadence_value, unchanged.testing_criteria) == (
        plan.name, plan.cadence_value, plan.testing_criteria,
    )  # fmt: skip


def test_a_text_left_out_of_an_address_is_that_of_the_criterion_with_its_name():
    removed, kept = {"kind": "json", "definition": "a"}, {"kind": "json", "definition": "b"}
    exact = {"kind": "string_check", "name": "exact", "reference": "{{item.reference}}"}
    address = QueryDict("criterion-0-kind=json&criterion-1-kind=string_check&criterion-1-name=exact")

    assert criteria_in(address, otherwise=[removed, kept, exact]) == [{"kind": "json"}, exact]
    assert criteria_in(address, otherwise=[exact, exact])[1] == {"kind": "string_check", "name": "exact"}


@pytest.mark.slow
def test_a_plan_is_changed_and_deleted_and_keeps_what_the_form_does_not_ask(plan, client_for, bob):
    RetrainingPlan.objects.update(cadence="days", cadence_value=45, next_due_at=plan.created_at, hour_utc=5)
    browser, url = client_for(bob), f"/jobs/retraining/{plan.pk}"
    before = text(browser.get(url))
    assert 'value="days-45" selected' in before and "Every 45 days" in before and 'value="20"' in before

    sent = form(plan.source_job, name="support, growing", schedule="", min_new_rows="500")
    page = text(browser.post(url, sent))
    browser.post(url, sent | confirmation(page))

    changed = RetrainingPlan.objects.get()
    assert (changed.name, changed.cadence, changed.min_new_rows, changed.acts_as) == (sent["name"], "", 500, bob.pk)
    assert changed.testing_criteria == plan.testing_criteria and "in a month" not in page
    Retraining.objects.create(
        organization=plan.organization, plan=plan, trigger="growth", trigger_key="1", max_nano=1, created_by="key"
    )
    chosen = {"plan": plan.pk}
    assert "Delete support, growing?" in text(browser.get("/jobs/retraining/delete", chosen))
    assert browser.post("/jobs/retraining/delete", chosen | {"confirm": "no"}).status_code == 422
    browser.post("/jobs/retraining/delete", chosen | {"confirm": "support, growing"})
    assert not RetrainingPlan.objects.exists() and FineTuningJob.objects.count() == 1


@pytest.mark.slow
def test_others_neither_see_nor_change_plans_by_the_form(plan, client_for, alice, vera, charlie, rival):
    url, sent = f"/jobs/retraining/{plan.pk}", form(plan.source_job)
    chosen = {"plan": plan.pk, "confirm": plan.name}
    for person, own, foreign in ((vera, 403, 403), (charlie, 422, 404), (None, 302, 302)):
        browser = client_for(person)
        assert browser.post(NEW, sent).status_code == own
        assert [browser.get(url).status_code, browser.post(url, sent).status_code] == [foreign, foreign]
        assert browser.post("/jobs/retraining/delete", chosen).status_code == foreign
        assert browser.get(f"{NEW}?job={plan.source_job_id}").status_code == foreign
    assert plan.source_job_id not in text(client_for(charlie).get(NEW))
    assert client_for(alice).get(url).status_code == 200
    unchanged = RetrainingPlan.objects.get()
    assert (unchanged.name, unchanged.acts_as) == (plan.name, plan.acts_as)
