"""The pages of evals: the list with its latest runs, and the scores of each run by criterion."""

import pytest

from apps.accounts.models import default_project_id
from apps.core.database.clock import db_now
from apps.serving.evals.lifecycle import EvalRunStatus
from apps.serving.evals.models import Eval, EvalRun
from tests.support.pages import csv_rows, text


@pytest.fixture
def evaluated(organization) -> Eval:
    """An eval of two criteria with a run that has ended and a later one that goes on."""
    made = Eval.objects.create(
        organization=organization, project_id=default_project_id(organization), name="sums",
        data_source_config={"type": "logs"}, created_by="system",
        testing_criteria=[{"type": "string_check", "name": "exact"}, {"type": "score_model", "name": "polite <b>"}],
    )  # fmt: skip
    run = EvalRun.objects.create(
        organization=organization, evaluated=made, name="first", data_source={}, testing_criteria=[],
        model_name="older-model", passed=5, failed=15, errored=2, total=22, created_by="system",
        criteria_results=[
            {"testing_criteria": "exact", "passed": 5, "failed": 15},
            {"testing_criteria": "polite <b>", "passed": 19, "failed": 1},
        ],
    )  # fmt: skip
    for status in (EvalRunStatus.IN_PROGRESS, EvalRunStatus.COMPLETED):
        EvalRun.objects.filter(pk=run.pk).update(status=status)
    EvalRun.objects.create(
        organization=organization, evaluated=made, name="second", data_source={}, testing_criteria=[],
        model_name="newer-model", total=22, created_by="system", created_at=db_now(),
    )  # fmt: skip
    return made


def test_an_eval_shows_the_scores_of_each_run_by_criterion(evaluated, client_for, vera, charlie, rival):
    url = f"/evals/{evaluated.pk}"
    browser = client_for(vera)

    raw = browser.get(url)
    page, part = text(raw), text(browser.get(url, headers={"HX-Request": "true"}))

    for words in ("string_check", "25.0%", "5 of 22", "2 errors", "exact:", "polite <b>:", "95.0%", "Queued"):
        assert words in page, words
    assert "polite <b>" not in raw.content.decode()
    polls = f'id="eval-runs" hx-get="{url}"'
    assert polls in page and polls in part and "<h1" not in part
    EvalRun.objects.filter(name="second").update(status=EvalRunStatus.CANCELED)
    ended = text(browser.get(url))
    assert polls not in ended and "Cancelled" in ended
    assert client_for(charlie).get(url).status_code == 404
    assert client_for(None).get(url).status_code == 302


def test_the_list_shows_the_latest_run_and_who_made_the_eval(evaluated, organization, client_for, vera, charlie, rival):
    Eval.objects.create(
        organization=organization, project_id=default_project_id(organization), name="of a plan",
        data_source_config={"type": "logs"}, created_by="system", testing_criteria=[],
        metadata={"retraining_plan": "retplan_1"},
    )  # fmt: skip
    browser = client_for(vera)

    page = text(browser.get("/evals"))

    assert "sums" in page and "of a plan" in page and "exact, polite <b>" in page
    assert "newer-model" in page and "older-model" not in page, "the newest run alone"
    assert "sums" not in text(browser.get("/evals?of=plans")) and "sums" in text(browser.get("/evals?of=members"))
    assert "sums" in text(browser.get("/evals?q=sum")) and "sums" not in text(browser.get("/evals?q=nothing"))
    rows = csv_rows(browser.get("/evals/export?of=members"))
    assert [(row["name"], row["criteria"]) for row in rows] == [("sums", "exact, polite <b>")]
    assert "sums" not in text(client_for(charlie).get("/evals"))
