"""/v1/fine_tuning/jobs as OpenAI's own SDK uses it, and as strangers try to."""

import openai
import pytest

from apps.finetuning.models import FineTuningJob
from tests.factories.accounts import make_key
from tests.factories.chat import PAIR
from tests.factories.datasets import jsonl_of, make_ready_version
from tests.support.sdk import create, extended_client, openai_client


def test_a_job_is_created_with_everything_client_code_reads(sdk, file_id):
    job = create(sdk, file_id, suffix="triage", seed=7, metadata={"team": "support"})

    assert job.id.startswith("ftjob-")
    assert (job.object, job.status, job.seed) == ("fine_tuning.job", "queued", 7)
    assert (job.result_files, job.error, job.fine_tuned_model) == ([], None, None)
    assert job.hyperparameters.n_epochs == "auto" and job.model_extra["recipe"]["epochs"] >= 1
    assert isinstance(job.created_at, int)
    assert job.model_extra["queue_position"] == 1
    assert float(job.model_extra["held_usd"]) > 0


def test_openais_hyperparameters_and_ours_both_arrive(sdk, file_id):
    job = create(
        sdk,
        file_id,
        method={"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 2, "batch_size": 8}}},
        extra_body={"lora": {"rank": 8}, "quantization": "nf4", "recipe": {"learning_rate": 0.001}},
    )

    recipe = job.model_extra["recipe"]
    assert (recipe["epochs"], recipe["batch_size"], recipe["lora_rank"]) == (2, 8, 8)
    assert (recipe["method"], recipe["learning_rate"]) == ("qlora", 0.001)


def test_each_value_of_the_recipe_comes_with_its_reason(sdk, file_id):
    job = create(sdk, file_id, hyperparameters={"n_epochs": 2}, extra_body={"lora": {"use_rslora": True}})

    choices = {choice["name"]: choice for choice in job.model_extra["recipe_choices"]}
    assert (choices["epochs"]["value"], choices["epochs"]["reason"]) == (2, "You set it.")
    assert choices["learning_rate"]["is_auto"]
    assert choices["learning_rate"]["reason"].endswith(".")
    assert job.model_extra["recipe"]["use_rslora"] is True
    assert (job.method.type, job.model_extra["delivered_as"]) == ("supervised", "adapter")


def test_a_whole_model_is_said_to_be_delivered_before_it_is_trained(sdk, file_id):
    dora = create(sdk, file_id, extra_body={"lora": {"use_dora": True}})

    assert dora.model_extra["delivered_as"] == "model"


def test_limits_of_a_model_drive_what_a_program_asks(sdk, floor):
    answer = sdk.get(f"{sdk.base_url}".replace("/v1/", "/api/v1/models/anneal-demo/limits"), cast_to=object)

    assert answer["hyperparameters"]["lora_rank"]["options"] == [8, 16, 32, 64]
    assert answer["hyperparameters"]["max_length"]["maximum"] == floor.base_model.context_length
    assert {kind["name"]: kind["delivered_as"] for kind in answer["kinds"]}["DoRA"] == "model"
    assert answer["kinds"][0]["auto"]["dpo"]["learning_rate"]["reason"]


def test_a_held_out_share_and_its_seed_are_part_of_the_job(sdk, file_id):
    job = create(sdk, file_id, seed=7, extra_body={"recipe": {"validation_share": 0.1, "train_on": "all"}})

    recipe = job.model_extra["recipe"]
    assert (recipe["validation_share"], recipe["seed"], recipe["train_on"]) == (0.1, 7, "all")


def test_preferences_are_no_conversations_to_fine_tune_on(sdk, floor):
    version = make_ready_version(floor.organization, jsonl_of(PAIR) * 12)

    with pytest.raises(openai.BadRequestError) as refused:
        create(sdk, version.pk, method={"type": "supervised"})

    assert refused.value.param == "training_file" and "preference rows" in str(refused.value)


@pytest.mark.slow
def test_preferences_are_trained_without_a_reference_where_that_is_asked(sdk, key, floor):
    version = make_ready_version(floor.organization, jsonl_of(PAIR) * 12)
    asked = {"type": "orpo", "orpo": {"hyperparameters": {"n_epochs": 2, "beta": 0.3}}}

    dpo, orpo = create(sdk, version.pk), create(extended_client(key), version.pk, extra_body={"method": asked})

    with pytest.raises(openai.BadRequestError, match="judged by the same model") as refused:
        create(extended_client(key), version.pk, extra_body={"method": asked, "lora": {"dropout": 0.1}})

    assert refused.value.param == "lora.dropout"
    assert dpo.method.type == "dpo" and dpo.model_extra["recipe"]["dpo_beta"] == 0.1
    assert orpo.method.type == "orpo" and orpo.method.model_extra["orpo"]["hyperparameters"]["beta"] == 0.3
    recipe = orpo.model_extra["recipe"]
    assert (recipe["objective"], recipe["orpo_beta"], recipe["dpo_beta"], recipe["epochs"]) == ("orpo", 0.3, 0.1, 2)


def test_a_validation_file_and_a_share_exclude_each_other(sdk, file_id):
    with pytest.raises(openai.BadRequestError) as refused:
        create(sdk, file_id, validation_file=file_id, extra_body={"recipe": {"validation_share": 0.1}})

    assert refused.value.param == "recipe.validation_share"


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"extra_body": {"recipe": {"validation_share": 0.6}}}, "recipe.validation_share", "invalid_value"),
        ({"extra_body": {"recipe": {"train_on": "dreams"}}}, "recipe.train_on", "invalid_value"),
        ({"model": "gpt-9"}, "model", "model_not_found"),
        ({"training_file": "file-unknown"}, "training_file", "file_not_found"),
        ({"suffix": "¿?"}, "suffix", "invalid_value"),
        ({"hyperparameters": {"n_epochs": 0}}, "hyperparameters.n_epochs", "invalid_value"),
        ({"extra_body": {"lora": {"rank": 12}}}, "lora.rank", "invalid_value"),
        ({"extra_body": {"compute": {"pool": "moon"}}}, "compute.pool", "invalid_value"),
        ({"extra_body": {"colour": "red"}}, "colour", "unknown_parameter"),
        (
            {"extra_body": {"evaluation": {"grader": {"type": "regex", "pattern": "("}}}},
            "evaluation.grader",
            "invalid_value",
        ),
        ({"extra_body": {"evaluation": {"max_rows": 0}}}, "evaluation.max_rows", "invalid_value"),
        ({"extra_body": {"exports": ["onnx"]}}, "exports[0]", "invalid_value"),
        (
            {"extra_body": {"exports": ["gguf"]}},
            "exports",
            "invalid_value",
        ),  # GGUF export isn't available the converter
        ({"extra_body": {"evaluation": {"grader": {"type": "judge"}}}}, "evaluation.grader", "invalid_value"),
        ({"method": {"type": "reinforcement"}}, "method.type", "invalid_value"),
        ({"method": {"type": "dpo"}}, "training_file", "invalid_training_file"),
        ({"extra_body": {"recipe": {"method": "magic"}}}, "recipe.method", "invalid_value"),
        ({"extra_body": {"recipe": {"method": "full"}, "quantization": "nf4"}}, "quantization", "invalid_value"),
        ({"extra_body": {"recipe": {"method": "full"}, "lora": {"use_dora": True}}}, "lora.use_dora", "invalid_value"),
        ({"model": "ft:nobody:nowhere::1"}, "model", "model_not_found"),
        ({"model": "ftckpt_1"}, "model", "checkpoint_not_found"),
        ({"extra_body": {"budget": {"max_cost_usd": "lots"}}}, "budget.max_cost_usd", "invalid_value"),
        ({"extra_body": {"budget": {"max_cost_usd": "Infinity"}}}, "budget.max_cost_usd", "invalid_value"),
        ({"extra_body": {"budget": {"max_cost_usd": "1e1000000"}}}, "budget.max_cost_usd", "invalid_value"),
        ({"extra_body": {"budget": {"max_cost_usd": "0.000000001"}}}, "budget.max_cost_usd", "spend_cap_too_low"),
        ({"extra_body": {"budget": {"max_cost_usd": 1e-7}}}, "budget.max_cost_usd", "spend_cap_too_low"),
    ],
)
def test_a_bad_field_is_named_and_nothing_is_left_behind(sdk, file_id, fields, param, code):
    with pytest.raises((openai.BadRequestError, openai.NotFoundError)) as refused:
        create(sdk, file_id, **fields)

    assert (refused.value.param, refused.value.code) == (param, code)
    assert refused.value.request_id
    assert not FineTuningJob.objects.exists()


