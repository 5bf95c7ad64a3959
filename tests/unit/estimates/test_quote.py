"""A quote: physics scaled by measurements, finish, cost, spot, and what several GPUs change."""

import math

import msgspec
import pytest

from apps.estimates.intervals import whole_job_factor
from apps.estimates.models.architectures import linear_parameter_count
from apps.estimates.placement import task_of
from apps.estimates.quote import Correction, Estimate, quote, quote_placements
from tests.unit.estimates.pools import pool


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


@pytest.mark.parametrize(
    ("waited_share", "middle", "upper"),
    [
        (0.0, 1.0, 1.31),
        (0.02, 1.0, 1.31),
        (0.1, 1 / 0.92, 1.31 / 0.92),
        (0.2, 1 / 0.82, 1.31 / 0.82),
        (0.4, 1 / 0.8, 1.80),
        (0.78, 1 / 0.8, 4.5),
        (0.99, 1 / 0.8, 5.0),
        (7.0, 1 / 0.8, 5.0),
    ],
)
def test_a_probe_that_waited_for_cores_raises_the_middle_a_little_and_widens_the_range(
    ask, probe, waited_share, middle, upper
):
    """The job has the probe's own batch and lengths: nothing is carried over. Factors are of the quiet P50."""
    own = ask(batch_size=16, tokens=64_000, rows=1000)
    quiet = quote(request=own, pool=pool(probe))
    waiting = pool(msgspec.structs.replace(probe, waited_share=waited_share))
    busy = quote(request=own, pool=waiting)

    alone = whole_job_factor(waiting) * busy.tokens_per_second  # the loop's own speed, which waiting does not change
    assert alone == pytest.approx(whole_job_factor(pool(probe)) * quiet.tokens_per_second)
    assert busy.train_seconds_p10 == quiet.train_seconds_p10
    assert busy.train_seconds_p50 / quiet.train_seconds_p50 == pytest.approx(middle, rel=0.01)
    assert busy.train_seconds_p90 / quiet.train_seconds_p50 == pytest.approx(upper, rel=0.03)


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


def test_a_token_that_is_not_trained_needs_no_head(ask, probe):
    """SmolLM2's head is a fifth of its weights. Other frameworks compute it for every token."""
    few, all_ = ask(trained_tokens=6_400), ask(trained_tokens=64_000)

    def seconds(request, **changes):
        return quote(request=msgspec.structs.replace(request, **changes), pool=pool(probe)).train_seconds_p50

    assert 1.1 < seconds(all_) / seconds(few) < 1.5
    assert seconds(all_, stack="hf") == seconds(few, stack="hf")


def test_the_probes_own_job_is_narrower_than_a_carried_one(ask, probe, models):
    near = quote(request=ask(), pool=pool(probe))
    far = quote(request=ask(architecture=models["SmolLM2-360M"]), pool=pool(probe))

    assert near.train_seconds_p90 / near.train_seconds_p50 < far.train_seconds_p90 / far.train_seconds_p50


def test_what_runs_taught_corrects_time_and_memory(ask, probe):
    learned = Correction(
        origin="25 finished runs", runs=25, time_factor=1.3, time_p10=0.9, time_p90=1.1, memory_factor=1.1,
        memory_p10=0.98, memory_p90=1.02, days=5,
    )  # fmt: skip
    plain, taught = (quote(request=ask(), pool=pool(probe, correction=each)) for each in (None, learned))

    assert taught.train_seconds_p50 == pytest.approx(1.3 * plain.train_seconds_p50)
    assert taught.train_seconds_p90 == pytest.approx(1.3 * 1.1 * plain.train_seconds_p50)
    assert taught.tokens_per_second == pytest.approx(plain.tokens_per_second / 1.3)
    assert taught.peak_bytes == pytest.approx(1.1 * plain.peak_bytes, rel=1e-6)
    assert taught.peak_bytes_p90 == pytest.approx(1.1 * 1.02 * plain.peak_bytes, rel=1e-6)


def test_runs_of_few_days_leave_the_variation_between_days_in_the_range(ask, probe):
    quick = Correction(origin="12 finished runs", runs=12, time_p10=0.99, time_p90=1.01)
    lasting = msgspec.structs.replace(quick, days=5)
    few, many = (quote(request=ask(), pool=pool(probe, correction=each)) for each in (quick, lasting))

    assert few.train_seconds_p90 == pytest.approx(1.25 * few.train_seconds_p50)
    assert many.train_seconds_p90 == pytest.approx(1.01 * many.train_seconds_p50)


def test_a_few_runs_widen_the_range_and_never_narrow_it(ask, probe):
    def spread(**learned: float) -> float:
        estimate = quote(request=ask(), pool=pool(probe, correction=Correction(origin="4 runs", runs=4, **learned)))
        return estimate.train_seconds_p90 / estimate.train_seconds_p50

    assert spread(time_high=1.02) == spread() == pytest.approx(1.35, abs=0.01)
    assert spread(time_high=1.8) == pytest.approx(1.8)


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


