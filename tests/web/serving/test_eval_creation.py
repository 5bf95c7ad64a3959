"""Evals made in the dashboard: their price first, errors at their field, the run live, its end, another model."""

import re

import pytest
from django.db import transaction

from apps.accounts.members.projects import archive_project, create_project
from apps.billing.queries import get_balance
from apps.catalog.models import BaseModel, PriceRule
from apps.catalog.operations import set_price
from apps.core.database.clock import db_now
from apps.core.ids import new_ulid
from apps.core.templatetags.ui import usd
from apps.datasets.models import DatasetVersion
from apps.interfaces.web.evals import runs
from apps.serving.evals import progress
from apps.serving.evals.lifecycle import EvalRunStatus
from apps.serving.evals.models import Eval, EvalItem, EvalRun
from tests.factories.datasets import jsonl, make_ready_version
from tests.factories.money import give_credit, place_hold
from tests.factories.serving import BASE_MODEL, make_served_model
from tests.support.pages import text

NEW = "/evals/new"
HTMX = {"HX-Request": "true"}
OTHER = "other"


@pytest.fixture
def rows(organization) -> DatasetVersion:
    """Twelve rows, two models that are served, and credit."""
    make_served_model(BASE_MODEL, "unix:///nowhere")
    make_served_model(OTHER, "unix:///nowhere")
    give_credit(organization)
    return make_ready_version(organization, jsonl(12), dataset_name="held")


def criterion(number: int, kind: str, **fields: str) -> dict[str, str]:
    return {f"criterion-{number}-{name}": value for name, value in {"kind": kind, "name": kind, **fields}.items()}


EXACT = criterion(
    0, "string_check", operation="eq", input="{{sample.output_text}}", reference="{{item.reference}}"
)  # fmt: skip
SCORED = criterion(
    1, "score_model", model=BASE_MODEL, system="Be\nfair.", question="{{sample.output_text}}", lowest="0", highest="10",
    pass_threshold="7",
)  # fmt: skip
HAS_NUL = '{"type": "string_check", "name": "a", "input": "\\u0000", "reference": "b", "operation": "eq"}'
PAIRWISE = criterion(0, "pairwise_model", model=BASE_MODEL, baseline_model=OTHER, instructions="")


def form(rows: DatasetVersion, *criteria: dict[str, str], **changes: str) -> dict[str, str]:
    sent = {"name": "cards", "model": BASE_MODEL, "other_model": "", "dataset": rows.pk, "temperature": "0"}
    for each in criteria or (EXACT,):
        sent |= each
    return sent | changes


def confirmed(page: str) -> dict[str, str]:
    found = re.search(r'name="confirmed" value="([\w-]+)"', page)
    assert found is not None, page
    return {"confirmed": found[1]}


@pytest.mark.slow
def test_an_eval_of_two_models_starts_after_its_price_was_shown(rows, client_for, bob, vera, charlie, rival):
    for person, status in ((vera, 403), (charlie, 200), (None, 302)):
        assert client_for(person).get(NEW).status_code == status
    browser, sent = client_for(bob), form(rows, EXACT, SCORED, other_model=OTHER)
    first = text(browser.get(NEW))
    assert "held, version 1: 12 rows" in first and NEW in text(browser.get("/evals"))
    assert NEW not in text(client_for(vera).get("/evals"))

    page, part = text(browser.post(NEW, sent)), text(browser.post(NEW, sent, headers=HTMX))

    assert "Start 2 runs" in page and "Start 2 runs" in part and "<h1" not in part
    assert not Eval.objects.exists(), "a price keeps nothing"
    dearer = text(browser.post(NEW, sent | {"max_completion_tokens": "4"} | confirmed(page)))
    assert "Start 2 runs" in dearer and not Eval.objects.exists(), "the price of these values was not shown"
    made = browser.post(NEW, sent | {"criterion-1-system": "Be\r\nfair."} | confirmed(page))  # as a browser sends it
    evaluated = Eval.objects.get()
    assert made["Location"] == f"/evals/{evaluated.pk}"
    assert [each["type"] for each in evaluated.testing_criteria] == ["string_check", "score_model"]
    started = list(evaluated.runs.order_by("pk"))
    assert [run.model_name for run in started] == [BASE_MODEL, OTHER]
    for run in started:
        progress.prepare(run.pk)
        run.refresh_from_db()
        assert (run.status, run.total, run.created_by) == (EvalRunStatus.IN_PROGRESS, 12, bob.pk)
        assert run.highest_cost_nano == run.cost_limit_nano, "the price that was shown is the run's own"
        assert usd(run.highest_cost_nano) in page
    assert "2 runs start." in text(browser.get("/evals"))
    assert browser.post(NEW, sent | confirmed(page))["Location"] == made["Location"], "a page that is sent twice"
    assert Eval.objects.count() == 1 and EvalRun.objects.count() == 2
    other = text(browser.post(NEW, sent))
    assert confirmed(other) != confirmed(page), "the same values can be started again, after their price was shown"
    forged = {"confirmed": re.sub(r"^\w+", new_ulid(), confirmed(page)["confirmed"])}
    assert "Start 2 runs" in text(browser.post(NEW, sent | forged)) and Eval.objects.count() == 1


