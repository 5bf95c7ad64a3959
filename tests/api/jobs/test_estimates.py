"""Estimates before a job and the dry run of a job: who may ask, what comes back, and what is refused by name."""

import datetime
from decimal import Decimal

import pytest

from apps.accounts.models import Region
from apps.billing.models import Hold
from apps.catalog.models import BaseModel, GpuType
from apps.catalog.operations import set_price
from apps.catalog.pricing import GB_MONTH_BYTE_HOURS, STORAGE_SKU
from apps.core.database.clock import db_now
from apps.core.models import OutboxMessage
from apps.core.money import usd_decimal, usd_to_nano
from apps.datasets.models import TokenCount
from apps.finetuning.models import FineTuningJob, GpuPool, JobEvent, Run, ThroughputProbe
from apps.finetuning.quotes import pool_facts
from apps.interfaces.api.native import estimates
from tests.factories.accounts import make_key
from tests.factories.catalog import make_listed_model
from tests.factories.datasets import chat_row, jsonl, jsonl_of, make_ready_version
from tests.factories.finetuning import make_pool, make_training_file, make_worker

URL, JOBS = "/api/v1/estimates", "/v1/fine_tuning/jobs"


@pytest.fixture
def ask(floor) -> dict[str, object]:
    version = make_training_file(floor.organization, floor.base_model)
    return {"model": "anneal-demo", "training_file": version.pk}


def in_hours(hours: float) -> str:
    return (db_now() + datetime.timedelta(hours=hours)).isoformat()


def test_facts_about_pools_are_shared_for_a_moment_and_prices_are_not(post, ask, floor, settings, monkeypatch) -> None:
    settings.ESTIMATE_FACTS_SECONDS = 60
    monkeypatch.setattr(pool_facts, "_recent", {})
    before = post(URL, ask)["pools"][0]
    GpuPool.objects.update(region=Region.objects.create(name="elsewhere"))
    sku = f"training:{floor.pool.name}"
    set_price(sku=sku, unit="gpu_ms", price_nano=5, per=1, by="system", now=db_now())

    after = post(URL, ask)["pools"][0]

    assert after["region"] == before["region"] != "elsewhere"
    assert after["price_usd_per_hour"] == "0.018" != before["price_usd_per_hour"]
    settings.ESTIMATE_FACTS_SECONDS = 0
    assert post(URL, ask)["pools"][0]["region"] == "elsewhere"


# --- who may ask ----------------------------------------------------------------------------------------------------


def test_whoever_sees_the_organization_gets_an_estimate_and_nobody_else(
    api_client, ask, organization, rival, alice, bob, vera, charlie
) -> None:
    def status(person, of=organization) -> int:
        scopes = frozenset({"view"})
        return api_client(make_key(of, person, scopes=scopes)).post(URL, ask, format="json").status_code

    assert [status(person) for person in (alice, bob, vera)] == [200, 200, 200]
    assert status(charlie, of=rival) == 404
    assert api_client().post(URL, ask, format="json").status_code == 401


def test_a_dry_run_needs_what_creating_the_job_needs(api_client, ask, organization, rival, alice, bob, charlie) -> None:
    body = ask | {"dry_run": True}

    def status(person, scopes, of=organization) -> int:
        return api_client(make_key(of, person, scopes=frozenset(scopes))).post(JOBS, body, format="json").status_code

    assert [status(person, {"view", "job.write"}) for person in (alice, bob)] == [200, 200]
    assert status(bob, {"view"}) == 403
    assert status(charlie, {"view", "job.write"}, of=rival) == 404
    assert api_client().post(JOBS, body, format="json").status_code == 401


# --- what comes back ------------------------------------------------------------------------------------------------


