"""Jobs on pairs of answers, with and without a reference."""

import math

import msgspec
import pytest

from apps.estimates.quote import quote
from tests.unit.estimates.pools import pool


def test_pairs_of_answers_take_the_memory_of_two_rows_and_a_reference_ahead(ask, models, gpu_types):
    shape = {"architecture": models["Llama-3.1-8B"], "max_length": 1024, "longest_row_tokens": 1024}
    shape |= {"tokens": 1_000_000, "gradient_checkpointing": False}
    shape |= {"lora_dropout": 0.0, "packing": False}  # as pairs are trained
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
    beside = of_pairs.run_seconds_p50 - of_pairs.train_seconds_p50
    assert beside >= of_pairs.reference_seconds - 1e-9
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


def test_the_reference_reads_pairs_as_they_come_and_training_reads_them_by_length(ask, models, gpu_types):
    """In the file's order, a micro-batch is padded to the longest of random pairs."""
    card = pool(None, gpu=gpu_types["h100-sxm-80"])

    def share(*lengths):
        request = ask(
            architecture=models["Llama-3.1-8B"], max_length=2000, longest_row_tokens=2000, is_preference=True,
            rows=1000, tokens=2 * sum(length * rows for length, rows in lengths), trained_tokens=100_000, epochs=1,
            row_lengths=lengths, micro_batch_size=8, gradient_checkpointing=True,
        )  # fmt: skip
        estimate = quote(request=request, pool=card)
        return estimate.reference_seconds / estimate.train_seconds_p50

    assert share((200, 900), (2000, 100)) > 1.4 * share((2000, 1000))