@pytest.mark.slow
def test_an_eval_of_a_project_that_is_archived_meanwhile_goes_to_no_other(rows, client_for, alice, organization):
    project = create_project(organization=organization, name="Bots", is_private=False, by=alice, now=db_now())
    browser, sent = client_for(alice), form(rows)
    browser.post("/projects/choose", {"project": project.pk})
    price = confirmed(text(browser.post(NEW, sent)))
    archive_project(organization=organization, id=project.pk, by=alice, now=db_now())

    refused = text(browser.post(NEW, sent | price))

    assert "is archived or hidden from you now" in refused and 'value="cards"' in refused
    assert not Eval.objects.exists()


@pytest.mark.slow
def test_what_is_wrong_stands_at_its_field(rows, client_for, bob, organization):
    browser = client_for(bob)
    BaseModel.objects.create(name="listed", display_name="listed", parameter_count=1, context_length=1)
    asked = criterion(0, "label_model", model=BASE_MODEL, question="x", labels="good, bad", passing_labels="fine")
    many = make_ready_version(organization, jsonl(1_001), dataset_name="many")
    wrong = [
        ((EXACT,), {"name": ""}, "name", "This field is required"),
        ((EXACT,), {"model": "listed"}, "model", "answers no requests here"),
        ((EXACT,), {"other_model": BASE_MODEL}, "other_model", "a model other than the first"),
        ((EXACT,), {"other_model": "gone"}, "other_model", "does not exist"),
        ((EXACT,), {"dataset": "file-gone"}, "dataset", "Select a valid choice"),
        ((EXACT,), {"dataset": many.pk}, "dataset", "at most 1,000 items"),
        ((EXACT,), {"temperature": "3"}, "temperature", "less than or equal to 2"),
        ((EXACT,), {"criterion-0-name": ""}, "criterion-0-name", "This field is required"),
        ((asked,), {}, "criterion-0-passing_labels", "some of the labels"),
        ((EXACT, SCORED), {"criterion-1-model": "gone"}, "criterion-1-model", "does not exist"),
        ((EXACT, SCORED), {"criterion-1-highest": "0"}, "criterion-1-highest", "a higher one"),
        ((PAIRWISE,), {"model": OTHER}, "criterion-0-baseline_model", "compared with itself"),
        ((criterion(0, "json", definition='{"type": "python"}'),), {}, "criterion-0-definition", "nothing here runs"),
        ((criterion(0, "json", definition=HAS_NUL),), {}, "criterion-0-definition", "Null characters"),
        ((criterion(0, "json", definition="{"),), {}, "criterion-0-definition", "This is no criterion"),
        ((criterion(0, "unknown"),), {}, "criterion-0-kind", "Select a valid choice"),
    ]
    for criteria, changes, field, words in wrong:
        sent = form(rows, *criteria, **changes)
        answer, part = browser.post(NEW, sent), text(browser.post(NEW, sent, headers=HTMX))
        page = text(answer)
        assert answer.status_code == 422 and words in page.partition(f'id="id_{field}_error"')[2][:400], (field, page)
        assert words in part and "confirmed" not in page + part
    assert not Eval.objects.exists()


