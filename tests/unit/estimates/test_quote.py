"""A quote: physics scaled by measurements, integer cost, a plan that fits, and what to change when none does."""

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from apps.estimates import gpus
from apps.estimates.durations import padded_mean
from apps.estimates.errors import EstimateError
from apps.estimates.gpus import GIB
from apps.estimates.placement import choose_plan, task_of
from apps.estimates.quote import (
    Correction,
    Estimate,
    PoolFacts,
    QuoteRequest,
    cost_nano,
    quote,
    quote_placements,
    step_count,
)
from apps.estimates.throughput import ProbeRow, SpeedSource

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
            "checkpoints": 0,
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
    assert estimate.tokens_per_second == pytest.approx(500, rel=0.05)  # a little is padding
    assert estimate.train_seconds_p50 == pytest.approx(192_000 / estimate.tokens_per_second)
    assert estimate.train_seconds_p10 < estimate.train_seconds_p50 < estimate.train_seconds_p90
    assert estimate.billed_seconds_p50 == math.ceil(estimate.train_seconds_p50)
    assert estimate.cost_nano_p50 == math.ceil(estimate.train_seconds_p50 * 1000) * 100
    assert estimate.queue_seconds == 30.0
    assert estimate.speed_source == probe.source


def test_a_pool_that_nobody_measured_has_memory_but_no_time_or_cost(ask):
    estimate = quote(request=ask(), pool=pool(None, live_workers=0))

    assert estimate.fits
    assert estimate.peak_bytes > 0
    assert estimate.train_seconds_p50 is estimate.cost_nano_p50 is estimate.queue_seconds is None
    assert estimate.speed_source.kind == "none"
    assert "no measurement for CPU yet" in estimate.speed_source.text


def test_a_type_that_nobody_probed_is_computed_and_points_at_a_published_row(ask, models, gpu_types, published_speeds):
    request = ask(architecture=models["Qwen2.5-7B"], tokens=1_000_000, longest_row_tokens=2048, max_length=2048)

    facts = pool(None, gpu=gpu_types["a100-sxm-80"], live_workers=0)
    estimate = quote(request=request, pool=facts, published=published_speeds)

    assert estimate.speed_source.kind == "physics"
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
    assert any(fix.key == "offload" or fix.gpu_key for fix in estimate.fixes)
    assert all(fix.peak_bytes <= gpu_types[fix.gpu_key].memory_bytes for fix in estimate.fixes if fix.gpu_key)


def test_each_suggested_change_alone_makes_the_job_fit(ask, models, gpu_types):
    card = gpu_types["h100-sxm-80"]
    request = ask(architecture=models["Qwen2.5-32B"], max_length=32_768, longest_row_tokens=32_768)

    estimate = quote(request=request, pool=pool(None, gpu=card), other_gpus=tuple(gpu_types.values()))

    assert not estimate.fits
    assert {fix.key for fix in estimate.fixes} == {"method", "max_length", "offload", "gpu"}
    for fix in estimate.fixes:
        changes = {"method": fix.method, "max_length": fix.max_length, "cpu_offload": fix.cpu_offload}
        changed = msgspec.structs.replace(request, **{key: value for key, value in changes.items() if value})
        gpu = gpu_types[fix.gpu_key] if fix.gpu_key else card
        assert fix.train_seconds_p50 > 0
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


def test_the_plan_accumulates_to_exactly_the_batch(ask, models, gpu_types):
    request = ask(
        architecture=models["Llama-3.1-8B"], method="qlora", max_length=4096, longest_row_tokens=4096, batch_size=24
    )

    placement = choose_plan(task_of(request), gpu_types["l4-24"])

    assert placement.fits
    assert placement.plan.batch_size == 24
    assert 1 < placement.plan.micro_batch_size < 24
    assert placement.plan.gradient_checkpointing


def test_a_small_job_runs_whole_batches_without_checkpointing(ask, probe):
    plan = quote(request=ask(), pool=pool(probe)).plan

    assert (plan.micro_batch_size, plan.gradient_accumulation_steps, plan.gradient_checkpointing) == (16, 1, False)


def test_a_probe_of_another_gpu_type_is_a_mistake(ask, probe, gpu_types):
    with pytest.raises(ValueError, match="says nothing"):
        quote(request=ask(), pool=pool(probe, gpu=gpu_types["t4-16"]))


def test_twice_the_layers_take_about_twice_the_time(ask, small, probe):
    deeper = msgspec.structs.replace(small, n_layers=2 * small.n_layers, tie_word_embeddings=False)

    shallow, deep = (
        quote(request=ask(architecture=shape), pool=pool(probe)).tokens_per_second for shape in (small, deeper)
    )

    assert 1.5 < shallow / deep < 2.0


