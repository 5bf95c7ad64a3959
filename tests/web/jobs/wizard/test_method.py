"""The method step: every way to train with its delivery and price, and values that follow a choice."""

import re

import pytest

from apps.datasets.inspection import comparisons
from apps.datasets.tasks import compare
from apps.interfaces.web.wizard.draft import Draft
from tests.factories.chat import PAIR
from tests.factories.datasets import chat_row, jsonl, jsonl_of, make_ready_version
from tests.web.pages import WIZARD_URL, launch, shown


@pytest.mark.parametrize("asked", [{"method": "kto"}, {"objective": "kto"}])
def test_kto_is_refused_with_the_reason(chosen, page, asked) -> None:
    assert "pairs each prompt with its neighbour's answer" in page(chosen | asked | {"step": "method"}, status=422)


def test_each_way_to_train_has_its_price_and_says_what_is_delivered(chosen, page) -> None:
    body = page(chosen | {"step": "method"})
    cards = dict(re.findall(r'name="method" value="(\w+)".*?<span class="d">(.*?)</span>', body))

    assert list(cards) == ["lora", "qlora", "dora", "qdora", "full"]
    assert "merged model, because the serving engine can't load the adapter" in cards["dora"]
    assert "Delivered as a whole model" in cards["full"] and "; not served here" in cards["full"]
    assert "Delivered as" not in cards["lora"]


def test_a_change_of_the_recipe_moves_every_price_and_the_strip(chosen, page) -> None:
    live = {"HX-Request": "true", "HX-Target": "div#price-live"}
    prices = re.compile(r'hx-target="#price-(lora|qlora|dora|qdora|full)" hx-swap="innerHTML">([^<]*)<')
    few, many = (page(chosen | {"step": "method", "epochs": epochs}, headers=live) for epochs in ("10", "100"))
    whole = page(chosen | {"step": "method", "epochs": "10"})
    wrong = page(chosen | {"step": "method", "epochs": "9999"}, status=422, headers=live)

    assert dict(prices.findall(few))["lora"] in whole
    assert all(dict(prices.findall(many))[kind] != cost for kind, cost in prices.findall(few) if cost)
    assert "LoRA, rank 16" in few.partition('hx-target="#recipe-strip"')[2]
    assert "LoRA, rank 16" in whole.partition('id="recipe-strip"')[2].partition("</div>")[0]
    assert "Epochs</a>: epochs must be a whole number from 1 to 100." in wrong


@pytest.mark.slow
def test_a_value_shown_for_another_method_is_chosen_anew_and_one_set_is_kept(chosen, page) -> None:
    first = page(chosen | {"step": "method"})
    fields = {"shown": shown(first, "shown"), "learning_rate": shown(first, "learning_rate"), "epochs": "9"}

    changed = page(chosen | fields | {"method": "full", "step": "method"})

    assert shown(first, "learning_rate") == "0.0002"
    assert shown(changed, "learning_rate") == "2e-05"
    assert shown(changed, "epochs") == "9"


def test_htmx_gets_the_values_that_no_longer_hold(chosen, page) -> None:
    fields = {"shown": "lora.16.False", "lora_alpha": "32", "lora_rank": "64", "step": "method"}

    part = page(chosen | fields, headers={"HX-Request": "true", "HX-Target": "div#price-live"})

    assert 'value="supervised/lora.64.False"' in part
    assert re.search(r'hx-target="#at-lora_alpha".*value="128"', part)
    assert "at-epochs" not in part


def test_the_memory_that_each_method_needs_follows_the_recipe_and_goes_with_a_wrong_one(chosen, page) -> None:
    live = {"HX-Request": "true", "HX-Target": "div#price-live"}
    small, large, wrong = (
        re.findall(
            r'hx-target="#needs-(\w+)"[^>]*>(.*?)</hx-partial>', page(chosen | fields, headers=live, status=code)
        )
        for code, fields in (
            (200, {"step": "method"}),
            (200, {"step": "method", "lora_rank": "64"}),
            (422, {"step": "method", "epochs": "900"}),
        )
    )

    assert [key for key, _ in small] == [key for key, _ in wrong]
    assert dict(small)["lora"].startswith("Needs ") and dict(small)["lora"] != dict(large)["lora"]
    assert not any(text for _, text in wrong)