def test_finish_is_queue_training_and_what_is_beside_it_and_only_training_is_billed(ask, probe):
    """The model is downloaded once, and loaded by the trainer and by what evaluates its result."""
    plain = quote(request=ask(), pool=pool(probe))
    facts = pool(probe, seconds_ahead=100.0, startup_seconds=20.0, download_bytes=10**9, download_bytes_per_second=1e8)

    estimate = quote(request=ask(), pool=facts)

    assert estimate.download_seconds == 10
    assert plain.beside_seconds_p10 < plain.beside_seconds_p50 == plain.handling_seconds < plain.beside_seconds_p90
    assert estimate.beside_seconds_p50 == pytest.approx(plain.beside_seconds_p50 + 10 + 2 * 20)
    assert estimate.run_seconds_p90 == estimate.beside_seconds_p90 + estimate.train_seconds_p90
    assert estimate.finish_seconds_p50 == pytest.approx(100 + estimate.beside_seconds_p50 + plain.train_seconds_p50)
    assert estimate.cost_nano_p50 == plain.cost_nano_p50


def test_the_range_of_a_short_job_holds_what_its_minimum_charge_counts(ask, probe):
    """Jobs of 20 rows were billed 11 to 17 seconds: nearly all of it is loading, evaluation, samples and upload."""
    few = ask(rows=20, tokens=1_000, trained_tokens=200, epochs=1, checkpoints=None)
    facts = pool(probe, startup_seconds=2.0, minimum_seconds=60.0, bills_redone_work=False)

    estimate = quote(request=few, pool=facts)

    assert estimate.train_seconds_p90 < 4
    assert estimate.billed_seconds_p10 <= 11
    assert 11 <= estimate.billed_seconds_p50 <= 17 <= estimate.billed_seconds_p90
    assert estimate.run_seconds_p50 <= estimate.billed_seconds_p50 < estimate.run_seconds_p50 + 1


def test_the_seconds_beside_training_are_those_that_runs_taught(ask, probe):
    few = ask(rows=20, tokens=1_000, trained_tokens=200, epochs=1)
    learned = Correction(origin="25 finished runs", runs=25, beside_factor=2.0, beside_p10=0.9, beside_p90=1.1)
    plain, taught = (
        quote(request=few, pool=pool(probe, minimum_seconds=60.0, correction=each)) for each in (None, learned)
    )

    assert taught.beside_seconds_p50 == pytest.approx(2 * plain.beside_seconds_p50)
    assert taught.beside_seconds_p90 == pytest.approx(2 * 1.1 * plain.beside_seconds_p50)
    assert taught.billed_seconds_p50 == math.ceil(taught.beside_seconds_p50 + taught.train_seconds_p50)
    assert taught.train_seconds_p50 == plain.train_seconds_p50


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


def test_rows_are_priced_as_our_trainer_lays_them(ask, models, probe, gpu_types):
    """Packed on a CPU and from Ampere on; padded before it, by request, and where pairs are compared."""
    t4, a100 = (pool(None, gpu=gpu_types[key]) for key in ("t4-16", "a100-sxm-80"))

    def speed(facts, **changes):
        model, size = models["Qwen2.5-0.5B"], {"tokens": 400_000, "longest_row_tokens": 2000, "max_length": 2000}
        request = ask(architecture=model, micro_batch_size=4, **size | changes)
        return quote(request=request, pool=facts).tokens_per_second

    assert speed(pool(probe)) > 1.05 * speed(pool(probe), pads_rows=True)
    assert speed(a100) > speed(a100, pads_rows=True)  # a little: so small a model waits for its launches
    assert speed(t4) == speed(t4, pads_rows=True)


def test_a_soft_cap_costs_the_square_of_the_row_in_memory(ask, models, gpu_types):
    """No fused kernel has it, so our trainer leaves attention to the model: every score is kept for the way back."""
    capped = models["Gemma-2-2b"]
    size = {"tokens": 4_000_000, "longest_row_tokens": 4096, "max_length": 4096, "micro_batch_size": 1}

    def peak(architecture):
        return quote(
            request=ask(architecture=architecture, **size), pool=pool(None, gpu=gpu_types["h100-sxm-80"])
        ).peak_bytes

    scores = capped.n_heads * 4096**2
    assert peak(capped) - peak(msgspec.structs.replace(capped, has_score_cap=False)) > 10 * scores


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


def test_every_gpu_evaluates_all_held_out_rows(ask, models, gpu_types):
    request = ask(
        architecture=models["Llama-3.1-8B"], max_length=2048, longest_row_tokens=2048, tokens=1_500_000,
        evaluations=3, evaluation_tokens=200_000, micro_batch_size=2,
    )  # fmt: skip
    facts = pool(None, gpu=gpu_types["h100-sxm-80"], gpus_per_worker=8)

    one, eight = (quote(request=request, pool=facts, gpu_count=count) for count in (1, 8))

    assert eight.evaluation_seconds == pytest.approx(one.evaluation_seconds, rel=0.1)
    assert eight.train_seconds_p50 < one.train_seconds_p50 / 4