def test_a_job_too_large_for_any_pool_is_told_what_would_fit(sdk, floor, file_id):
    floor.pool.memory_bytes = 1_000_000
    floor.pool.save(update_fields=["memory_bytes"])

    with pytest.raises(openai.BadRequestError, match="doesn't fit any open pool") as refused:
        create(sdk, file_id)

    assert (refused.value.code, refused.value.param) == ("job_too_large", "compute.pool")
    assert refused.value.body["fixes"]


@pytest.mark.usefixtures("metered")
def test_an_empty_wallet_refuses_the_job_without_a_retry(sdk, floor, file_id):
    with pytest.raises(openai.RateLimitError) as refused:
        create(sdk, file_id, extra_body={"budget": {"max_cost_usd": "1000"}})

    assert (refused.value.code, refused.value.param) == ("insufficient_quota", "budget.max_cost_usd")
    assert refused.value.response.headers["x-should-retry"] == "false"
    assert not FineTuningJob.objects.exists()


def test_a_maximum_above_the_quoted_one_is_refused_and_named(sdk, file_id):
    with pytest.raises(openai.BadRequestError) as refused:
        create(sdk, file_id, extra_body={"budget": {"quoted_max_usd": "0.000001"}})
    assert not FineTuningJob.objects.exists()
    maximum = refused.value.body["maximum_usd"]

    job = create(sdk, file_id, extra_body={"budget": {"quoted_max_usd": maximum}})

    assert (refused.value.code, refused.value.param) == ("maximum_raised", "budget.quoted_max_usd")
    assert job.model_extra["spend_cap_usd"] == maximum


