"""Aliases, warmth, replicas and the playground's new parts in a real browser, in both themes and two widths."""

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import Page, Route, expect

from apps.accounts.models import Organization, User
from apps.adapters.models import AdapterVersion
from apps.catalog.operations import set_price
from apps.contracts.serving import LoadState
from apps.core.database.clock import db_now
from apps.core.objects.store import store
from apps.finetuning.models import Checkpoint, FineTuningJob, HubPush
from apps.finetuning.runs import claims
from apps.serving.aliases import point_alias
from apps.serving.models import Alias, MeteringCheck, Replica
from apps.serving.operations import deploy
from tests.factories.datasets import chat_row, jsonl_of
from tests.factories.finetuning import TrainingSetup
from tests.factories.serving import USD, load, make_replica
from tests.support.attempts import Attempt
from tests.support.browser import DRAWN, check_page, wait_on

WIDTHS = (1440, 390)
Open = Callable[..., Page]


@pytest.fixture
def version(transactional_db: None, organization: Organization) -> AdapterVersion:
    """A warm version with an alias, on a replica that says how it is doing."""
    floor = TrainingSetup(organization)
    job = floor.job(suffix="triage")
    attempt = Attempt(claims.claim(worker=floor.worker, base_models=None))
    attempt.start()
    attempt.succeed(floor.base_model)
    job.refresh_from_db()
    version = job.adapter_version
    deploy(version=version, by="system")
    replica = make_replica(floor.base_model, "unix:///nowhere")
    figures = {"memory_bytes": 3 * 2**30, "tokens_per_second": 41.5, "running": 3, "waiting": 1, "cached_adapters": 2}
    Replica.objects.filter(pk=replica.pk).update(load=figures)
    load(version, replica)
    counts = {"counted_input_tokens": 5000, "counted_output_tokens": 40, "least_input_tokens": 4000}
    counts |= {"most_input_tokens": 4250, "least_output_tokens": 40, "most_output_tokens": 40, "request_count": 7}
    for day, is_within in (("2026-11-03", False), ("2026-11-02", True)):
        MeteringCheck.objects.create(
            replica=replica, day=day, difference_share=0.15, is_within=is_within, checked_at=db_now(), **counts
        )
    _make_checkpoint(floor)
    point_alias(version=version, name="production", by="system", now=db_now())
    name = floor.base_model.name
    set_price(sku=f"warm:{name}", unit="warm_ms", price_nano=USD // 20, per=3_600_000, by="system", now=db_now())
    return version


def _make_checkpoint(floor: TrainingSetup) -> None:
    """Another job, which still runs, with a checkpoint."""
    floor.job(suffix="second")
    attempt = Attempt(claims.claim(worker=floor.worker, base_models=None))
    attempt.start()
    attempt.checkpoint(4, 8.0)


@pytest.mark.slow
def test_pages_are_accessible_and_reflow(
    open_page: Open, version: AdapterVersion, alice: User, olga: User, settings: Any
) -> None:
    settings.HUB_PUSHES = True
    replica = Replica.objects.get()
    HubPush.objects.create(
        organization=version.organization, version=version, repository="acme/support", created_by=alice.pk,
        created_at=db_now(),
    )  # fmt: skip
    for user, path in (
        (alice, f"/adapters/{version.pk}"),
        (alice, f"/adapters/{version.pk}/push"),
        (alice, f"/playground?model={version.model_name}"),
        (alice, f"/jobs/{Checkpoint.objects.get(deleted_at=None).job_id}"),
        (olga, "/staff/replicas"),
        (olga, f"/staff/replicas/{replica.pk}"),
    ):
        check_page(open_page(path, user=user), WIDTHS)


@pytest.mark.slow
def test_an_alias_is_deleted_only_after_a_second_look(open_page: Open, version: AdapterVersion, alice: User) -> None:
    page = open_page(f"/adapters/{version.pk}", user=alice)

    page.get_by_role("link", name="Delete production").click()
    expect(page.locator("main")).to_contain_text(Alias.objects.get().model_name)
    check_page(page, WIDTHS)
    page.get_by_role("link", name="Keep it").click()
    page.get_by_role("link", name="Delete production").click()
    page.get_by_label("Type production to confirm").fill("production")
    page.get_by_role("button", name="Delete alias").click()

    expect(page.locator("#aliases")).to_contain_text("A stable name for your app")
    assert not Alias.objects.exists()


def answer_with_the_models_name(page: Page) -> list[dict[str, Any]]:
    """Have each model answer with its own name; return what was asked, as it comes."""
    asked: list[dict[str, Any]] = []

    def answer(route: Route) -> None:
        body = json.loads(route.request.post_data or "")
        asked.append(body)
        choice = {"delta": {"content": f"from {body['model']}"}, "finish_reason": "stop"}
        chunks = [{"choices": [choice]}, {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 2}}]
        stream = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
        route.fulfill(content_type="text/event-stream", body=stream)

    page.route("**/v1/chat/completions", answer)
    return asked