def test_a_faster_probe_is_a_faster_quote_by_as_much(ask, probe):
    twice = msgspec.structs.replace(probe, tokens_per_second=2 * probe.tokens_per_second)

    slow, fast = (quote(request=ask(), pool=pool(each)).train_seconds_p50 for each in (probe, twice))

    assert slow / fast == pytest.approx(2)


def test_the_probes_own_job_is_narrower_than_a_carried_one(ask, probe, models):
    near = quote(request=ask(), pool=pool(probe))
    far = quote(request=ask(architecture=models["SmolLM2-360M"]), pool=pool(probe))

    assert near.train_seconds_p90 / near.train_seconds_p50 < far.train_seconds_p90 / far.train_seconds_p50


def test_what_runs_taught_corrects_time_and_memory(ask, probe):
    learned = Correction(
        origin="25 finished runs", runs=25, time_factor=1.3, time_p10=0.9, time_p90=1.1, memory_factor=1.1,
        memory_p10=0.98, memory_p90=1.02,
    )  # fmt: skip
    plain, taught = (quote(request=ask(), pool=pool(probe, correction=each)) for each in (None, learned))

    assert taught.train_seconds_p50 == pytest.approx(1.3 * plain.train_seconds_p50)
    assert taught.train_seconds_p90 == pytest.approx(1.3 * 1.1 * plain.train_seconds_p50)
    assert taught.tokens_per_second == pytest.approx(plain.tokens_per_second / 1.3)
    assert taught.peak_bytes == pytest.approx(1.1 * plain.peak_bytes, rel=1e-6)
    assert taught.peak_bytes_p90 == pytest.approx(1.1 * 1.02 * plain.peak_bytes, rel=1e-6)


def test_more_gpus_finish_sooner_and_cost_is_of_all_of_them(ask, models, gpu_types):
    request = ask(
        architecture=models["Llama-3.1-8B"], max_length=2048, longest_row_tokens=2048, tokens=1_500_000, rows=1500
    )
    facts = pool(None, gpu=gpu_types["h100-sxm-80"], gpus_per_worker=8)

    estimates = quote_placements(task=task_of(request), pool=facts)

    assert [each.gpu_count for each in estimates] == [1, 2, 4, 8]
    seconds = [each.train_seconds_p50 for each in estimates]
    assert seconds == sorted(seconds, reverse=True)
    for each in estimates:
        assert each.plan.batch_size == request.batch_size
        assert each.cost_nano_p50 == math.ceil(each.train_seconds_p50 * 1000) * each.gpu_count * 100
        assert 0 < each.utilisation < 1
        assert each.bottleneck in {"compute", "memory_bandwidth", "interconnect", "fixed_cost"}
        assert sum(part.seconds for part in each.time_parts) > 0


def test_finish_is_queue_download_startup_and_training_and_only_training_is_billed(ask, probe):
    plain = quote(request=ask(), pool=pool(probe))
    facts = pool(probe, seconds_ahead=100.0, startup_seconds=20.0, download_bytes=10**9, download_bytes_per_second=1e8)

    estimate = quote(request=ask(), pool=facts)

    assert estimate.download_seconds == 10
    assert estimate.finish_seconds_p50 == pytest.approx(130 + plain.train_seconds_p50)
    assert estimate.cost_nano_p50 == plain.cost_nano_p50


def test_spot_adds_the_work_that_interruptions_undo(ask, probe):
    plain = quote(request=ask(), pool=pool(probe))
    facts = pool(probe, is_spot=True, interruptions_per_hour=2.0, checkpoint_seconds_apart=600.0, restart_seconds=100.0)

    estimate = quote(request=ask(), pool=facts)

    assert estimate.interruptions == pytest.approx(estimate.train_seconds_p50 * 2 / 3600)
    assert estimate.redone_seconds == pytest.approx(estimate.interruptions * 400)
    assert estimate.train_seconds_p50 == pytest.approx(plain.train_seconds_p50 + estimate.redone_seconds)
    assert estimate.cost_nano_p50 > plain.cost_nano_p50


def test_spot_that_bills_durable_steps_alone_is_later_and_not_dearer(ask, probe):
    plain = quote(request=ask(), pool=pool(probe, live_workers=1))
    facts = pool(probe, live_workers=1, is_spot=True, interruptions_per_hour=2.0, bills_redone_work=False)

    estimate = quote(request=ask(), pool=facts)

    assert estimate.redone_seconds > 0
    assert (estimate.train_seconds_p50, estimate.cost_nano_p90) == (plain.train_seconds_p50, plain.cost_nano_p90)
    assert estimate.finish_seconds_p50 == pytest.approx(plain.finish_seconds_p50 + estimate.redone_seconds)


