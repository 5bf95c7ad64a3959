"""The forms of evals, runs and retraining plans keep their values in the address, with criteria that come and go."""

import re
from collections.abc import Callable
from urllib.parse import parse_qs, urlencode, urlsplit

import pytest
from playwright.sync_api import Page, Request, Route, expect

from apps.accounts.models import Organization, User, default_project_id
from apps.core.database.clock import db_now
from apps.datasets.models import DatasetVersion
from apps.finetuning.models import RetrainingPlan
from apps.serving.evals.models import Eval, EvalRun
from tests.factories.datasets import jsonl, make_ready_version
from tests.factories.finetuning import TrainingSetup
from tests.factories.money import USD, give_credit
from tests.factories.serving import BASE_MODEL, make_served_model
from tests.support.browser import check_page, wait_on

Open = Callable[..., Page]
OTHER = "other"
REFERENCE = "answer/A&B=100% sûr"
MATCHES = {
    "type": "string_check", "name": "exact", "input": "{{sample.output_text}}", "operation": "eq",
    "reference": "{{item.reference}}",
}  # fmt: skip


@pytest.fixture
def rows(transactional_db: None, organization: Organization) -> DatasetVersion:
    for name in (BASE_MODEL, OTHER):
        make_served_model(name, "unix:///nowhere")
    give_credit(organization)
    return make_ready_version(organization, jsonl(12), dataset_name="held")


@pytest.fixture
def plan(rows: DatasetVersion, organization: Organization, alice: User) -> RetrainingPlan:
    job = TrainingSetup(organization).job(suffix="triage")
    return RetrainingPlan.objects.create(
        organization=organization, name="Weekly", source_job=job, dataset=job.training_file.dataset,
        held_out=rows.dataset, testing_criteria=[MATCHES], cadence="week", cadence_value=1, next_due_at=db_now(),
        max_nano=20 * USD, min_gain_points=0.0, acts_as=alice.pk, created_by=alice.pk,
    )  # fmt: skip


def values(page: Page) -> dict[str, str]:
    """Return what people see in the form's fields."""
    shown = page.locator("form[data-address]").evaluate(
        "(form) => [...form.elements].filter((n) => n.name && !['hidden', 'submit'].includes(n.type))"
        ".map((n) => [n.name, n.value])"
    )
    return dict(shown)


def in_address(page: Page) -> dict[str, str]:
    return {name: given[-1] for name, given in parse_qs(urlsplit(page.url).query, keep_blank_values=True).items()}


def wait_for_address(page: Page) -> dict[str, str]:
    """Return the form's values, once the address has them and no others."""
    wait_on(page, lambda: in_address(page) == values(page))
    return values(page)


def check_kept(page: Page, open_page: Open, user: User, shown: dict[str, str]) -> None:
    """Check that these values are there after a reload, Back, Forward, and in another browser."""
    here = page.url
    page.reload()
    assert values(page) == shown
    page.goto("/evals")
    page.go_back()
    expect(page.locator("form[data-address]")).to_be_visible()
    assert page.url == here and values(page) == shown
    page.go_forward()
    expect(page.locator("form[data-address]")).to_have_count(0)
    page.go_back()
    expect(page.locator("form[data-address]")).to_be_visible()
    assert values(page) == shown
    assert values(open_page(here, user=user)) == shown


