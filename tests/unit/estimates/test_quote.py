"""A quote: speed only from measurements, integer cost, a plan that fits, and what to change when none does."""

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from apps.estimates import gpus
from apps.estimates.calibration import (
    TRANSFER_SPREAD_OTHER_STACK,
    TRANSFER_SPREAD_SAME_STACK,
    interval_from_ratios,
)
from apps.estimates.gpus import GIB
from apps.estimates.placement import choose_plan
from apps.estimates.plans import TrainingPlan
from apps.estimates.quote import Estimate, PoolFacts, QuoteRequest, cost_nano, quote, step_count
from apps.estimates.throughput import ProbeRow, SpeedSource, Unmeasured, tokens_per_second, training_flops_per_token
from tests.bench import estimate_error

CPU = gpus.cpu(memory_bytes=16 * GIB)
PRICE_NANO = 360_000_000  # $0.36 an hour


@pytest.fixture
def small(models):
    return models["SmolLM2-135M"]


@pytest.fixture
def probe(small):
    return ProbeRow(
        gpu_key="cpu",
        architecture=small,
        method="lora",
        tokens_per_second=500.0,
        tokens_per_second_low=480.0,
        tokens_per_second_high=520.0,
        tokens_per_micro_step=1024,
        sequence_length=64,
        source=SpeedSource(kind="probe", text="Probe of this pool", measured_at="2026-01-01T00:00:00Z"),
    )


@pytest.fixture
def ask(small):
    def build(**changes):
        settings = {
            "architecture": small,
            "method": "lora",
            "max_length": 512,
            "batch_size": 16,
            "epochs": 3,
            "rows": 1000,
            "tokens": 64_000,
            "trained_tokens": 10_000,
            "longest_row_tokens": 128,
        }
        return QuoteRequest(**(settings | changes))

    return build


def pool(probe, **changes):
    return PoolFacts(**({"gpu": CPU, "probe": probe, "price_nano": PRICE_NANO, "live_workers": 1} | changes))


def test_a_probed_pool_is_quoted_from_its_probe(ask, probe):
    estimate = quote(request=ask(), pool=pool(probe, seconds_ahead=90.0, live_workers=3, startup_seconds=12.0))

    assert estimate.fits
    assert estimate.steps == 63 * 3
    assert estimate.total_tokens == 192_000
    assert estimate.tokens_per_second == pytest.approx(500, rel=0.01)
    assert estimate.train_seconds_p50 == pytest.approx(192_000 / estimate.tokens_per_second)
    assert estimate.train_seconds_p10 < estimate.train_seconds_p50 < estimate.train_seconds_p90
    assert estimate.billed_seconds_p50 == math.ceil(estimate.train_seconds_p50)
    assert estimate.cost_nano_p50 == estimate.billed_seconds_p50 * 100_000
    assert estimate.queue_seconds == 30.0
    assert estimate.speed_source == probe.source


def test_a_pool_that_nobody_measured_has_memory_but_no_time_or_cost(ask):
    estimate = quote(request=ask(), pool=pool(None, live_workers=0))

    assert estimate.fits
    assert estimate.peak_bytes > 0
    assert estimate.train_seconds_p50 is estimate.cost_nano_p50 is estimate.queue_seconds is None
    assert estimate.speed_source.kind == "none"
    assert "no measurement for CPU yet" in estimate.speed_source.text


def test_a_type_without_workers_is_quoted_from_a_published_row_with_its_url(ask, models, gpu_types, published_speeds):
    request = ask(architecture=models["Qwen2.5-7B"], tokens=1_000_000, longest_row_tokens=2048, max_length=2048)

    facts = pool(None, gpu=gpu_types["a100-sxm-80"], live_workers=0)
    estimate = quote(request=request, pool=facts, published=published_speeds)

    assert estimate.speed_source.kind == "published"
    assert estimate.speed_source.url.startswith("https://")
    assert 1_000 < estimate.tokens_per_second < 10_000
    assert estimate.cost_nano_p10 < estimate.cost_nano_p50 < estimate.cost_nano_p90


def test_a_probe_wins_over_published_rows(ask, probe, published_speeds):
    assert quote(request=ask(), pool=pool(probe), published=published_speeds).speed_source == probe.source