def test_badges_go_to_the_cheapest_the_fastest_and_the_one_in_time(post, ask, floor) -> None:
    slow = make_pool("slow-and-cheap")
    make_worker(slow, credential="annw_slow", base_model=floor.base_model)
    floor.job()  # occupies the first pool or the second: one of them has a queue now

    answer = post(URL, ask | {"needed_by": in_hours(5)})
    options = {option["id"]: option for option in answer["pools"]}

    assert set(options) == {"local-cpu", "slow-and-cheap"}
    assert "recommended" in options[answer["recommended"]]["badges"]
    assert "fastest" in options[answer["fastest"]]["badges"]
    assert options[answer["recommended"]]["meets_needed_by"] is True
    assert set(answer["pareto_front"]) <= set(options)
    span = options[answer["fastest"]]["finish_seconds"]
    assert 0 < span["p10"] <= span["p50"] <= span["p90"]


def test_nothing_is_recommended_that_would_be_late(post, ask, monkeypatch) -> None:
    now = db_now()
    monkeypatch.setattr(estimates, "db_now", lambda: now)  # nothing is late before it is asked for
    soon = int(now.timestamp()) + 2

    answer = post(URL, ask | {"needed_by": soon})

    assert answer["needed_by"] == soon
    assert answer["recommended"] is None
    assert answer["pools"][0]["meets_needed_by"] is False
    assert answer["cheapest"] == "local-cpu"


def test_more_gpus_than_a_worker_has_are_quoted_and_not_launchable(post, ask) -> None:
    big_pool("h100", "h100-sxm-80")
    listed = make_listed_model("llama-8b", config=LLAMA_8B, parameter_count=8_030_261_248)
    TokenCount.objects.update(tokens=200_000, longest_row_tokens=2_000, histogram=[[2_000, 100]])  # enough for several

    answer = post(URL, ask | {"model": listed.name, "recipe": {"batch_size": 16}})

    more = [option for option in answer["pools"] if option["gpu_count"] > 1]
    assert more
    assert all(option["pool"] == "h100" and not option["is_launchable"] for option in more)
    assert all(option["block_reason"] for option in more)


def test_a_spot_pool_says_how_often_it_is_expected_to_be_interrupted(post, ask, floor) -> None:
    longer = ask | {"recipe": {"epochs": 100}}  # than the minimum charge
    plain = post(URL, longer)["pools"][0]
    GpuPool.objects.update(is_spot=True, interruptions_per_hour=6.0)
    spot = post(URL, longer)["pools"][0]

    assert (plain["is_spot"], plain["expected_interruptions"]) == (False, None)
    assert spot["is_spot"] is True
    assert spot["expected_interruptions"] > 0
    assert spot["finish_seconds"]["p50"] > plain["finish_seconds"]["p50"]
    assert spot["cost_usd"]["p50"] == plain["cost_usd"]["p50"]


def test_weights_to_download_are_in_the_finish_and_not_in_the_cost(post, ask, floor) -> None:
    def option() -> dict:
        return post(URL, ask | {"recipe": {"epochs": 100}})["pools"][0]  # longer than the minimum charge

    local = option()
    BaseModel.objects.filter(pk=floor.base_model.pk).update(path="", repo="of/somebody")
    fetched = option()  # its worker has measured the model, so the files are there
    ThroughputProbe.objects.update(worker=None)
    absent = option()

    seconds = 2 * floor.base_model.parameter_count / 200e6
    assert [each["estimate"]["download_seconds"] for each in (local, fetched)] == [0, 0]
    assert absent["estimate"]["download_seconds"] == pytest.approx(seconds)
    assert absent["finish_seconds"]["p50"] == pytest.approx(local["finish_seconds"]["p50"] + seconds)
    assert absent["cost_usd"]["p50"] == local["cost_usd"]["p50"]


def test_rows_held_out_are_evaluated_each_epoch_in_the_finish_and_not_in_the_cost(post, ask) -> None:
    whole = post(URL, ask)["pools"][0]["estimate"]
    held = post(URL, ask | {"recipe": {"validation_share": 0.25}})["pools"][0]["estimate"]

    assert held["total_tokens"] == 0.75 * whole["total_tokens"]
    assert (whole["evaluation_seconds"], held["evaluation_seconds"] > 0) == (0, True)