@pytest.mark.slow
def test_a_clients_retry_does_not_make_a_second_job(sdk, file_id):
    first = create(sdk, file_id)
    again = create(sdk, file_id, extra_headers={"x-stainless-retry-count": "1"})
    another = create(sdk, file_id)
    named = create(sdk, file_id, extra_headers={"x-stainless-retry-count": "1", "Idempotency-Key": "a-new-one"})

    assert first.id == again.id
    assert len({first.id, another.id, named.id}) == 3


def test_grader_and_exports_reach_the_worker(sdk, file_id, claim):
    create(
        sdk,
        file_id,
        extra_body={"exports": ["merged_16bit"], "evaluation": {"grader": {"type": "regex", "pattern": "^a"}}},
    )

    spec = claim().claimed.spec

    assert spec.exports == ("merged_16bit",)
    assert (spec.evaluation.grader.kind, spec.evaluation.grader.pattern) == ("regex", "^a")


@pytest.mark.slow
def test_lists_page_through_the_sdk(sdk, file_id):
    created = [create(sdk, file_id).id for _ in range(3)]

    assert [job.id for job in sdk.fine_tuning.jobs.list(limit=1)] == created[::-1]
    events = list(sdk.fine_tuning.jobs.list_events(created[0], limit=2))
    assert [event.message for event in events][-1] == "Created fine-tuning job"
    assert len({event.id for event in events}) == len(events) >= 2


@pytest.mark.slow
def test_a_filter_that_is_not_understood_is_refused_instead_of_ignored(sdk, file_id):
    labelled, plain = create(sdk, file_id, metadata={"team": "a"}), create(sdk, file_id)

    assert [job.id for job in sdk.fine_tuning.jobs.list(metadata={"team": "a"})] == [labelled.id]
    for null in ("null", ""):  # OpenAI's client for Node sends an empty text
        assert [job.id for job in sdk.fine_tuning.jobs.list(extra_query={"metadata": null})] == [plain.id]
    assert len(list(sdk.fine_tuning.jobs.list())) == 2
    with pytest.raises(openai.BadRequestError) as refused:
        sdk.fine_tuning.jobs.list(extra_query={"metadata": '{"team": "b"}'})
    assert refused.value.param == "metadata"