def test_a_job_too_large_for_every_gpu_says_what_would_fit(ask, models, gpu_types):
    request = ask(architecture=models["Llama-3.1-405B"], max_length=8192, longest_row_tokens=8192)
    others = tuple(gpu_types.values())

    estimate = quote(request=request, pool=pool(None, gpu=gpu_types["h100-sxm-80"]), other_gpus=others)

    assert not estimate.fits
    assert "Needs" in estimate.reason
    assert estimate.headroom_bytes < 0
    assert estimate.cost_nano_p50 is None
    assert any(fix.method == "qlora" and fix.gpu_key for fix in estimate.fixes)
    assert all(fix.peak_bytes <= gpu_types[fix.gpu_key].memory_bytes for fix in estimate.fixes if fix.gpu_key)


def test_each_suggested_change_alone_makes_the_job_fit(ask, models, gpu_types):
    card = gpu_types["h100-sxm-80"]
    request = ask(architecture=models["Qwen2.5-32B"], max_length=32_768, longest_row_tokens=32_768)

    estimate = quote(request=request, pool=pool(None, gpu=card), other_gpus=tuple(gpu_types.values()))

    assert not estimate.fits
    assert {fix.key for fix in estimate.fixes} == {"method", "max_length", "gpu"}
    for fix in estimate.fixes:
        changes = {"method": fix.method, "max_length": fix.max_length}
        changed = msgspec.structs.replace(request, **{key: value for key, value in changes.items() if value})
        gpu = gpu_types[fix.gpu_key] if fix.gpu_key else card
        assert quote(request=changed, pool=pool(None, gpu=gpu)).fits, fix.text


def test_when_nothing_fits_the_quote_still_answers(ask, models):
    estimate = quote(request=ask(architecture=models["Llama-3.1-405B"]), pool=pool(None))

    assert [fix.key for fix in estimate.fixes] == ["none"]
    assert estimate.fixes[0].text


def test_rows_longer_than_the_model_reads_are_refused_with_its_limit(ask):
    estimate = quote(request=ask(max_length=16_384, longest_row_tokens=16_384), pool=pool(None))

    assert not estimate.fits
    assert "8,192" in estimate.reason
    assert estimate.fixes[0].max_length == 8192


def test_the_plan_accumulates_to_exactly_the_batch(models, gpu_types):
    placement = choose_plan(
        architecture=models["Llama-3.1-8B"],
        method="qlora",
        gpu=gpu_types["l4-24"],
        max_length=4096,
        batch_size=24,
    )

    assert placement.fits
    assert placement.plan.batch_size == 24
    assert 1 < placement.plan.micro_batch_size < 24
    assert placement.plan.gradient_checkpointing


def test_a_small_job_runs_whole_batches_without_checkpointing(ask, probe):
    plan = quote(request=ask(), pool=pool(probe)).plan

    assert (plan.micro_batch_size, plan.gradient_accumulation_steps, plan.gradient_checkpointing) == (16, 1, False)


def test_a_probe_of_another_gpu_type_is_a_mistake(small, probe, gpu_types):
    plan = TrainingPlan(method="lora", max_length=64)

    with pytest.raises(ValueError, match="says nothing"):
        tokens_per_second(architecture=small, plan=plan, gpu=gpu_types["t4-16"], probe=probe)


def test_without_a_probe_the_speed_is_unmeasured(small):
    plan = TrainingPlan(method="lora", max_length=64)

    assert isinstance(tokens_per_second(architecture=small, plan=plan, gpu=CPU, probe=None), Unmeasured)


def test_twice_the_layers_take_about_twice_the_time(small, probe):
    deeper = msgspec.structs.replace(small, n_layers=2 * small.n_layers, tie_word_embeddings=False)
    plan = TrainingPlan(method="lora", max_length=64, micro_batch_size=16, gradient_checkpointing=False)

    shallow, deep = (
        tokens_per_second(architecture=shape, plan=plan, gpu=CPU, probe=probe).tokens_per_second
        for shape in (small, deeper)
    )

    assert shallow == pytest.approx(500)
    assert 1.6 < shallow / deep < 2.0


