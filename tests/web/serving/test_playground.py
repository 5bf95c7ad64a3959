"""The playground: which models it offers, and the token a browser asks the gateway with."""

import gzip
import json
import re

import pytest

from apps.accounts.login import key_operations
from apps.accounts.models import KeyKind
from apps.accounts.queries import find_key
from apps.catalog.operations import set_price
from apps.core.database.clock import db_now
from apps.core.objects.store import read_object, store
from apps.datasets.models import DatasetVersion
from apps.datasets.validation.leases import validate_version
from apps.finetuning.models import FineTuningJob
from apps.interfaces.web.playground import rows
from apps.serving.operations import undeploy
from tests.factories.accounts import make_key
from tests.factories.datasets import chat_row, jsonl, jsonl_of, make_ready_version, make_version
from tests.support.pages import text


def selected(page: str) -> list[str]:
    columns, _, _ = page.partition("data-play-form")
    return re.findall(r'<option value="([^"]*)"[^>]* selected>', columns)


@pytest.mark.slow
def test_members_see_it_and_each_their_own_models(version, client_for, alice, bob, vera, charlie, rival):
    assert [client_for(person).get("/playground").status_code for person in (alice, bob, vera)] == [200, 200, 200]
    assert version.model_name not in text(client_for(charlie).get("/playground"))
    assert client_for(None).get("/playground").status_code == 302


@pytest.mark.slow
def test_an_adapter_stands_beside_its_base(version, client_for, bob):
    page = text(client_for(bob).get(f"/playground?model={version.model_name}"))
    undeploy(version=version, by=bob.pk, now=db_now())
    without = text(client_for(bob).get("/playground"))

    assert version.model_name not in without
    assert selected(page) == ["anneal-demo", version.model_name]


def train_on(*rows: dict) -> None:
    """Replace the rows that the job's file has."""
    store().put_stream(FineTuningJob.objects.get().training_file.object_key, [jsonl_of(*rows)])


def with_system(content: str) -> dict:
    return {"messages": [{"role": "system", "content": content}, *chat_row()["messages"]]}


@pytest.mark.slow
def test_it_opens_with_the_most_frequent_system_message_of_the_training_rows(version, client_for, bob):
    before = text(client_for(bob).get(f"/playground?model={version.model_name}"))
    train_on(with_system("Be brief."), *[with_system("Sort <tickets>.")] * 2, chat_row())

    page = client_for(bob).get(f"/playground?model={version.model_name}").content.decode()

    assert re.search(r'data-param="system"\s*></textarea>', before)
    assert "Sort &lt;tickets&gt;.</textarea>" in page
    assert "Sort" not in text(client_for(bob).get("/playground?model=anneal-demo&model=anneal-demo"))


@pytest.mark.slow
def test_rows_without_a_system_message_count_too_and_a_huge_row_is_not_read(version, client_for, bob):
    train_on(with_system("Be brief."), chat_row(), chat_row())
    mostly_without = text(client_for(bob).get("/playground"))
    train_on(with_system("x" * 300_000))
    huge = text(client_for(bob).get("/playground"))

    assert "Be brief." not in mostly_without
    assert "xxx" not in huge


def test_the_training_prompt_is_restored_for_the_models_chosen_now(version, client_for, bob):
    ask = {"HTTP_HX_REQUEST": "true"}
    without = client_for(bob).get(f"/playground?model={version.model_name}", **ask)
    train_on(with_system("Sort tickets."))

    field = client_for(bob).get(f"/playground?model=anneal-demo&model={version.model_name}", **ask)

    assert text(field).strip().startswith("<div")
    assert "Sort tickets.</textarea>" in text(field)
    assert without.status_code == 204
    assert "no system message" in without["HX-Trigger"]


@pytest.mark.slow
def test_prices_ride_on_the_options(version, client_for, bob):
    for direction, price_nano in (("input", 100), ("output", 200)):
        sku = f"inference:{direction}:anneal-demo"
        set_price(sku=sku, unit="tokens", price_nano=price_nano, per=1_000, by="system", now=db_now())

    page = text(client_for(bob).get("/playground"))

    assert 'data-input="100000" data-output="200000"' in page


def test_a_member_gets_a_token_for_inference_alone_and_for_minutes(organization, client_for, bob):
    response = client_for(bob).post("/playground/token")
    identity = find_key(secret=response.json()["token"])

    assert (identity.organization_id, identity.created_by_id) == (organization.pk, bob.pk)
    assert identity.scopes == {"inference"}
    assert identity.kind == KeyKind.MEMBER
    assert 0 < response.json()["expires_in"] <= 600
    assert "no-store" in response["Cache-Control"]


def test_keys_and_tokens_are_limited(organization, client_for, alice, bob, monkeypatch):
    monkeypatch.setattr(key_operations, "MAX_MEMBER_TOKENS", 1)
    monkeypatch.setattr(key_operations, "MAX_KEYS", 1)
    make_key(organization, alice)
    form = {"name": "another", "scopes": ["view"]}

    answers = [client_for(bob).post("/playground/token") for _ in range(2)]
    refused = client_for(alice).post("/keys", form)

    assert [answer.status_code for answer in answers] == [200, 429]
    assert "Wait a few minutes" in answers[1].json()["error"]["message"]
    assert client_for(alice).post("/playground/token").status_code == 200
    assert refused.status_code == 422 and "at most 1 active keys" in text(refused)


def test_a_viewer_gets_no_token_and_is_told_why(floor, client_for, vera):
    assert client_for(vera).post("/playground/token").status_code == 403
    assert "can't send messages" in text(client_for(vera).get("/playground"))