def test_what_does_not_fit_names_the_ways_that_do_with_their_price(post, ask) -> None:
    big_pool("l4", "l4-24")
    listed = make_listed_model("llama-8b", config=LLAMA_8B, parameter_count=8_030_261_248)
    TokenCount.objects.update(longest_row_tokens=32_768)

    options = post(URL, ask | {"model": listed.name, "recipe": {"batch_size": 1}})["pools"]
    option = next(option for option in options if option["id"] == "l4")

    assert option["estimate"]["fits"] is False
    assert option["cost_usd"] == {"p10": None, "p50": None, "p90": None}
    ways = {way["key"]: way for way in option["ways_to_fit"]}
    assert ways
    assert all(way["peak_bytes"] and way["text"] for way in ways.values())
    retried = next(way for way in ways.values() if way["changes"] and not way["pool"])
    changed = ask | {"model": listed.name} | retried["changes"]  # taking the way as it is offered makes the job fit
    changed["recipe"] = {"batch_size": 1} | retried["changes"].get("recipe", {})
    again = next(option for option in post(URL, changed)["pools"] if option["id"] == "l4")
    assert again["estimate"]["fits"] is True


def test_the_hosts_memory_is_a_way_with_its_price_and_what_it_changes(post, ask) -> None:
    big_pool("l4", "l4-24")
    listed = make_listed_model("llama-8b", config=LLAMA_8B, parameter_count=8_030_261_248)
    TokenCount.objects.update(longest_row_tokens=2048)
    full = ask | {"model": listed.name, "recipe": {"batch_size": 1, "method": "full"}}

    before = next(option for option in post(URL, full)["pools"] if option["id"] == "l4")
    [way] = [way for way in before["ways_to_fit"] if way["key"] == "offload"]

    assert way["changes"] == {"recipe": {"cpu_offload": True}}
    assert float(way["cost_usd"]) > 0
    taken = post(URL, full | {"recipe": full["recipe"] | way["changes"]["recipe"]})
    after = next(option for option in taken["pools"] if option["id"] == "l4")["estimate"]
    assert after["fits"]
    assert after["plan"]["cpu_offload"]
    assert after["host_bytes"] > 100 * 2**30


def test_4_bit_weights_are_not_kept_in_the_hosts_memory(post, ask) -> None:
    refused = post(URL, ask | {"quantization": "nf4", "recipe": {"cpu_offload": True}}, status=400)

    assert refused["error"]["param"] == "recipe.cpu_offload"
    assert "4-bit weights stay on the GPU" in refused["error"]["message"]


@pytest.mark.slow
def test_a_dry_run_says_what_would_happen_and_leaves_nothing(post, ask) -> None:
    messages = OutboxMessage.objects.count()

    answer = post(JOBS, ask | {"dry_run": True, "needed_by": in_hours(5), "recipe": {"epochs": 2}})

    assert answer["object"] == "fine_tuning.job.dry_run"
    assert (answer["would_start"], answer["refusal"], answer["pool"]) == (True, None, "local-cpu")
    assert answer["recommended"] == "local-cpu"
    assert answer["recipe"]["epochs"] == 2
    assert not any(model.objects.exists() for model in (FineTuningJob, Run, JobEvent, Hold))
    assert OutboxMessage.objects.count() == messages
    job = post(JOBS, ask | {"recipe": {"epochs": 2}})
    assert float(answer["hold_usd"]) == float(job["held_usd"])


@pytest.mark.usefixtures("metered")
def test_a_dry_run_gives_the_reason_a_launch_would_be_refused(post, ask) -> None:
    answer = post(JOBS, ask | {"dry_run": True, "budget": {"max_cost_usd": "5000"}})

    assert answer["would_start"] is False
    assert answer["refusal"]["code"] == "insufficient_quota"
    assert answer["hold_usd"] is None
    assert answer["pools"]