def test_training_costs_4p_for_adapters_6p_for_all_and_2p_more_with_checkpointing(models):
    def per_weight(method, gradient_checkpointing):
        architecture = msgspec.structs.replace(models["Llama-3.1-70B"], vocab_size=1)
        flops = training_flops_per_token(
            architecture=architecture,
            method=method,
            lora_rank=1,
            target_modules=("q_proj",),
            gradient_checkpointing=gradient_checkpointing,
            row_tokens=1,
        )
        return flops / 68_451_041_280

    assert per_weight("lora", False) == pytest.approx(4, rel=0.01)
    assert per_weight("full", False) == pytest.approx(6, rel=0.01)
    assert per_weight("lora", True) == pytest.approx(6, rel=0.01)
    assert per_weight("full", True) == pytest.approx(8, rel=0.01)


def test_the_spreads_are_those_the_benchmark_measures(published_speeds):
    same, other = (
        estimate_error.by_group(estimate_error.transfers(published_speeds, same_stack=stack)) for stack in (True, False)
    )

    assert same["all (1 GPU)"].log_spread == pytest.approx(TRANSFER_SPREAD_SAME_STACK, abs=0.01)
    assert other["all"].log_spread == pytest.approx(TRANSFER_SPREAD_OTHER_STACK, abs=0.01)


def test_the_probes_own_job_is_narrower_than_a_carried_one(ask, probe, models):
    near = quote(request=ask(), pool=pool(probe))
    far = quote(request=ask(architecture=models["SmolLM2-360M"]), pool=pool(probe))

    assert near.train_seconds_p90 / near.train_seconds_p50 < far.train_seconds_p90 / far.train_seconds_p50


def test_ten_finished_runs_replace_every_assumption(ask, probe):
    ratios = tuple(1.1 + 0.01 * step for step in range(11))

    estimate = quote(request=ask(), pool=pool(probe, finished_ratios=ratios))

    assert estimate.interval_origin == "this pool's last 11 finished runs"
    assert interval_from_ratios(ratios).p50 == pytest.approx(1.15)
    assert estimate.train_seconds_p50 == pytest.approx(1.15 * 192_000 / estimate.tokens_per_second)


def test_an_estimate_survives_json(ask, probe):
    estimate = quote(request=ask(), pool=pool(probe))

    assert msgspec.convert(msgspec.to_builtins(estimate), Estimate) == estimate


@pytest.mark.parametrize("field", ["rows", "tokens", "epochs", "batch_size", "max_length"])
def test_an_empty_request_is_refused(ask, field):
    with pytest.raises(ValueError, match=field):
        ask(**{field: 0})


@given(
    price=st.integers(0, 10**13), more=st.integers(0, 10**12), seconds=st.integers(0, 10**8), per=st.integers(1, 86_400)
)
def test_cost_is_an_integer_rounded_half_up_and_rises_with_price_and_time(price, more, seconds, per):
    cost = cost_nano(price_nano=price, price_per_seconds=per, seconds=seconds)

    assert isinstance(cost, int)
    assert abs(2 * (cost * per - price * seconds)) <= per
    assert cost <= cost_nano(price_nano=price + more, price_per_seconds=per, seconds=seconds)
    assert cost <= cost_nano(price_nano=price, price_per_seconds=per, seconds=seconds + 1)


def test_cost_rounds_half_up():
    assert [cost_nano(price_nano=1, price_per_seconds=2, seconds=seconds) for seconds in (0, 1, 2, 3)] == [0, 1, 1, 2]


@pytest.mark.parametrize(
    ("hourly", "hours", "total"), [("32.77", 10, "327.70"), ("41.04", 4, "164.16"), ("17.50", 20, "350.00")]
)
def test_total_cost_of_compute_is_rate_times_hours(hourly, hours, total):
    price_nano, expected = (int(amount.replace(".", "")) * 10**7 for amount in (hourly, total))

    assert cost_nano(price_nano=price_nano, price_per_seconds=3600, seconds=hours * 3600) == expected


@given(rows=st.integers(1, 10**6), batch_size=st.integers(1, 512), epochs=st.integers(1, 20))
def test_every_row_is_in_one_step_of_each_epoch(rows, batch_size, epochs):
    steps = step_count(rows=rows, batch_size=batch_size, epochs=epochs)

    assert (steps // epochs - 1) * batch_size < rows <= steps // epochs * batch_size
