"""What does not fit comes with the changes that make it fit, each at its price."""

import msgspec
import pytest

from apps.estimates.physics.gpus import GIB
from apps.estimates.quote import quote
from tests.unit.estimates.pools import pool


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
    request = ask(architecture=models["Qwen2.5-32B"], max_length=24_576, longest_row_tokens=24_576)

    estimate = quote(request=request, pool=pool(None, gpu=card), other_gpus=tuple(gpu_types.values()))

    assert not estimate.fits
    assert {fix.key for fix in estimate.fixes} == {"method", "max_length", "offload", "gpu"}
    for fix in estimate.fixes:
        changes = {"method": fix.method, "max_length": fix.max_length, "cpu_offload": fix.cpu_offload}
        changed = msgspec.structs.replace(request, **{key: value for key, value in changes.items() if value})
        gpu = gpu_types[fix.gpu_key] if fix.gpu_key else card
        assert fix.train_seconds_p50 > 0
        assert quote(request=changed, pool=pool(None, gpu=gpu)).fits, fix.text


def test_running_text_is_trained_whole_however_short_its_pieces(ask, models, gpu_types):
    lengths = {"max_length": 32_768, "longest_row_tokens": 32_768, "row_lengths": ((32_768, 100),)}
    tokens = {"rows": 100, "tokens": 3_276_800, "trained_tokens": 3_276_800}
    request = ask(architecture=models["Qwen2.5-32B"], **lengths, **tokens)
    card = pool(None, gpu=gpu_types["h100-sxm-80"])

    def way(splits_rows):
        asked = msgspec.structs.replace(request, splits_rows=splits_rows)
        [found] = [fix for fix in quote(request=asked, pool=card).fixes if fix.key == "max_length"]
        return found

    cut, split = way(False), way(True)
    assert cut.max_length == split.max_length < 16_384
    assert split.train_seconds_p50 == pytest.approx(cut.train_seconds_p50 * 32_768 / cut.max_length, rel=0.1)


def test_when_nothing_fits_the_quote_still_answers(ask, models):
    estimate = quote(request=ask(architecture=models["Llama-3.1-405B"]), pool=pool(None))

    assert [fix.key for fix in estimate.fixes] == ["none"]
    assert estimate.fixes[0].text


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


def test_rows_longer_than_the_model_reads_are_cut_at_their_price(ask, models, gpu_types):
    request = ask(architecture=models["Llama-3.1-8B"], max_length=262_144, longest_row_tokens=262_144)

    (way,) = quote(request=request, pool=pool(None, gpu=gpu_types["b200-sxm-180"])).fixes
    (shorter,) = quote(request=request, pool=pool(None, gpu=gpu_types["l4-24"])).fixes

    assert way.max_length == 131_072 and way.cost_nano_p50 > 0
    assert shorter.max_length < 131_072 and shorter.cost_nano_p50 > 0  # where so many do not fit either
    cut = msgspec.structs.replace(request, max_length=shorter.max_length)
    assert quote(request=cut, pool=pool(None, gpu=gpu_types["l4-24"])).fits


def test_a_machine_too_small_to_publish_has_no_fix_but_another_machine(ask, models, gpu_types):
    card = pool(None, gpu=gpu_types["h100-sxm-80"], host_memory_bytes=2 * GIB)
    request = ask(architecture=models["Llama-3.1-8B"])

    refused = quote(request=request, pool=card, other_gpus=tuple(gpu_types.values()))

    assert not refused.fits
    assert f"Needs {refused.host_bytes / GIB:.1f} GiB of the host's memory; a worker here has 2.0" in refused.reason
    (way,) = refused.fixes
    assert (way.key, way.cost_nano_p50) == ("none", None)
    assert f"a pool whose machines have {refused.host_bytes / GIB:.1f} GiB of memory" in way.text
    enough = msgspec.structs.replace(card, host_memory_bytes=refused.host_bytes)
    assert quote(request=request, pool=enough).fits


def test_a_job_that_the_host_cannot_hold_may_stay_on_the_gpu(ask, models, gpu_types):
    card = pool(None, gpu=gpu_types["h100-sxm-80"], host_memory_bytes=12 * GIB)
    request = ask(architecture=models["Llama-3.1-8B"], cpu_offload=True)

    refused = quote(request=request, pool=card)

    assert "of the host's memory" in refused.reason
    [way] = [fix for fix in refused.fixes if fix.key == "offload"]
    assert way.cpu_offload is False
    assert quote(request=msgspec.structs.replace(request, cpu_offload=way.cpu_offload), pool=card).fits


def test_a_known_error_of_the_formula_counts_in_fixes_but_not_in_the_gpus_size(ask, models, gpu_types):
    card = pool(None, gpu=gpu_types["h100-sxm-80"], memory_factor=1.5)
    request = ask(architecture=models["Qwen2.5-32B"])
    assert quote(request=request, pool=msgspec.structs.replace(card, memory_factor=1.0)).fits

    refused = quote(request=request, pool=card, other_gpus=tuple(gpu_types.values()))

    assert not refused.fits and refused.fixes
    for fix in refused.fixes:
        gpu = gpu_types[fix.gpu_key] if fix.gpu_key else card.gpu
        assert f"of {gpu.name}'s {gpu.memory_bytes / GIB:,.1f} GiB" in fix.text
        assert fix.peak_bytes < gpu.memory_bytes