@pytest.mark.slow
def test_rows_that_cannot_be_asked_and_too_little_credit_are_said_before_the_start(
    rows, client_for, bob, rival, organization
):
    browser = client_for(bob)
    page = text(browser.post(NEW, form(rows, question="{{item.nothing}}")))
    assert "12 rows cannot be asked: There is no item.nothing." in page
    pairwise = text(browser.post(NEW, form(rows, PAIRWISE)))
    assert "Start run" in pairwise and ">48<" in pairwise, "two answers and two comparisons of each row"
    shown = text(browser.post(NEW, form(rows)))
    with transaction.atomic():
        place_hold(organization, get_balance(organization=organization).available_nano)
    late = text(browser.post(NEW, form(rows) | confirmed(shown)))
    assert "Your credit is less than the maximum" in late and not Eval.objects.exists(), "spent since the price"
    PriceRule.objects.filter(sku__startswith="inference:").update(effective_to=db_now())
    for way in ("input", "output"):
        price = 10**18 if way == "input" else 1
        set_price(sku=f"inference:{way}:{BASE_MODEL}", unit="tokens", price_nano=price, per=10**6, by="u", now=db_now())
    poor = text(browser.post(NEW, form(rows)))
    assert "Your credit is less than the maximum" in poor and "confirmed" not in poor


@pytest.mark.slow
def test_criteria_are_added_changed_and_removed_with_what_was_filled_in(rows, client_for, bob):
    browser = client_for(bob)
    sent = form(rows, EXACT, SCORED, **{"criterion-0-name": ""})

    added = text(browser.post(NEW, sent | {"add": "1"}, headers=HTMX))
    shaped = text(browser.post(NEW, sent | {"shape": "1", "criterion-0-kind": "text_similarity"}, headers=HTMX))
    removed = text(browser.post(NEW, sent | {"remove": "0"}))

    assert "criterion-2-kind" in added and "Be\nfair." in added
    assert "This field is required" not in added and "<h1" not in added, "nothing is checked yet"
    assert "criterion-0-evaluation_metric" in shaped and "criterion-0-operation" not in shaped
    assert "criterion-1-kind" not in removed and "Be\nfair." in removed and 'value="cards"' in removed
    full = {f"criterion-{number}-kind": "string_check" for number in range(11)}
    assert "Add a criterion" not in text(browser.post(NEW, full | {"add": "1"}, headers=HTMX))


@pytest.mark.slow
def test_a_run_is_followed_canceled_and_repeated_on_another_model(
    rows, client_for, bob, vera, charlie, rival, monkeypatch
):
    browser = client_for(bob)
    browser.post(NEW, form(rows) | confirmed(text(browser.post(NEW, form(rows)))))
    run = EvalRun.objects.get()
    progress.prepare(run.pk)
    url = f"/evals/{run.evaluated_id}/runs/{run.pk}"

    live, part = text(browser.get(url)), text(client_for(vera).get(url, headers=HTMX))

    assert "every 3s" in live and "Preparing the requests" in live and f"/evals/cancel?run={run.pk}" in live
    assert "every 3s" in part and "<html" not in part and "/evals/cancel" not in part
    assert client_for(charlie).get(url).status_code == 404
    cancel = {"run": run.pk, "confirm": "cards"}
    for person, status in ((vera, 403), (charlie, 404), (None, 302)):
        assert client_for(person).post("/evals/cancel", cancel).status_code == status
    assert "no more requests are sent" in text(browser.get("/evals/cancel", {"run": run.pk}))
    assert browser.post("/evals/cancel", cancel)["Location"] == url
    run.refresh_from_db()
    assert run.status == EvalRunStatus.CANCELED and "every 3s" not in text(browser.get(url))

    again = f"/evals/{run.evaluated_id}/runs/new?run={run.pk}"
    assert again in text(browser.get(url)) and "with another model, on the same rows" in text(browser.get(again))
    for person, status in ((vera, 403), (charlie, 404)):
        assert client_for(person).get(again).status_code == status
    price = text(browser.post(again, {"model": OTHER}))
    assert "Start run" in price and browser.post(again, {"model": OTHER} | confirmed(price)).status_code == 302
    second = EvalRun.objects.exclude(pk=run.pk).get()
    assert second.data_source == run.data_source | {"model": OTHER}
    kept = text(browser.get(f"{again}&other_model={OTHER}"))
    assert f'value="{OTHER}" selected' in kept and 'hx-trigger="input' in kept, "one model is missing"
    whole = text(browser.get(f"/evals/{run.evaluated_id}/runs/new"))
    assert 'id="id_dataset"' in whole and 'id="id_name"' not in whole

    monkeypatch.setattr(runs, "_effect_of", lambda row: EvalRun.objects.filter(pk=row.pk).delete() and "")
    refused = browser.post("/evals/cancel", cancel | {"run": second.pk})
    assert refused["Location"] == f"/evals/cancel?run={second.pk}", "another person deletes it at the same moment"