def test_what_is_delivered_and_its_price_are_told_before_launch(post, ask) -> None:
    dora = post(JOBS, ask | {"dry_run": True, "lora": {"use_dora": True}})["delivery"]
    plain = post(URL, ask)["delivery"]
    both = post(URL, ask | {"exports": ["merged_16bit"]})["delivery"]
    full = post(URL, ask | {"recipe": {"method": "full"}})["delivery"]

    assert (dora["delivered_as"], dora["is_served"]) == ("model", False)
    assert "refuses DoRA" in dora["reason"]
    assert [file["kind"] for file in dora["files"]] == ["adapter", "merged_16bit"]
    assert all((file["price_usd"], file["storage_usd_per_month"]) == ("0", "0") for file in dora["files"])
    assert 0 < dora["files"][0]["bytes"] < dora["files"][1]["bytes"] == full["files"][0]["bytes"]
    assert (plain["delivered_as"], [file["kind"] for file in plain["files"]]) == ("adapter", ["adapter"])
    assert [file["kind"] for file in both["files"]] == ["adapter", "merged_16bit"]


def test_keeping_the_files_costs_what_storage_costs(post, ask) -> None:
    set_price(
        sku=STORAGE_SKU, unit="byte_hours", price_nano=100_000_000, per=GB_MONTH_BYTE_HOURS, by="system", now=db_now()
    )

    [adapter] = post(URL, ask)["delivery"]["files"]

    assert float(adapter["storage_usd_per_month"]) == pytest.approx(adapter["bytes"] / 1e9 * 0.1, abs=1e-9)


def test_a_held_out_share_is_not_priced_as_trained(post, ask) -> None:
    whole, held = (
        post(URL, ask | {"recipe": {"validation_share": share, "epochs": 4}})["pools"][0]["estimate"]
        for share in (0.0, 0.2)
    )

    assert (held["total_tokens"], held["total_trained_tokens"]) == (whole["total_tokens"] * 4 / 5, 4 * 400)
    assert held["steps"] == 4 * 10  # of 80 rows in batches of 8
    assert held["evaluation_seconds"] > 0 == whole["evaluation_seconds"]
    assert held["train_seconds_p50"] < whole["train_seconds_p50"]


@pytest.mark.slow
def test_rows_that_repeat_the_validation_file_or_nearly_do_are_counted_and_not_priced(post, ask, organization) -> None:
    long = "my card has not arrived although you said last week that it would be here by monday morning at"
    near = jsonl_of(*(chat_row(f"{long} {hour}") for hour in range(1, 11)))
    training = make_ready_version(organization, jsonl(30) + near, filename="train.jsonl")
    held_out = make_ready_version(organization, jsonl(10) + jsonl_of(chat_row(f"{long} noon")), filename="held.jsonl")
    asked = ask | {"training_file": training.pk, "dry_run": True, "recipe": {"epochs": 4}}

    alone, beside = post(JOBS, asked), post(JOBS, asked | {"validation_file": held_out.pk})

    assert (alone["left_out_rows"], alone["left_out_near_rows"]) == (0, 0)
    assert (beside["left_out_rows"], beside["left_out_near_rows"]) == (20, 10)
    whole, half = alone["pools"][0]["estimate"], beside["pools"][0]["estimate"]
    assert half["total_trained_tokens"] == whole["total_trained_tokens"] / 2


# --- bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": "gpt-9"}, "model"),
        ({"training_file": "file-unknown"}, "training_file"),
        ({"quantization": "int3"}, "quantization"),
        ({"lora": {"rank": 12}}, "lora.rank"),
        ({"lora": {"rank": "many"}}, "lora.rank"),
        ({"recipe": {"epochs": 10**9}}, "recipe.epochs"),
        ({"recipe": {"batch_size": 0}}, "recipe.batch_size"),
        ({"recipe": {"max_length": -1}}, "recipe.max_length"),
        ({"recipe": {"learning_rate": "fast"}}, "recipe.learning_rate"),
        ({"recipe": {"colour": "red"}}, "recipe.colour"),
        ({"needed_by": "tomorrow"}, "needed_by"),
        ({"needed_by": "2030-01-01T10:00:00"}, "needed_by"),  # no time zone
        ({"needed_by": "2001-01-01T10:00:00Z"}, "needed_by"),
        ({"needed_by": 10**30}, "needed_by"),
        ({"gpu": "abacus"}, "gpu"),
    ],
)
def test_a_bad_field_is_named_by_estimates_and_dry_runs(post, ask, fields, param) -> None:
    status = 404 if param in ("model", "training_file") else 400

    for path, more in ((URL, {}), (JOBS, {"dry_run": True})):
        error = post(path, ask | fields | more, status=status)["error"]
        assert (error["param"], error["type"]) == (param, "invalid_request_error")
        assert error["message"]