@pytest.mark.slow
def test_models_answer_beside_each_other_under_the_same_conditions(
    open_page: Open, version: AdapterVersion, alice: User
) -> None:
    page = open_page(f"/playground?model={version.model_name}", user=alice)
    asked = answer_with_the_models_name(page)
    names = ["anneal-demo", version.model_name, Alias.objects.get().model_name]

    page.get_by_role("button", name="Add a model").click()
    expect(page.get_by_label("Model", exact=True).nth(2)).to_have_value(names[2])
    page.get_by_text("System message and sampling").click()
    page.get_by_label("Temperature").fill("0.7")
    page.get_by_label("Message", exact=True).fill("My card is lost")
    page.get_by_role("button", name="Send").click()
    for number, name in enumerate(names, start=1):
        column = page.get_by_role("region", name=f"Column {number}")
        expect(column).to_contain_text(f"from {name}")
        expect(column).to_contain_text("9 in, 2 out")

    assert sorted(body["model"] for body in asked) == sorted(names)
    conditions = [{key: body[key] for key in body if key != "model"} for body in asked]
    assert conditions[0] == conditions[1] == conditions[2]
    assert (conditions[0]["temperature"], type(conditions[0]["seed"])) == (0.7, int)
    page.get_by_role("region", name="Column 2").get_by_role("button", name="Copy as").click()
    for key in ("curl", "python", "javascript"):
        code = page.locator(f"#copy-as-{key}-code")
        expect(code).to_contain_text(version.model_name)
        expect(code).to_contain_text(str(conditions[0]["seed"]))
    page.get_by_role("dialog").get_by_role("button", name="Close").first.click()
    page.get_by_role("region", name="Column 1").get_by_role("button", name="Remove this model").click()
    expect(page.get_by_role("region", name="Column 1")).to_contain_text(f"from {version.model_name}")
    for _ in range(2):
        page.get_by_role("button", name="Add a model").click()
    expect(page.get_by_role("button", name="Add a model")).to_be_hidden()


@pytest.mark.slow
def test_a_model_that_is_being_loaded_is_asked_until_it_answers(
    open_page: Open, version: AdapterVersion, alice: User
) -> None:
    version.loaded.update(state=LoadState.LOADING)
    page = open_page(f"/playground?model={version.model_name}", user=alice)
    asked = answer_with_the_models_name(page)
    refused: list[Route] = []

    def refuse_once(route: Route) -> None:
        if refused or json.loads(route.request.post_data or "")["model"] != version.model_name:
            route.fallback()
        else:
            refused.append(route)
            route.fulfill(status=503, json={"error": {"message": "The model is not loaded and cannot answer yet."}})

    page.route("**/v1/chat/completions", refuse_once)
    page.get_by_label("Message", exact=True).fill("My card is lost")
    page.get_by_role("button", name="Send").click()

    expect(page.get_by_role("region", name="Column 2")).to_contain_text(f"from {version.model_name}")
    assert len(refused) == 1 and len(asked) == 2
    (complaint,) = open_page.complaints  # Chromium writes each failed request to its console
    assert "503" in complaint
    open_page.complaints.clear()