@pytest.mark.slow
def test_an_eval_that_is_not_started_yet_survives_reload_back_forward_and_sharing(
    open_page: Open, rows: DatasetVersion, alice: User
) -> None:
    page = open_page("/evals/new", user=alice)
    page.locator("#id_name").fill("cards")
    page.locator("#id_model").select_option(BASE_MODEL)
    page.locator("#id_dataset").select_option(rows.pk)
    page.locator("#id_question").fill("Answer:\n{{item.question}}")
    page.locator("#id_temperature").fill("0.5")
    page.get_by_role("button", name="Add a criterion").click()
    page.locator("#id_criterion-1-kind").select_option("score_model")
    page.locator("#id_criterion-1-system").fill("Be fair,\nand short.")
    page.locator("#id_criterion-1-model").select_option(OTHER)
    page.locator("#id_criterion-0-reference").fill(REFERENCE)

    shown = wait_for_address(page)
    assert (shown["name"], shown["temperature"], shown["criterion-1-system"]) == (
        "cards",
        "0.5",
        "Be fair,\nand short.",
    )
    assert not {"csrfmiddlewaretoken", "confirmed"} & {*in_address(page)}
    check_kept(page, open_page, alice, shown)
    expect(page.get_by_text("At most", exact=True)).to_be_visible()  # what is filled in has its price at once

    page.get_by_role("button", name=re.compile("Remove.*Criterion 1")).click()
    expect(page.locator("#criterion-1")).to_have_count(0)
    expect(page.locator("#id_criterion-0-kind")).to_have_value("score_model")
    shown = wait_for_address(page)
    page.reload()
    assert values(page) == shown and "criterion-1-kind" not in shown
    page.locator("#id_temperature").fill("3")
    page.keyboard.press("Enter")  # before the address has followed; the value is refused
    page.locator("#id_temperature").fill("0.7")
    wait_for_address(page)


@pytest.mark.slow
def test_a_price_for_other_values_is_dimmed_and_one_that_does_not_come_is_hidden(
    open_page: Open, rows: DatasetVersion, alice: User
) -> None:
    filled = {
        "name": "cards", "model": BASE_MODEL, "dataset": rows.pk, "question": "Answer: {{item.question}}",
        "criterion-0-kind": "string_check", "criterion-0-name": "exact", "criterion-0-reference": "x",
    }  # fmt: skip
    page = open_page(f"/evals/new?{urlencode(filled)}", user=alice, is_fresh=True)
    form, price = page.locator("#eval-form"), page.locator("#eval-price .kv")
    expect(price).to_be_visible()
    held: list[Route] = []
    page.route("**/evals/new", lambda route: held.append(route))

    page.locator("#id_temperature").press_sequentially("1")  # nothing leaves the field
    expect(form).to_have_attribute("data-state", "stale")
    wait_on(page, lambda: len(held) == 1)
    held[0].fulfill(status=502, body="<h1>Bad gateway</h1>")

    expect(page.get_by_role("alert").filter(has_text="could not be updated")).to_be_visible()
    expect(price).to_be_hidden()
    check_page(page, (1440, 390))
    page.unroute_all()
    page.get_by_role("button", name="Try again").click()
    expect(price).to_be_visible()
    expect(form).to_have_attribute("data-state", "")
    for ask in (
        lambda: page.get_by_role("button", name="Add a criterion").click(),
        lambda: page.locator("#id_criterion-1-kind").select_option("score_model"),
    ):
        page.route("**/evals/new", lambda route: route.fulfill(status=502, body="<h1>Bad gateway</h1>"))
        ask()
        expect(form).to_have_attribute("data-state", "failed")
        page.unroute_all()
        page.get_by_role("button", name="Try again").click()
        expect(page.locator("#id_criterion-1-kind")).to_be_visible()
        expect(form).to_have_attribute("data-state", "")
    expect(page.locator("#id_criterion-1-system")).to_be_visible()
    complaints: list[str] = open_page.complaints  # type: ignore[attr-defined]
    complaints[:] = [text for text in complaints if "502" not in text]


@pytest.mark.slow
def test_a_criterion_that_is_added_right_after_a_change_is_there_however_slow_the_answer(
    open_page: Open, rows: DatasetVersion, alice: User
) -> None:
    page = open_page("/evals/new", user=alice, is_fresh=True)
    held, prices = list[Route](), list[Request]()
    page.route(
        "**/evals/new",
        lambda route: held.append(route) if "&add=1" in (route.request.post_data or "") else route.continue_(),
    )
    page.on("request", lambda request: prices.append(request) if request.method == "POST" and held else None)

    page.locator("#id_temperature").fill("0.5")
    page.get_by_role("button", name="Add a criterion").click()
    wait_on(page, lambda: any("&add=1" not in (request.post_data or "") for request in prices))
    held[0].continue_()

    expect(page.locator("#id_criterion-1-kind")).to_be_visible()
    assert wait_for_address(page)["temperature"] == "0.5"