def test_a_dry_run_refuses_a_cap_that_does_not_pay_for_one_start(post, ask) -> None:
    options = {option["id"]: option for option in post(URL, ask)["pools"]}
    launchable = next(option for option in options.values() if option["is_launchable"])
    below = usd_decimal(usd_to_nano(Decimal(launchable["least_cap_usd"])) - 1)

    for body, status in ((below, 400), (launchable["least_cap_usd"], 200)):
        asked = ask | {"dry_run": True, "compute": {"pool": launchable["id"]}, "budget": {"max_cost_usd": body}}
        answer = post(JOBS, asked, status=status)

        if status == 400:
            assert (answer["error"]["param"], answer["error"]["code"]) == ("budget.max_cost_usd", "spend_cap_too_low")
            assert f"${launchable['least_cap_usd']}" in answer["error"]["message"]
        else:
            assert (answer["would_start"], answer["hold_usd"]) == (True, launchable["least_cap_usd"])


def test_a_deadline_without_a_dry_run_is_refused_rather_than_ignored(post, ask) -> None:
    assert post(JOBS, ask | {"needed_by": in_hours(1)}, status=400)["error"]["param"] == "needed_by"
    assert not FineTuningJob.objects.exists()


def test_a_dataset_of_zero_trained_tokens_has_no_estimate(post, ask) -> None:
    TokenCount.objects.update(trained_tokens=0)

    for path, more in ((URL, {}), (JOBS, {"dry_run": True}), (JOBS, {})):
        error = post(path, ask | more, status=400)["error"]
        assert (error["param"], error["code"]) == ("training_file", "invalid_training_file")
    assert not FineTuningJob.objects.exists()


def test_a_longest_row_that_cuts_off_every_answer_is_refused_with_the_least_that_works(post, ask) -> None:
    TokenCount.objects.update(starts=[[15, 15, 90], [17, 17, 10]])

    for path, more in ((URL, {}), (JOBS, {"dry_run": True}), (JOBS, {})):
        error = post(path, ask | more | {"recipe": {"max_length": 14}}, status=400)["error"]
        assert (error["param"], error["code"]) == ("recipe.max_length", "no_trainable_tokens")
        assert error["least_max_length"] == 15
        assert "Set max_length to 15 or more." in error["message"]
    assert not FineTuningJob.objects.exists()
    cut = post(URL, ask | {"recipe": {"max_length": 15}})["pools"][0]["estimate"]
    whole = post(URL, ask | {"recipe": {"max_length": 20}})["pools"][0]["estimate"]
    assert 0 < cut["total_trained_tokens"] < whole["total_trained_tokens"]
    assert cut["steps"] <= whole["steps"]


@pytest.mark.parametrize("missing", ["hidden_size", "num_hidden_layers", "vocab_size", "num_attention_heads"])
def test_a_model_whose_config_lacks_a_field_has_no_estimate(post, ask, missing) -> None:
    config = {name: value for name, value in LLAMA_8B.items() if name != missing}
    listed = make_listed_model("broken", config=config)

    error = post(URL, ask | {"model": listed.name}, status=400)["error"]

    assert (error["param"], error["code"]) == ("model", "unsupported_architecture")
    assert missing in error["message"]


LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
    "max_position_embeddings": 131072,
}


def big_pool(name: str, gpu_key: str) -> GpuPool:
    """A pool of real cards without a worker."""
    memory_bytes = {"h100-sxm-80": 85_000_000_000, "l4-24": 23_500_000_000}[gpu_key]
    gpu_type, _ = GpuType.objects.get_or_create(key=gpu_key, defaults={"name": gpu_key, "memory_bytes": memory_bytes})
    pool = make_pool(name, memory_bytes=memory_bytes)
    pool.gpu_type = gpu_type
    pool.save(update_fields=["gpu_type"])
    return pool