def test_a_mixture_reads_the_weights_of_all_experts_that_its_tokens_visit(ask, models, gpu_types):
    """Matrix products grow with the tokens; what does not is the time to read the weights in each of three passes."""
    mixtral, card = models["Mixtral-8x7B-v0.1"], gpu_types["h200-sxm-141"]

    def products(length):
        request = ask(
            architecture=mixtral, max_length=length, longest_row_tokens=length, rows=100, tokens=100 * length,
            batch_size=1, gradient_checkpointing=True,
        )  # fmt: skip
        parts = quote(request=request, pool=pool(None, gpu=card)).time_parts
        return next(part.seconds for part in parts if part.key == "compute")

    read = 3 * 2 * linear_parameter_count(mixtral) / card.memory_bandwidth_bytes_per_second
    assert 2 * products(512) - products(1024) == pytest.approx(read)


def test_a_few_rows_are_whole_rows_of_each_gpu_in_whole_micro_steps(ask, models, gpu_types):
    facts = pool(None, gpu=gpu_types["h100-sxm-80"], gpus_per_worker=8)

    def seconds(rows, gpu_count):
        shape = {"architecture": models["Llama-3.1-8B"], "max_length": 1000, "longest_row_tokens": 1000}
        sizes = {"rows": rows, "tokens": 1000 * rows, "trained_tokens": 1000 * rows, "batch_size": 32}
        request = ask(**shape, **sizes, micro_batch_size=4, gradient_checkpointing=True)
        return quote(request=request, pool=facts, gpu_count=gpu_count).train_seconds_p50

    assert seconds(1, 8) == seconds(5, 8) == seconds(8, 8) < seconds(9, 8)
    assert seconds(4, 1) + seconds(1, 1) == pytest.approx(seconds(5, 1), rel=0.05)
    assert seconds(1, 1) > 1.2 * seconds(4, 1) / 4


def test_an_estimate_survives_json(ask, probe):
    estimate = quote(request=ask(), pool=pool(probe))

    assert msgspec.convert(msgspec.to_builtins(estimate), Estimate) == estimate


def test_several_gpus_wait_for_the_workers_that_have_them(ask, models, gpu_types):
    request = ask(architecture=models["Llama-3.1-8B"], max_length=2048, longest_row_tokens=2048)
    facts = pool(
        None, gpu=gpu_types["h100-sxm-80"], live_workers=4, worker_gpus=(1, 1, 1, 4), gpus_per_worker=4,
        seconds_ahead=1200.0, ahead_by_gpus=((1, 400.0), (2, 300.0), (4, 500.0)), max_gpu_count=8,
    )  # fmt: skip

    found = {each.gpu_count: each for each in quote_placements(task=task_of(request), pool=facts)}

    assert found[1].queue_seconds == (400 + 2 * 300 + 4 * 500) / 7  # all GPU time over all GPUs
    assert found[2].queue_seconds == found[4].queue_seconds == (2 * 300 + 4 * 500) / 4  # what only the large one does
    assert found[8].queue_seconds is found[8].finish_seconds_p50 is None  # no pool has eight


def test_a_pool_that_can_start_workers_takes_a_job_as_soon_as_one_is_ready(ask, models, gpu_types):
    request = ask(architecture=models["Llama-3.1-8B"], max_length=2048, longest_row_tokens=2048)
    known = {"gpu": gpu_types["h100-sxm-80"], "gpus_per_worker": 1, "start_seconds": 300.0, "max_gpu_count": 2}
    busy = {"live_workers": 1, "worker_gpus": (1,), "seconds_ahead": 7200.0, "ahead_by_gpus": ((1, 7200.0),)}

    def waits(**facts) -> list[float | None]:
        placements = quote_placements(task=task_of(request), pool=pool(None, **known | facts))
        return [each.queue_seconds for each in placements if each.gpu_count <= 2]

    assert waits(live_workers=0) == [None, None]
    assert waits(live_workers=0, further_gpus=(1, 1)) == [300.0, 300.0]
    assert waits(**busy) == [7200.0, None]
    assert waits(**busy, further_gpus=(1,)) == [300.0, 3600.0], "two machines start it when the first run has ended"
    assert waits(**busy, further_gpus=(1,), has_queue=True) == [3600.0, 3600.0]


def test_a_job_starts_at_once_on_the_gpus_that_others_leave_free(ask, models, gpu_types):
    request = ask(architecture=models["Llama-3.1-8B"], max_length=2048, longest_row_tokens=2048)
    facts = pool(
        None, gpu=gpu_types["h100-sxm-80"], live_workers=1, worker_gpus=(4,), gpus_per_worker=4, free_gpus=(2,),
        seconds_ahead=1200.0, ahead_by_gpus=((2, 1200.0),),
    )  # fmt: skip

    found = {each.gpu_count: each for each in quote_placements(task=task_of(request), pool=facts)}

    assert [found[count].queue_seconds for count in (1, 2, 4)] == [0.0, 0.0, 600.0]