@pytest.mark.parametrize("asked", [{"method": {"type": "kto"}}, {"extra_body": {"recipe": {"method": "KTO"}}}])
def test_kto_is_refused_with_the_reason(sdk, file_id, asked):
    with pytest.raises(openai.BadRequestError, match="pairs each prompt with its neighbour's answer"):
        create(sdk, file_id, **asked)


def test_two_fields_may_set_a_value_alike_or_one_of_them_leaves_it_open(sdk, file_id):
    job = create(
        sdk,
        file_id,
        seed=5,
        hyperparameters={"n_epochs": 2, "batch_size": "auto", "learning_rate_multiplier": 1},
        extra_body={
            "recipe": {"epochs": 2, "batch_size": 4, "learning_rate": 1e-4, "seed": 5, "target_modules": ["q_proj"]},
            "lora": {"target_modules": ["q_proj"]},
        },
    )

    recipe = job.model_extra["recipe"]
    assert [recipe[name] for name in ("epochs", "batch_size", "learning_rate", "seed")] == [2, 4, 1e-4, 5]


def test_two_fields_that_contradict_each_other_are_both_named(sdk, file_id):
    with pytest.raises(openai.BadRequestError) as refused:
        create(sdk, file_id, hyperparameters={"n_epochs": 2}, extra_body={"recipe": {"epochs": 5}})

    told = "'hyperparameters.n_epochs' is 2 and 'recipe.epochs' is 5: leave one of them out."
    assert refused.value.body["message"] == told


