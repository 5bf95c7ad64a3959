"""The pages around the work: accounts, money, the operators' console, the documentation site."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from playwright.sync_api import Browser, Page, expect

from apps.accounts.models import Organization, User, default_project_id
from apps.accounts.notices.events import EVENT_TYPES
from apps.batches.completions.models import StoredCompletion
from apps.batches.completions.records import CompletionRecord, record_completions
from apps.batches.models import Batch
from apps.batches.validation import validate
from apps.billing.budget_settings import set_budget
from apps.core.database.clock import db_now
from apps.datasets.inspection.inspections import inspect_version
from apps.finetuning.jobs.retraining.plans import EXACT
from apps.finetuning.models import FineTuningJob, PoolCapacity, Retraining, RetrainingPlan, Run, Worker
from apps.finetuning.runs import claims
from apps.finetuning.usage.allowances import set_allowance
from apps.serving.evals.models import Eval, EvalRun
from apps.serving.operations import register_replica
from scripts.assets.docs_site import build
from tests.factories.accounts import make_key
from tests.factories.batches import make_batch, make_line
from tests.factories.catalog import make_hub_lookup, make_listed_model
from tests.factories.finetuning import TrainingSetup, make_training_file
from tests.factories.money import USD
from tests.factories.usage import make_completion
from tests.support.browser import WIDTHS, check_page

Open = Callable[..., Page]
# Of what is folded axe reads ids alone, and takes a quarter of a minute for the reference.
REFERENCE = "/help/reference"
TAKE_FOLDED_AWAY = """() => {
  const ids = [...document.querySelectorAll("[id]")].map((node) => node.id);
  document.querySelectorAll("details:not([open]) > :not(summary)").forEach((node) => node.remove());
  return ids.filter((id, place) => ids.indexOf(id) !== place);
}"""

SIGNED_OUT = ("/accounts/login/", "/accounts/signup/", "/accounts/password/reset/", "/accuracy")
CUSTOMERS = (
    "/keys", "/members", "/projects", "/projects/{project}", "/service-accounts", "/organization",
    "/organization/audit", "/organization/trackers",
    "/organization/webhooks", "/organization/new", "/accounts/second-factor/", "/invoices", "/budgets", "/prices",
    "/quotas", "/usage", "/usage?days=7", "/adapters/upload",
    "/usage/traffic", "/datasets", "/datasets/upload", "/credit", "/account", "/account/sessions", "/notifications",
    "/help", "/help/training", "/help/quickstart", REFERENCE, "/status", "/batches",
    "/jobs/retraining", "/jobs/retraining/new", "/jobs/retraining/{plan}", "/jobs/retraining/delete?plan={plan}",
    "/batches/{batch}", "/batches/cancel?batch={batch}", "/stored-completions", "/stored-completions/{completion}",
    "/stored-completions/delete?completion={completion}",
    "/evals", "/evals/{eval}", "/evals/new", "/evals/{eval}/runs/new", "/evals/{eval}/runs/{run}",
)  # fmt: skip
OPERATORS = (
    "/staff/", "/staff/organizations/{organization}", "/staff/jobs/{job}", "/staff/workers/{worker}",
    "/staff/quotas/{organization}", "/staff/workers", "/staff/jobs/cancel?job={job}",
    "/staff/regions", "/staff/pools", "/staff/pools/{pool}", "/staff/replicas", "/staff/base-models",
    "/staff/base-models/lookups/{lookup}", "/staff/prices", "/staff/payments", "/staff/books",
    "/staff/margin", "/staff/quotas", "/staff/jobs", "/staff/organizations", "/staff/audit",
)  # fmt: skip


@pytest.fixture
def floor(transactional_db: None, organization: Organization, alice: User) -> TrainingSetup:
    """A queued job that a plan repeats, a key, a budget, a listed model, a failed batch, a replica, an elastic pool."""
    floor = TrainingSetup(organization)
    retrained(floor.job(suffix="triage"), alice)
    make_key(organization, alice)
    record_completions(records=[kept_completion(organization)])
    graded_run(organization)
    make_listed_model()
    validate(batch=make_batch(organization, alice, [make_line("a", method="GET")]), now=db_now())
    set_budget(
        organization=organization, scope="organization", target="", limit_nano=10**10, mode="alert", by=alice.pk,
        now=db_now(),
    )  # fmt: skip
    set_allowance(
        organization=organization, scope="member", target=alice.pk, limits={"concurrent_gpus": 1}, by=alice.pk,
        now=db_now(),
    )  # fmt: skip
    PoolCapacity.objects.create(pool=floor.pool, kind="kubernetes", problem="The API server refused with 403: no")
    register_replica(worker_id=floor.worker.pk, base_model=floor.base_model, url="unix:///nowhere")
    return floor


def graded_run(organization: Organization) -> None:
    evaluated = Eval.objects.create(
        organization=organization, project_id=default_project_id(organization), name="sums",
        data_source_config={"type": "logs"}, created_by="system",
        testing_criteria=[msgspec.to_builtins(EXACT)],
    )  # fmt: skip
    EvalRun.objects.create(
        organization=organization, evaluated=evaluated, name="first", data_source={}, testing_criteria=[],
        model_name="tiny", passed=1, failed=3, total=4, created_by="system", status="in_progress",
        criteria_results=[{"testing_criteria": "exact", "passed": 1, "failed": 3}],
    )  # fmt: skip


def kept_completion(organization: Organization) -> CompletionRecord:
    request = {"messages": [{"role": "user", "content": "How large is it?"}], "tools": [{"type": "function"}]}
    answer = {"choices": [{"message": {"role": "assistant", "content": "As large as a house."}}], "usage": {}}
    return make_completion(
        organization_id=organization.pk, metadata={"topic": "size"}, request=msgspec.Raw(msgspec.json.encode(request)),
        answer=msgspec.Raw(msgspec.json.encode(answer)),
    )  # fmt: skip


def retrained(job: FineTuningJob, by: User) -> None:
    """Keep a plan that repeats the job, and a comparison that it made."""
    difference = {"value": 0.005, "low": -0.03, "high": 0.04}
    shares = {"rows": 200, "new_passed": 150, "old_passed": 149, "difference": difference}
    plan = RetrainingPlan.objects.create(
        organization=job.organization, name="Weekly", source_job=job, dataset=job.training_file.dataset,
        held_out=job.training_file.dataset, testing_criteria=[], cadence="week", cadence_value=1, next_due_at=db_now(),
        min_new_rows=500, max_nano=20 * USD, min_gain_points=0.0, acts_as=by.pk, created_by=by.pk,
    )  # fmt: skip
    Retraining.objects.create(
        organization=job.organization, plan=plan, trigger="schedule", trigger_key="1", max_nano=20 * USD,
        created_by=by.pk, held_out_result=shares,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("who", "paths"), [("nobody", SIGNED_OUT), ("alice", CUSTOMERS), ("olga", OPERATORS)])
def test_pages_around_the_work_are_accessible_and_reflow(
    open_page: Open,
    floor: TrainingSetup,
    request: pytest.FixtureRequest,
    who: str,
    paths: tuple[str, ...],
) -> None:
    user = None if who == "nobody" else request.getfixturevalue(who)
    names = {
        "organization": floor.organization.pk, "job": FineTuningJob.objects.get().pk, "worker": floor.worker.pk,
        "pool": floor.pool.pk, "lookup": make_hub_lookup(floor.base_model).pk, "batch": Batch.objects.get().pk,
        "plan": RetrainingPlan.objects.get().pk, "completion": StoredCompletion.objects.get().pk,
        "eval": Eval.objects.get().pk, "run": EvalRun.objects.get().pk,
        "project": default_project_id(floor.organization),
    }  # fmt: skip
    page = open_page(paths[0], user=user)

    for path in paths:
        page.goto(path.format(**names))
        if path == REFERENCE:
            assert page.evaluate(TAKE_FOLDED_AWAY) == []
        check_page(page, WIDTHS, read_at=WIDTHS[-1:])


def test_all_events_of_a_subject_are_chosen_at_once(open_page: Open, organization: Organization, alice: User) -> None:
    page = open_page("/organization/webhooks", user=alice)
    adapters = page.get_by_role("group", name="Adapters", exact=True)
    before = page.locator("input.pick:checked").count()

    adapters.get_by_label("All: Adapters").check()

    mine = [each for each in EVENT_TYPES if each.startswith("adapter.")]
    expect(adapters.locator("input.pick:checked")).to_have_count(len(mine))
    expect(page.locator("input.pick:checked")).to_have_count(before + len(mine))


@pytest.mark.slow
def test_what_got_no_answer_is_asked_for_again_once_there_is_a_connection(
    open_page: Open, floor: TrainingSetup, alice: User
) -> None:
    page = open_page("/datasets", user=alice)
    is_price = "least-price"
    page.route(
        "**/datasets/file-*",
        lambda route: route.abort() if is_price in route.request.headers.get("hx-target", "") else route.continue_(),
    )
    version = make_training_file(floor.organization, floor.base_model)
    inspect_version(version=version)
    page.goto(f"/datasets/{version.pk}")
    lost, price = page.locator("[data-lost]"), page.locator("#least-price.price")
    expect(lost).to_contain_text("could not be updated")
    page.evaluate("() => htmx.ajax('GET', '/datasets', {source: '#rows-h', swap: 'none'})")
    expect(lost).to_contain_text("could not be updated")

    page.context.set_offline(True)
    expect(lost).to_contain_text("You are offline")
    page.unroute_all()
    page.context.set_offline(False)

    expect(price).to_contain_text("from")
    expect(lost).to_be_hidden()
    complaints: list[str] = open_page.complaints  # type: ignore[attr-defined]
    complaints[:] = [text for text in complaints if "Failed to fetch" not in text and "ERR_" not in text]


@pytest.mark.slow
def test_pages_that_an_operator_views_have_a_banner_that_is_accessible(
    open_page: Open, floor: TrainingSetup, olga: User
) -> None:
    page = open_page(f"/staff/organizations/{floor.organization.pk}", user=olga)
    page.get_by_role("button", name="View as Acme").click()
    page.get_by_role("button", name="View", exact=True).click()

    for path in ("/", "/jobs", "/usage", "/accuracy", "/organization/new"):
        page.goto(path)
        page.get_by_role("button", name="Stop viewing").wait_for()
        check_page(page, WIDTHS, read_at=WIDTHS[-1:])
    page.get_by_role("button", name="Stop viewing").click()

    page.wait_for_url("**/staff/organizations/*")


@pytest.mark.slow
def test_a_pool_that_is_open_in_the_console_stays_current_but_not_under_an_open_menu(
    open_page: Open, floor: TrainingSetup, olga: User
) -> None:
    page = open_page(user=olga, is_fresh=True)
    page.clock.install()
    page.goto(f"/staff/pools/{floor.pool.pk}")
    workers = page.get_by_role("table", name="Workers of local-cpu")
    Worker.objects.update(hostname="renamed")

    def poll() -> None:
        with page.expect_response(lambda answer: "version=" in answer.url) as answered:
            page.clock.fast_forward(10_000)
        assert answered.value.request.headers["x-poll"] == "1"

    page.get_by_role("button", name="Actions for here").hover()
    page.mouse.down()
    poll()
    page.mouse.up()
    expect(page.get_by_role("button", name="Cordon, keep its runs")).to_be_visible()
    expect(workers).to_contain_text("here")
    page.keyboard.press("Escape")

    page.get_by_role("button", name="Actions for here").click()
    poll()
    expect(page.get_by_role("button", name="Cordon, keep its runs")).to_be_visible()
    expect(workers).to_contain_text("here")
    page.keyboard.press("Escape")
    poll()
    expect(workers).to_contain_text("renamed")
    for _ in range(2):
        Worker.objects.update(hostname="again")
        poll()
    expect(workers).to_contain_text("again")
    expect(page.locator("#as-of")).to_have_count(1)


@pytest.mark.slow
def test_a_page_that_stays_current_keeps_the_readers_place(open_page: Open, floor: TrainingSetup, olga: User) -> None:
    job = FineTuningJob.objects.get()
    claims.claim(worker=floor.worker, base_models=None)
    Run.objects.update(log_tail="\n".join(f"line {count}" for count in range(400)))
    page = open_page(user=olga, is_fresh=True)
    page.clock.install()
    page.goto(f"/staff/jobs/{job.pk}")
    log, cancel = page.get_by_role("region", name="End of the log"), page.get_by_role("link", name="Cancel job")
    log.evaluate("(node) => { node.scrollTop = 200; }")
    cancel.focus()
    FineTuningJob.objects.update(step=7, total_steps=9)

    page.clock.fast_forward(10_000)

    expect(page.get_by_text("7 of 9")).to_be_visible()
    expect(cancel).to_be_focused()
    assert log.evaluate("(node) => node.scrollTop") == 200


@pytest.mark.slow
def test_the_search_of_the_site_finds_a_call_a_command_and_a_code(browser: Browser, tmp_path: Path) -> None:
    build(tmp_path)
    page = browser.new_page()
    page.goto((tmp_path / "index.html").as_uri())
    found = page.locator("[data-found] a")

    for words, address in {
        "jobs watch": "command-line.html#anneal-jobs-watch",
        "graders/validate": "reference.html#grader_validate_post",
        "invalid_api_key": "errors.html#invalid_api_key",
    }.items():
        page.get_by_role("searchbox").fill(words)
        expect(found.first).to_have_attribute("href", address)
    found.first.click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Errors")
    page.get_by_role("searchbox").fill("zzzznothing")
    expect(page.get_by_text("No page has these words")).to_be_visible()
    check_page(page, (390, 1440))
    page.close()