def test_a_token_is_never_given_for_a_link(client_for, bob):
    assert client_for(bob).get("/playground/token").status_code == 405


def post(client, path: str, body: object):
    return client.post(path, json.dumps(body), content_type="application/json")


HI = {"role": "user", "content": "My card is lost"}


@pytest.mark.slow
def test_the_raw_prompt_is_what_the_template_makes_of_the_messages(version, client_for, vera, charlie, rival):
    for model in ("anneal-demo", version.model_name):
        prompt = post(client_for(vera), "/playground/prompt", {"model": model, "messages": [HI]}).json()["prompt"]
        assert "My card is lost" in prompt
        assert prompt != "My card is lost"

    foreign = post(client_for(charlie), "/playground/prompt", {"model": version.model_name, "messages": [HI]})
    assert foreign.status_code == 404


def test_an_answer_becomes_the_next_row_of_a_dataset(version, organization, client_for, bob, vera):
    answer = {"role": "assistant", "content": "lost_or_stolen_card"}
    first = post(client_for(bob), "/playground/rows", {"messages": [HI, answer]})
    second = post(client_for(bob), "/playground/rows", {"messages": [HI, answer | {"content": "card_arrival"}]})

    saved = DatasetVersion.objects.get(pk=second.json()["file"])
    lines = read_object(saved.object_key).decode().splitlines()
    assert [json.loads(line)["messages"][-1]["content"] for line in lines] == ["lost_or_stolen_card", "card_arrival"]
    assert (saved.number, saved.dataset.name) == (2, "Playground rows")
    assert first.status_code == 200
    assert post(client_for(bob), "/playground/rows", {"messages": [HI]}).json()["error"]["param"] == "messages[0].role"
    assert post(client_for(vera), "/playground/rows", {"messages": [HI, answer]}).status_code == 403


def test_a_row_is_added_to_the_rows_of_a_file_that_was_uploaded_in_another_form(version, organization, client_for, bob):
    of_dataset = {"dataset_name": "Playground rows", "filename": "rows.jsonl.gz"}
    uploaded = make_ready_version(organization, gzip.compress(jsonl(12)), **of_dataset)
    sent = {"messages": [HI, {"role": "assistant", "content": "lost_card"}]}

    saved = DatasetVersion.objects.get(pk=post(client_for(bob), "/playground/rows", sent).json()["file"])
    assert len(read_object(saved.object_key).splitlines()) == 13 and uploaded.status == "ready"
    assert validate_version(version_id=saved.pk, now=db_now()).status == "ready"


@pytest.mark.parametrize(
    ("content", "most_bytes", "sentence"),
    [
        (None, 2**20, "is still being read"),
        (b"\x1f\x8b broken", 2**20, "has no rows. Delete it"),
        (jsonl(12), 100, "Playground rows is full"),
    ],
)
def test_a_file_to_which_no_row_can_be_added_is_named(
    content, most_bytes, sentence, version, organization, client_for, bob, monkeypatch
):
    monkeypatch.setattr(rows, "_MAX_BYTES", most_bytes)
    of_dataset = {"dataset_name": "Playground rows", "filename": "cards.jsonl"}
    make_ready_version(organization, content, **of_dataset) if content else make_version(organization, **of_dataset)

    refused = post(client_for(bob), "/playground/rows", {"messages": [HI, HI | {"role": "assistant"}]})

    assert refused.status_code == 400 and sentence in refused.json()["error"]["message"]
    assert DatasetVersion.objects.filter(dataset__name="Playground rows").count() == 1


@pytest.mark.slow
def test_the_better_of_two_answers_becomes_a_preference(version, client_for, bob):
    answer = {"role": "assistant", "content": "lost_or_stolen_card"}
    asked = {"messages": [HI, answer], "rejected": "card_arrival"}

    saved = post(client_for(bob), "/playground/rows", asked).json()
    same = post(client_for(bob), "/playground/rows", asked | {"rejected": answer["content"]})

    line = json.loads(read_object(DatasetVersion.objects.get(pk=saved["file"]).object_key))
    assert saved["dataset"] == "Playground preferences"
    assert line["input"]["messages"] == [HI]
    assert [line[key][0]["content"] for key in ("preferred_output", "non_preferred_output")] == [
        "lost_or_stolen_card", "card_arrival",
    ]  # fmt: skip
    assert same.json()["error"]["param"] == "non_preferred_output"


def test_the_code_of_a_request_has_its_values_in_each_language(floor, client_for, vera):
    schema = {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": {}}}
    body = {"model": "anneal-demo", "messages": [HI], "seed": 7, "response_format": schema}

    code = post(client_for(vera), "/playground/code", body).json()

    assert set(code) == {"curl", "python", "javascript"}
    assert '"strict": true' in code["javascript"] and '"strict": True' in code["python"]
    assert post(client_for(vera), "/playground/code", []).status_code == 400


def test_a_field_at_fault_is_named_with_what_it_may_be(version, client_for, bob):
    for path in ("/playground/prompt", "/playground/rows"):
        error = post(client_for(bob), path, {"messages": [HI | {"role": "king"}]}).json()["error"]
        assert error["param"] == "messages[0].role"
        assert error["message"].endswith("Use one of 'assistant', 'system', 'user'.")


def test_each_model_asked_for_has_a_column(version, client_for, bob):
    page = text(client_for(bob).get(f"/playground?model={version.model_name}&model=anneal-demo&model=ft:none"))

    assert selected(page) == [version.model_name, "anneal-demo"]