@pytest.mark.slow
def test_the_method_replaces_the_older_hyperparameters(sdk, file_id):
    method = {"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 3}}}
    both = create(sdk, file_id, hyperparameters={"n_epochs": 2, "batch_size": 4}, method=method)
    bare = create(sdk, file_id, hyperparameters={"n_epochs": 2}, method={"type": "supervised"})
    alone = create(sdk, file_id, method=method)

    assert [job.model_extra["recipe"]["epochs"] for job in (both, bare)] == [3, 2]
    assert both.model_extra["recipe"]["batch_size"] == alone.model_extra["recipe"]["batch_size"], "chosen here"


def test_the_file_of_a_batch_is_refused_by_its_purpose(sdk, file_id):
    file = sdk.files.create(file=("a.jsonl", b"{}"), purpose="batch")
    with pytest.raises(openai.BadRequestError, match="was uploaded for 'batch', not for 'fine-tune'") as refused:
        create(sdk, file.id)

    assert refused.value.param == "training_file"


@pytest.mark.parametrize("kind", ["supervised", "dpo"])
def test_hyperparameters_that_are_null_are_the_defaults_in_every_place(sdk, floor, file_id, kind):
    rows = file_id if kind == "supervised" else make_ready_version(floor.organization, jsonl_of(PAIR) * 12).pk
    method = {"type": kind, kind: {"hyperparameters": None}}

    job = create(sdk, rows, method=method, extra_body={"hyperparameters": None})

    assert (job.method.type, job.hyperparameters.n_epochs) == (kind, "auto")


@pytest.mark.slow
@pytest.mark.parametrize("mark", ["apply.name", "imported_from"])
def test_a_key_that_may_not_move_aliases_makes_no_job_that_apply_or_import_takes_for_its_own(
    floor, file_id, alice, mark
):
    narrow = extended_client(make_key(floor.organization, alice, scopes=frozenset({"view", "job.write"})))
    marked = {"metadata": {mark: "support-bot"}}

    with pytest.raises(openai.PermissionDeniedError, match="lacks the scope") as refused:
        create(narrow, file_id, **marked)
    assert refused.value.param == f"metadata.{mark}" and not FineTuningJob.objects.exists()
    assert create(narrow, file_id, **marked, extra_body={"dry_run": True}).id is None
    assert create(narrow, file_id, metadata={"applied": "a"}).id


@pytest.mark.slow
@pytest.mark.parametrize("place", ["method", "hyperparameters"])
def test_hyperparameters_come_back_as_they_were_sent(sdk, file_id, place):
    given = {"n_epochs": 2, "batch_size": "auto", "learning_rate_multiplier": 0.5}
    asked = {"type": "supervised", "supervised": {"hyperparameters": given}} if place == "method" else given

    job, plain = create(sdk, file_id, **{place: asked}), create(sdk, file_id, seed=3)

    assert job.hyperparameters.to_dict() == job.method.supervised.hyperparameters.to_dict() == given
    assert plain.hyperparameters.to_dict() == dict.fromkeys(given, "auto")


@pytest.mark.parametrize(
    ("sent", "used"),
    [
        ("My Suffix_v2.1", "my-suffix-v2-1"),
        ("Größe Übermut", "grosse-ubermut"),
        ("-a-", "a"),
        ("ß" * 60, "s" * 64),
        ("triage", "triage"),
    ],
)
def test_a_suffix_may_be_written_as_people_write_it(sdk, floor, file_id, claim, sent: str, used: str):
    job = create(sdk, file_id, suffix=sent)
    claim().start().succeed(floor.base_model)

    done = sdk.fine_tuning.jobs.retrieve(job.id)
    assert job.model_extra["user_provided_suffix"] == sent
    assert done.fine_tuned_model.split(":")[3] == used


def test_a_judge_needs_a_key_that_may_ask_models(floor, alice, file_id):
    judged = {"evaluation": {"grader": {"type": "judge", "model": "anneal-demo", "instructions": "Is it polite?"}}}
    may_not = openai_client(make_key(floor.organization, alice, scopes=frozenset({"view", "job.write"})))
    may = openai_client(make_key(floor.organization, alice, scopes=frozenset({"view", "job.write", "inference"})))

    with pytest.raises(openai.PermissionDeniedError) as refused:
        create(may_not, file_id, extra_body=judged)
    job = create(may, file_id, extra_body=judged)

    assert refused.value.param == "evaluation.grader"
    assert FineTuningJob.objects.get(pk=job.id).requested["evaluation"]["grader"]["model"] == "anneal-demo"


def test_cancel_takes_an_empty_body_and_only_a_live_job(sdk, file_id):
    job = create(sdk, file_id)

    assert sdk.fine_tuning.jobs.cancel(job.id).status == "cancelled"
    with pytest.raises(openai.BadRequestError) as refused:
        sdk.fine_tuning.jobs.cancel(job.id)
    assert refused.value.code == "invalid_state"


@pytest.mark.slow
def test_another_tenants_job_and_file_do_not_exist(sdk, floor, file_id, rival, charlie):
    job = create(sdk, file_id)
    outsider = openai_client(make_key(rival, charlie))

    for call in (outsider.fine_tuning.jobs.retrieve, outsider.fine_tuning.jobs.cancel):
        with pytest.raises(openai.NotFoundError):
            call(job.id)
    with pytest.raises(openai.NotFoundError) as foreign:
        create(outsider, file_id)
    assert foreign.value.param == "training_file"
    assert list(outsider.fine_tuning.jobs.list()) == []


def test_estimates_show_every_pool_with_its_parts(api_client, key, floor, file_id):
    answer = api_client(key).post(
        "/api/v1/estimates", {"model": "anneal-demo", "training_file": file_id}, format="json"
    )

    pool = answer.json()["pools"][0]
    assert (pool["pool"], pool["is_launchable"]) == ("local-cpu", True)
    assert sum(part["bytes"] for part in pool["estimate"]["parts"]) == pool["estimate"]["peak_bytes"]
    assert pool["estimate"]["speed_source"]["kind"] == "probe"
    assert float(pool["cost_usd"]["p10"]) <= float(pool["cost_usd"]["p50"]) <= float(pool["hold_usd"])


def test_an_unknown_method_is_named_as_it_was_sent(sdk, file_id) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        create(sdk, file_id, method={"type": "it's\nnew"})

    assert "method.type 'it's\nnew' is not offered here: use supervised, " in refused.value.body["message"]