def test_packing_wastes_less_than_padding_and_a_histogram_says_how_much(ask):
    lengths = ((50, 900), (1000, 100))
    request = ask(
        rows=1000, tokens=145_000, longest_row_tokens=1000, max_length=1000, row_lengths=lengths, trained_tokens=100_000
    )

    assert padded_mean(request, 1) == pytest.approx(145)
    assert padded_mean(request, 8) == pytest.approx(1000 - 950 * 0.9**8)
    assert padded_mean(msgspec.structs.replace(request, row_lengths=()), 4) == pytest.approx(145 * 25 / 12)


def test_evaluations_and_checkpoints_take_time_that_is_not_billed(ask, probe):
    plain, more = (
        quote(request=ask(evaluations=count, evaluation_tokens=20_000, checkpoints=count), pool=pool(probe))
        for count in (0, 3)
    )

    assert more.evaluation_seconds > 0
    assert more.checkpoint_seconds > 3
    added = more.evaluation_seconds + more.checkpoint_seconds
    assert more.finish_seconds_p50 == pytest.approx(plain.finish_seconds_p50 + added)
    assert more.cost_nano_p50 == plain.cost_nano_p50


def test_an_estimate_survives_json(ask, probe):
    estimate = quote(request=ask(), pool=pool(probe))

    assert msgspec.convert(msgspec.to_builtins(estimate), Estimate) == estimate


@pytest.mark.parametrize("field", ["rows", "tokens", "trained_tokens", "epochs", "batch_size", "max_length"])
@pytest.mark.parametrize("value", [0, -1, 10**17])
def test_an_empty_or_absurd_request_is_refused_by_its_field(ask, field, value):
    with pytest.raises(EstimateError, match=field) as refused:
        ask(**{field: value})

    assert refused.value.field == field


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"lora_rank": 100_000}, "lora_rank"),
        ({"method": "prefix"}, "method"),
        ({"optimizer": "lion9"}, "optimizer"),
        ({"stack": "mine"}, "stack"),
        ({"lora_dropout": 1.0}, "lora_dropout"),
        ({"trained_tokens": 10**9}, "trained_tokens"),
        ({"micro_batch_size": 3}, "micro_batch_size"),
        ({"method": "full", "use_dora": True}, "use_dora"),
        ({"row_lengths": ((0, 5),)}, "row_lengths"),
    ],
)
def test_choices_that_do_not_exist_are_refused_by_their_field(ask, changes, field):
    with pytest.raises(EstimateError) as refused:
        ask(**changes)

    assert refused.value.field == field


def test_an_unknown_gpu_and_an_uneven_share_are_refused(ask, gpu_types):
    with pytest.raises(EstimateError) as unknown:
        gpus.find(gpu_types, "h1000")
    with pytest.raises(EstimateError) as uneven:
        quote(request=ask(), pool=pool(None, gpu=gpu_types["h100-sxm-80"]), gpu_count=3)

    assert (unknown.value.field, uneven.value.field) == ("gpu", "batch_size")


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


def test_what_does_not_fit_is_offered_with_the_hosts_memory_at_its_price(ask, models, gpu_types):
    request = ask(architecture=models["Llama-3.1-70B"], max_length=2048, longest_row_tokens=2048, batch_size=8)
    card = pool(None, gpu=gpu_types["h100-sxm-80"])

    [way] = [fix for fix in quote(request=request, pool=card).fixes if fix.key == "offload"]
    there = quote(request=msgspec.structs.replace(request, cpu_offload=True), pool=card)

    assert there.fits
    assert (there.plan.parallelism, there.plan.cpu_offload) == ("zero3", True)
    assert 131 * GIB < there.host_bytes == way.host_bytes < 135 * GIB  # the base, 2 bytes a parameter
    assert way.cost_nano_p50 == pytest.approx(there.cost_nano_p50, rel=1e-6)
    on_two = quote(request=request, pool=pool(None, gpu=gpu_types["b300-sxm-270"]))
    assert there.tokens_per_second < on_two.tokens_per_second


def test_the_hosts_memory_must_hold_what_rests_there(ask, models, gpu_types):
    request = ask(architecture=models["Llama-3.1-8B"], method="full", max_length=2048, longest_row_tokens=2048)
    small, large = (pool(None, gpu=gpu_types["h100-sxm-80"], host_memory_bytes=n * GIB) for n in (64, 256))

    assert "offload" not in {fix.key for fix in quote(request=request, pool=small).fixes}
    assert "offload" in {fix.key for fix in quote(request=request, pool=large).fixes}
    refused = quote(request=msgspec.structs.replace(request, cpu_offload=True), pool=small)
    assert not refused.fits
    assert "host's memory; a worker here has 64.0 GiB" in refused.reason
    # weights, gradients and two moments in fp32
    taken = quote(request=msgspec.structs.replace(request, cpu_offload=True), pool=large)
    assert taken.host_bytes == pytest.approx(16 * 8.03e9, rel=0.02)


