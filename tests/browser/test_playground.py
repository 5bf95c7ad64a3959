"""The playground's own script in a real browser: stop, response formats, votes, history and presets."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import Page, Route, expect

from apps.accounts.models import Organization, User
from apps.datasets.models import DatasetVersion
from apps.playground.models import SavedConversation
from apps.playground.transcripts import PlayTurn
from tests.factories.catalog import make_base_model
from tests.support.browser import check_page, wait_on

Open = Callable[..., Page]
NAMES = ("anneal-demo", "other")


@pytest.fixture
def page(transactional_db: None, organization: Organization, open_page: Open, alice: User) -> Page:
    """The playground with two base models side by side."""
    for name in NAMES:
        make_base_model(name=name)
    return open_page("/playground?" + "&".join(f"model={name}" for name in NAMES), user=alice)


def with_its_name(route: Route, body: dict[str, Any]) -> None:
    chunk = {"choices": [{"delta": {"content": f"from {body['model']}"}, "finish_reason": "stop"}]}
    route.fulfill(content_type="text/event-stream", body=f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n")


def answer(page: Page, respond: Callable[[Route, dict[str, Any]], None] = with_its_name) -> list[dict[str, Any]]:
    """Have each model answer with its own name, or by `respond`; return what was asked, as it comes."""
    asked: list[dict[str, Any]] = []

    def on_request(route: Route) -> None:
        body = json.loads(route.request.post_data or "")
        asked.append(body)
        respond(route, body)

    page.route("**/v1/chat/completions", on_request)
    return asked


def kept_columns() -> list[list[PlayTurn]]:
    """Return the turns of the conversation that was stored last."""
    newest = SavedConversation.objects.order_by("-updated_at").first()
    return newest.transcript.columns if newest else []


def send(page: Page, text: str = "My card is lost") -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.get_by_role("button", name="Send").click()


def column(page: Page, number: int) -> Any:
    return page.get_by_role("region", name=f"Column {number}")


def test_one_answer_is_stopped_and_the_other_one_goes_on(page: Page) -> None:
    held: list[Route] = []
    answer(page, lambda route, body: held.append(route))

    send(page)
    wait_on(page, lambda: len(held) == 2)
    column(page, 1).get_by_role("button", name="Stop").click()

    expect(column(page, 1)).to_contain_text("stopped by you")
    expect(column(page, 2).get_by_role("button", name="Stop")).to_be_visible()
    page.get_by_role("button", name="Stop all").click()
    expect(column(page, 2)).to_contain_text("stopped by you")
    expect(page.get_by_role("button", name="Send")).to_be_visible()


def test_a_message_outlives_the_session_and_is_sent_after_a_new_sign_in(open_page: Open, page: Page) -> None:
    answer(page)
    session = [cookie for cookie in page.context.cookies() if cookie["name"] == "sessionid"]
    page.context.clear_cookies(name="sessionid")

    send(page, "A long message")

    expect(column(page, 1)).to_contain_text("You were signed out, so nothing was sent.")
    expect(page.get_by_label("Message", exact=True)).to_have_value("A long message")
    page.context.add_cookies(session)  # type: ignore[arg-type]
    page.reload()
    expect(page.get_by_label("Message", exact=True)).to_have_value("A long message")
    renewed = {"name": "csrftoken", "value": "n" * 32, "url": page.url}  # a sign-in in another tab renews it
    page.context.add_cookies([renewed, *session])  # type: ignore[list-item]
    page.get_by_role("button", name="Send").click()
    expect(column(page, 1)).to_contain_text("from anneal-demo")
    expect(page.get_by_label("Message", exact=True)).to_have_value("")
    open_page.complaints[:] = [text for text in open_page.complaints if "401" not in text]  # type: ignore[attr-defined]


def test_the_end_of_an_answer_takes_the_focus_from_no_field_in_use(page: Page) -> None:
    held: list[tuple[Route, dict[str, Any]]] = []
    answer(page, lambda route, body: held.append((route, body)))
    page.get_by_text("System message and sampling").click()

    for field in ("Response format", "Message"):
        send(page)
        wait_on(page, lambda: len(held) == 2)
        if field != "Message":
            page.get_by_label(field).focus()
        while held:
            with_its_name(*held.pop())
        expect(page.get_by_role("button", name="Send")).to_be_visible()
        expect(page.get_by_label(field, exact=True)).to_be_focused()


def test_a_schema_is_sent_and_the_gateways_fault_stands_at_its_field(open_page: Open, page: Page) -> None:
    def refuse_texts(route: Route, body: dict[str, Any]) -> None:
        if isinstance(body["response_format"]["json_schema"]["schema"], str):
            error = {"message": "The schema must be an object.", "param": "response_format.json_schema.schema"}
            route.fulfill(status=400, json={"error": error})
        else:
            with_its_name(route, body)

    asked = answer(page, refuse_texts)
    page.get_by_text("System message and sampling").click()
    expect(page.get_by_label("JSON schema", exact=True)).to_be_hidden()
    page.get_by_label("Response format").select_option("JSON schema")
    page.get_by_label("JSON schema", exact=True).fill('{"type": ')
    send(page)

    expect(page.locator("#response_format_error")).to_have_text("The schema must be an object.")
    page.get_by_label("JSON schema", exact=True).fill('{"type": "object"}')
    send(page)
    expect(column(page, 1)).to_contain_text("from anneal-demo")
    expect(page.locator("#response_format_error")).to_be_hidden()
    assert asked[-1]["response_format"]["json_schema"] == {
        "name": "answer", "strict": True, "schema": {"type": "object"},
    }  # fmt: skip
    assert len(open_page.complaints) == 2  # Chromium writes each failed request to its console
    open_page.complaints.clear()


def test_with_a_response_format_two_models_are_asked_at_a_time(page: Page) -> None:
    held: list[tuple[Route, dict[str, Any]]] = []
    answer(page, lambda route, body: held.append((route, body)))
    page.get_by_role("button", name="Add a model").click()
    page.get_by_text("System message and sampling").click()
    page.get_by_label("Response format").select_option("JSON object")

    send(page)
    wait_on(page, lambda: len(held) == 2)
    expect(column(page, 3).get_by_role("log")).to_have_text("You My card is lost", use_inner_text=True)
    for one in held[:2]:
        with_its_name(*one)
    wait_on(page, lambda: len(held) == 3)
    with_its_name(*held[2])

    expect(column(page, 3)).to_contain_text("from anneal-demo")
    assert [body["response_format"] for _, body in held] == [{"type": "json_object"}] * 3


@pytest.mark.slow
def test_the_better_answer_is_saved_as_a_preference_and_the_conversation_opens_again(page: Page) -> None:
    asked = answer(page)
    send(page)
    column(page, 2).get_by_role("button", name="This one is better").click()
    expect(column(page, 1).get_by_role("button", name="Bad")).to_have_attribute("aria-pressed", "true")
    column(page, 2).get_by_role("button", name="Save as preference row").click()
    expect(page.get_by_role("link", name="Saved to Playground preferences")).to_be_visible()
    assert DatasetVersion.objects.get().dataset.name == "Playground preferences"
    wait_on(page, lambda: [turns[-1].vote for turns in kept_columns()] == ["down", "up"])

    page.reload()
    expect(column(page, 2)).to_contain_text("from other")
    expect(column(page, 2).get_by_role("button", name="Good")).to_have_attribute("aria-pressed", "true")
    expect(column(page, 2).get_by_role("button", name="Save as preference row")).to_be_visible()
    check_page(page, (1440, 390))
    send(page, "And now?")
    wait_on(page, lambda: [len(turns) for turns in kept_columns()] == [4, 4])
    assert [message["role"] for message in asked[-1]["messages"]] == ["user", "assistant", "user"]

    page.get_by_role("button", name="Clear").click()
    send(page, "Something else")
    wait_on(page, lambda: SavedConversation.objects.count() == 2)
    page.get_by_role("link", name="History").click()
    check_page(page, (1440, 390))
    page.get_by_role("link", name="My card is lost", exact=True).click()
    expect(column(page, 1)).to_contain_text("And now?")


@pytest.mark.slow
def test_a_conversation_that_goes_on_in_two_tabs_becomes_two(page: Page) -> None:
    answer(page)
    send(page)
    wait_on(page, lambda: SavedConversation.objects.count() == 1)
    wait_on(page, lambda: "conversation=" in page.url)
    other = page.context.new_page()
    other.goto(page.url)
    answer(other)

    for tab, text in ((page, "Here"), (page, "Here again"), (other, "There")):
        send(tab, text)
        wait_on(tab, lambda text=text: any(turns[-2].content == text for turns in kept_columns()))

    expect(other.get_by_text("What you see is kept as a new one.")).to_be_visible()
    kept = SavedConversation.objects.order_by("pk")
    assert [len(one.transcript.columns[0]) for one in kept] == [6, 4]
    other.close()


def test_settings_are_saved_as_a_preset_and_opened_from_the_menu(page: Page) -> None:
    page.get_by_text("System message and sampling").click()
    page.get_by_label("Temperature").fill("0.7")
    page.get_by_role("button", name="Presets").click()
    page.get_by_role("button", name="Save these settings").click()
    page.get_by_role("button", name="Save preset").click()
    page.get_by_label("Name").fill("Warm")
    page.get_by_label("Share with the organization").check()
    page.get_by_role("button", name="Save preset").click()

    expect(page.get_by_text("“Warm” is saved.")).to_be_visible()
    page.goto("/playground")
    page.get_by_role("button", name="Presets").click()
    page.get_by_role("link", name="Warm").click()
    expect(page.locator("#temperature")).to_have_value("0.7")
    assert page.locator("[data-play-model]").evaluate_all("all => all.map((n) => n.value)") == list(NAMES)