@pytest.mark.slow
def test_nothing_is_sent_before_the_script_is_there(open_page: Open, version: AdapterVersion, alice: User) -> None:
    page = open_page(f"/adapters/{version.pk}", user=alice)
    asked, held = answer_with_the_models_name(page), list[Route]()
    page.route("**/js/playground*.js", lambda route: held.append(route))

    page.goto(f"/playground?model={version.model_name}", wait_until="commit")
    page.get_by_label("Message", exact=True).fill("My card is lost")
    expect(page.get_by_role("button", name="Send")).to_be_disabled()
    wait_on(page, lambda: bool(held))
    held[0].continue_()
    page.get_by_role("button", name="Send").click()

    expect(page.get_by_role("region", name="Column 1")).to_contain_text("from anneal-demo")
    assert [message["content"] for message in asked[0]["messages"]] == ["My card is lost"]


@pytest.mark.slow
def test_an_answer_is_kept_and_the_prompt_shown_as_the_model_reads_it(
    open_page: Open, version: AdapterVersion, alice: User
) -> None:
    page = open_page(f"/playground?model={version.model_name}", user=alice)
    answer_with_the_models_name(page)

    page.get_by_label("Message").first.fill("My card is lost")
    page.get_by_role("button", name="Send").click()
    page.get_by_role("button", name="Save as row").last.click()
    expect(page.get_by_role("link", name="Saved to Playground rows")).to_be_visible()
    page.get_by_role("button", name="Raw prompt").click()
    expect(page.locator("#raw-prompt pre").first).to_contain_text("My card is lost")
    page.get_by_role("dialog").get_by_role("button", name="Close").first.click()
    page.get_by_role("button", name="Copy as").last.click()
    page.get_by_role("tab", name="JavaScript").click()
    expect(page.locator("#copy-as-javascript-code")).to_contain_text("new OpenAI")
    page.get_by_role("dialog").get_by_role("button", name="Close").first.click()
    page.get_by_role("button", name="Clear").click()
    expect(page.get_by_role("region", name="Column 1")).to_contain_text("Replies appear here")


def test_a_press_that_begins_in_a_dialog_leaves_it_open(open_page: Open, version: AdapterVersion, alice: User) -> None:
    """Text is selected up to the backdrop, or a tab moves away under the pointer while the code arrives."""
    page = open_page(f"/playground?model={version.model_name}", user=alice)
    page.get_by_role("button", name="Copy as").first.click()
    dialog = page.get_by_role("dialog")
    place = dialog.bounding_box()
    assert place is not None
    page.mouse.move(place["x"] + place["width"] / 2, place["y"] + 20)
    page.mouse.down()
    page.mouse.move(place["x"] / 2, place["y"] / 2)
    page.mouse.up()
    expect(dialog).to_be_visible()
    page.mouse.down()
    page.mouse.move(place["x"] + place["width"] / 2, place["y"] + 20)
    page.mouse.up()
    expect(dialog).to_be_visible()

    page.mouse.click(place["x"] / 2, place["y"] / 2)
    expect(dialog).to_be_hidden()


def test_the_training_prompt_is_there_and_comes_back(open_page: Open, version: AdapterVersion, alice: User) -> None:
    rows = [{"messages": [{"role": "system", "content": "Sort."}, *chat_row()["messages"]]}]
    job = FineTuningJob.objects.get(adapter_version=version)
    store().put_stream(job.training_file.object_key, [jsonl_of(*rows)])
    page = open_page(f"/playground?model={version.model_name}", user=alice)

    expect(page.get_by_label("System message")).to_have_value("Sort.")
    page.get_by_label("System message").fill("Be brief.")
    page.get_by_role("button", name="Use the training prompt").click()

    expect(page.get_by_label("System message")).to_have_value("Sort.")


def test_prompts_asked_for_twice_are_shown_once(open_page: Open, version: AdapterVersion, alice: User) -> None:
    page = open_page(f"/playground?model={version.model_name}", user=alice)
    held: list[Route] = []
    page.route(re.compile(r"/playground/prompt\?"), lambda route: route.continue_() if held else held.append(route))

    page.get_by_label("Message").first.fill("My card is lost")
    page.get_by_role("button", name="Raw prompt").click()
    wait_on(page, lambda: bool(held))
    page.get_by_role("button", name="Raw prompt").click()
    expect(page.get_by_role("dialog")).to_be_visible()
    with page.expect_response(
        lambda answer: "/playground/prompt?" in answer.url and version.model_name in (answer.request.post_data or "")
    ):
        held[0].continue_()
    page.evaluate(DRAWN)

    expect(page.locator("#raw-prompt pre")).to_have_count(2)