def test_the_trainer_keeps_4_bit_weights_on_the_gpu(ask, models, gpu_types):
    request = ask(architecture=models["Llama-3.1-405B"], method="qlora")

    with pytest.raises(EstimateError) as refusal:
        msgspec.structs.replace(request, cpu_offload=True).__post_init__()

    assert refusal.value.field == "cpu_offload"
    found = quote(request=request, pool=pool(None, gpu=gpu_types["h100-sxm-80"]), other_gpus=tuple(gpu_types.values()))
    assert "offload" not in {fix.key for fix in found.fixes}


def test_pairs_of_answers_take_the_memory_of_two_rows_and_a_reference_ahead(ask, models, gpu_types):
    shape = {"architecture": models["Llama-3.1-8B"], "max_length": 1024, "longest_row_tokens": 1024}
    shape |= {"tokens": 1_000_000, "gradient_checkpointing": False}
    pairs = ask(**shape, is_preference=True, rows=500, micro_batch_size=1)
    rows = ask(**shape, rows=1000, micro_batch_size=2, batch_size=32)
    card = pool(None, gpu=gpu_types["h100-sxm-80"])

    of_pairs, of_rows = (quote(request=request, pool=card) for request in (pairs, rows))

    assert of_pairs.peak_bytes == of_rows.peak_bytes  # the base, adapters off, is its own reference
    assert of_pairs.train_seconds_p50 == pytest.approx(of_rows.train_seconds_p50, rel=0.02)
    # A forward pass of both answers of every row, once: less than half of an epoch, for it has no adapters.
    one_epoch = of_pairs.train_seconds_p50 / 3
    assert 0.25 * one_epoch < of_pairs.reference_seconds < 0.5 * one_epoch
    assert of_rows.reference_seconds == 0.0
    assert of_pairs.run_seconds_p50 - of_pairs.train_seconds_p50 >= of_pairs.reference_seconds
    assert of_pairs.cost_nano_p50 == math.ceil(of_pairs.train_seconds_p50 * 1000) * 100  # not billed
    of_orpo = quote(request=msgspec.structs.replace(pairs, has_reference=False), pool=card)
    assert of_orpo.reference_seconds == 0.0 and of_orpo.train_seconds_p50 == of_pairs.train_seconds_p50


def test_a_loop_without_a_reference_ahead_asks_it_in_every_step(ask, models, gpu_types):
    shape = {"max_length": 1024, "longest_row_tokens": 1024, "stack": "hf", "gradient_checkpointing": True}
    card = pool(None, gpu=gpu_types["h100-sxm-80"])

    def of(name="Llama-3.1-8B", **changes):
        return quote(request=ask(architecture=models[name], **shape, tokens=1_000_000, **changes), pool=card)

    two, one = {"rows": 500, "is_preference": True, "micro_batch_size": 1}, {"micro_batch_size": 2, "batch_size": 32}
    lora, full = of(**two), of("Qwen2.5-1.5B", method="full", **two)
    alone = of("Qwen2.5-1.5B", method="full", **one)

    assert lora.reference_seconds == full.reference_seconds == 0.0
    assert 1.2 < lora.train_seconds_p50 / of(**one).train_seconds_p50 < 1.4  # a third pass beside three
    assert full.parts[0].bytes == 2 * alone.parts[0].bytes  # full training needs the model as it was beside itself
    orpo = of("Qwen2.5-1.5B", method="full", **two, has_reference=False)
    assert orpo.parts[0].bytes == alone.parts[0].bytes and orpo.train_seconds_p50 < full.train_seconds_p50


def test_several_gpus_wait_for_the_workers_that_have_them(ask, models, gpu_types):
    request = ask(architecture=models["Llama-3.1-8B"], max_length=2048, longest_row_tokens=2048)
    facts = pool(
        None, gpu=gpu_types["h100-sxm-80"], live_workers=4, worker_gpus=(1, 1, 1, 4), gpus_per_worker=4,
        seconds_ahead=1200.0, ahead_by_gpus=((1, 400.0), (2, 300.0), (4, 500.0)), max_gpu_count=8,
    )  # fmt: skip

    found = {each.gpu_count: each for each in quote_placements(task=task_of(request), pool=facts)}

    assert found[1].queue_seconds == 300.0  # all work over all workers
    assert found[2].queue_seconds == found[4].queue_seconds == 800.0  # what only the large one does
    assert found[8].queue_seconds is found[8].finish_seconds_p50 is None  # nobody has eight