@pytest.mark.slow
def test_the_address_fills_in_the_form_of_an_eval_and_its_criteria(rows, client_for, bob):
    browser = client_for(bob)
    given = form(rows, EXACT | {"criterion-0-reference": "a&b"}, SCORED, other_model=OTHER, temperature="0.5")

    page = text(browser.get(NEW, given | {"question": "Say\nit."}))

    for chosen in (BASE_MODEL, OTHER, rows.pk, "string_check", "eq", "score_model"):
        assert f'value="{chosen}" selected' in page, chosen
    for words in ('value="cards"', 'value="0.5"', 'value="a&b"', "Say\nit.", "Be\nfair.", 'value="10"', 'value="7"'):
        assert words in page, words
    assert "criterion-2-kind" not in page and 'hx-trigger="load, input' in page, "its price is asked for at once"
    many = {name: value for number in range(50) for name, value in criterion(number, "label_model").items()}
    page = text(browser.get(NEW, many))
    assert "criterion-9-kind" in page and "criterion-10-kind" not in page and "Add a criterion" not in page
    for wrong in (
        {"criterion-0-kind": "no"},
        {"criterion-1-kind": "json"},
        {"criterion-0-name": "mine"},
        {"model": ""},
    ):
        page = text(browser.get(NEW, wrong))
        assert 'value="string_check" selected' in page and 'hx-trigger="input' in page
    assert not Eval.objects.exists()


@pytest.mark.slow
def test_a_run_that_ended_shows_its_rows_by_result_and_its_eval_is_deleted(rows, client_for, bob, vera, charlie, rival):
    browser = client_for(bob)
    browser.post(NEW, form(rows) | confirmed(text(browser.post(NEW, form(rows)))))
    run = EvalRun.objects.get()
    progress.prepare(run.pk)
    url = f"/evals/{run.evaluated_id}/runs/{run.pk}"
    EvalItem.objects.filter(number=0).update(
        status="pass", answers='{"s": {"text": "card_arrival <b>"}}',
        results='[{"name": "exact", "passed": true, "score": 1.0}]',
    )  # fmt: skip
    EvalItem.objects.filter(number=1).update(
        status="error", answers='{"s": {"text": "", "error": {"code": "x", "message": "The model slept."}}}'
    )
    EvalRun.objects.update(status=EvalRunStatus.COMPLETED)

    raw = client_for(vera).get(url)
    page = text(raw)

    for words in ("Where is card 0?", "card_arrival <b>", "exact", "The model slept.", "Where is card 1?"):
        assert words in page, words
    assert "card_arrival <b>" not in raw.content.decode()
    passed, failed = text(browser.get(f"{url}?status=pass")), text(browser.get(f"{url}?status=fail"))
    assert "card 0?" in passed and "card 1?" not in passed and "No rows here" in failed
    gone = {"eval": run.evaluated_id, "confirm": "cards"}
    for person, status in ((vera, 403), (charlie, 404), (None, 302)):
        assert client_for(person).post("/evals/delete", gone).status_code == status
    assert browser.post("/evals/delete", gone)["Location"] == "/evals"
    assert not Eval.objects.exists() and not EvalItem.objects.exists()