def test_a_strength_set_for_the_rank_shown_is_kept(chosen, page) -> None:
    fields = {"shown": "lora.64.False", "lora_alpha": "32", "lora_rank": "64", "step": "compute"}

    assert "alpha 32" in page(chosen | fields)


@pytest.mark.slow
def test_inputs_are_trained_where_asked_and_the_preview_follows(floor, chosen, page, client_for, bob) -> None:
    first = page(chosen | {"step": "method"})
    part = page(
        chosen | {"step": "method", "train_on": "all"}, headers={"HX-Request": "true", "HX-Target": "div#price-live"}
    )
    review = page(chosen | {"train_on": "all", "pool": floor.pool.name})
    job = launch(client_for(bob), review)

    marked = [re.findall(r"<mark>(.*?)</mark>", body, re.DOTALL) for body in (first, part)]
    assert len(marked[0]) == 1 and "Hi" in marked[0][0] and "Hello" not in marked[0][0]
    assert "Hello" in "".join(marked[1]) and 'hx-target="#first-row"' in part
    assert re.search(r"<dt>Trained</dt><dd>Answers and inputs.*?changed", review)
    assert job.hyperparameters["train_on"] == "all" and "train_on=all" in Draft.of_job(job).url()


@pytest.mark.slow
def test_preferences_are_trained_by_dpo_unless_orpo_is_asked_for(floor, chosen, page, client_for, bob) -> None:
    rows = make_ready_version(floor.organization, jsonl_of(PAIR) * 12)
    asked = chosen | {"dataset": rows.pk, "objective": "orpo"}

    usual = page(chosen | {"dataset": rows.pk, "method": "full", "step": "method"})
    fields = {"shown": shown(usual, "shown"), "learning_rate": shown(usual, "learning_rate")}
    method = page(asked | fields | {"method": "full", "step": "method"})
    review = page(asked | {"pool": floor.pool.name})
    job = launch(client_for(bob), review)
    dropped = page(asked | {"settings": '{"lora_dropout": 0.2, "warmup_ratio": 0.1}', "step": "method"})

    assert "doesn't take your values for: Adapter dropout." in dropped
    assert '<option value="dpo" selected>' in usual and 'name="train_on"' not in usual
    assert (shown(usual, "learning_rate"), shown(method, "learning_rate")) == ("1e-06", "8e-06")
    assert "<dt>Preference method</dt><dd>ORPO" in review and '"type": "orpo"' in review
    assert job.hyperparameters["objective"] == "orpo" and "objective=orpo" in Draft.of_job(job).url()


def test_only_what_may_be_left_empty_is_called_optional(chosen, page) -> None:
    labels = dict(
        re.findall(r'<label for="id_(\w+)">([^<]+(?:<span class="opt">optional)?)', page(chosen | {"step": "method"}))
    )

    is_optional = {name: "optional" in label for name, label in labels.items()}
    assert {name: is_optional[name] for name in ("judge", "pattern", "schema", "criterion", "reference")} == {
        "judge": False, "pattern": False, "schema": False, "criterion": True, "reference": True,
    }  # fmt: skip


@pytest.mark.slow
def test_rows_that_repeat_the_validation_file_are_counted_before_the_price_is_shown(
    floor, organization, chosen, page, client_for, bob, monkeypatch
) -> None:
    long = "my card has not arrived although you said last week that it would be here by monday morning at"
    rows = [
        make_ready_version(
            organization, jsonl(count) + jsonl_of(chat_row(f"{long} {count}")), filename=f"{count}.jsonl"
        )
        for count in (40, 12)
    ]
    asked = {"dataset": rows[0].pk, "validation": rows[1].pk, "pool": floor.pool.name}

    with monkeypatch.context() as patch:
        patch.setattr(comparisons, "COMPARE_NOW_ROWS", 10)
        before = page(chosen | asked)
        compare(rows[0].pk, rows[1].pk)
        after = page(chosen | asked)
    swapped = {"dataset": rows[1].pk, "validation": rows[0].pk, "cap_nano": "1000000000"}
    refused = client_for(bob).post(WIZARD_URL, chosen | asked | swapped)

    assert "Comparing the files" in before and 'every 2s"' in before and "Rows in both files" not in before
    assert "<dt>Rows in both files</dt><dd>12 rows and 1 near copy, not trained on</dd>" in after
    assert refused.status_code == 422 and "no rows are left to train on" in refused.content.decode()