@pytest.mark.slow
def test_a_text_too_long_for_an_address_is_left_out_with_a_word_and_all_others_stay(
    open_page: Open, rows: DatasetVersion, alice: User
) -> None:
    page = open_page("/evals/new", user=alice)
    page.locator("#id_question").fill("ü" * 690)
    page.locator("#id_temperature").fill("0.5")
    page.locator("#id_criterion-0-name").fill("spelling")
    page.get_by_role("button", name="Add a criterion").click()
    page.locator("#id_criterion-1-name").fill("case")
    page.wait_for_url(re.compile("criterion-1-name=case"))

    assert len(page.url) <= 4_500 and "question" not in in_address(page)
    told = page.get_by_text("too long to keep in the address")
    expect(page.locator(".field", has=page.locator("#id_question")).filter(has=told)).to_be_visible()
    page.locator("#id_question").fill("short")
    expect(told).to_have_count(0)
    page.locator("#id_question").fill("ü" * 690)
    expect(told).to_have_count(1)
    shown = values(page)
    page.reload()
    assert values(page) == shown | {"question": ""}


@pytest.mark.slow
def test_changes_of_a_plan_that_are_not_saved_yet_survive(open_page: Open, plan: RetrainingPlan, alice: User) -> None:
    page = open_page(f"/jobs/retraining/{plan.pk}", user=alice)
    assert values(page)["criterion-0-reference"] == MATCHES["reference"] and not in_address(page)
    page.locator("#id_name").fill("Monthly")
    page.locator("#id_schedule").select_option("")
    page.locator("#id_min_new_rows").fill("700")
    page.locator("#id_max_usd").fill("7.5")
    page.get_by_role("button", name="Add a criterion").click()
    page.locator("#id_criterion-1-reference").fill(REFERENCE)

    shown = wait_for_address(page)
    assert (shown["name"], shown["schedule"], shown["max_usd"]) == ("Monthly", "", "7.5")
    check_kept(page, open_page, alice, shown)
    plan.refresh_from_db()
    assert (plan.name, plan.cadence, len(plan.testing_criteria)) == ("Weekly", "week", 1)

    new = open_page("/jobs/retraining/new", user=alice)
    new.locator("#id_name").fill("Daily")
    new.locator("#id_schedule").select_option("days-1")
    shown = wait_for_address(new)
    new.reload()
    assert values(new) == shown and shown["name"] == "Daily"


@pytest.mark.slow
def test_a_run_that_repeats_another_keeps_which_one(
    open_page: Open, rows: DatasetVersion, organization: Organization, alice: User
) -> None:
    evaluated = Eval.objects.create(
        organization=organization, project_id=default_project_id(organization), name="sums",
        data_source_config={"type": "logs"}, created_by="system", testing_criteria=[MATCHES],
    )  # fmt: skip
    run = EvalRun.objects.create(
        organization=organization, evaluated=evaluated, name="first", data_source={}, testing_criteria=[],
        model_name="tiny", created_by="system", status="in_progress", criteria_results=[],
    )  # fmt: skip
    page = open_page(f"/evals/{evaluated.pk}/runs/new", user=alice)
    page.locator("#id_temperature").fill("0.5")
    shown = wait_for_address(page)
    page.reload()
    assert values(page) == shown

    page = open_page(f"/evals/{evaluated.pk}/runs/new?run={run.pk}", user=alice)
    page.locator("#id_other_model").select_option(OTHER)
    page.wait_for_url(re.compile(f"run={run.pk}&model=&other_model={OTHER}"))
    page.reload()
    expect(page.get_by_text("Repeats the run of")).to_be_visible()
    expect(page.locator("#id_other_model")).to_have_value(OTHER)
