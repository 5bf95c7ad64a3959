"""More work never takes less time: longer rows, more rows and more epochs, however the GPUs share the model."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from apps.estimates.quote import quote
from apps.estimates.requests import PoolFacts, QuoteRequest
from tests.unit.estimates.pools import pool

# Model, method, GPU, GPUs, machines, and whether the weights rest in the host's memory.
SHARED = (
    ("Gemma-3-1b-it", "lora", "l4-24", 1, 1, True),
    ("Llama-3.1-8B", "lora", "a100-sxm-80", 2, 1, True),
    ("Llama-3.1-8B", "full", "h100-sxm-80", 8, 1, True),
    ("Gemma-3-1b-it", "full", "l4-24", 4, 1, False),
    ("Llama-3.1-8B", "full", "h100-sxm-80", 8, 1, False),
    ("Llama-3.1-70B", "lora", "h100-sxm-80", 8, 1, False),
    ("Llama-3.1-70B", "lora", "h100-sxm-80", 16, 2, False),
    ("Llama-3.1-70B", "qlora", "l40s-48", 4, 1, False),
)


@pytest.fixture(scope="module", params=SHARED, ids=lambda each: "-".join(map(str, each)))
def facts(request, models, gpu_types) -> tuple[QuoteRequest, PoolFacts, int]:
    """Return a job, the pool, and the job's GPUs."""
    model, method, key, gpu_count, node_count, is_offloaded = request.param
    job = QuoteRequest(
        architecture=models[model], method=method, max_length=1, batch_size=16, epochs=1, rows=16, tokens=16,
        trained_tokens=16, longest_row_tokens=1, node_count=node_count, cpu_offload=is_offloaded, checkpoints=0,
    )  # fmt: skip
    most = gpu_count if node_count > 1 else None
    return job, pool(None, gpu=gpu_types[key], gpus_per_worker=gpu_count // node_count, max_gpu_count=most), gpu_count


def seconds(facts: tuple[QuoteRequest, PoolFacts, int], *, length: int, rows: int, epochs: int) -> float | None:
    """Return the quoted seconds of training on rows of equal length; None if the job does not fit."""
    job, there, gpu_count = facts
    sized = msgspec.structs.replace(
        job, max_length=length, longest_row_tokens=length, rows=rows, epochs=epochs, tokens=rows * length,
        trained_tokens=rows * max(length // 4, 1), row_lengths=((length, rows),),
    )  # fmt: skip
    return quote(request=sized, pool=there, gpu_count=gpu_count).train_seconds_p50


@given(
    length=st.integers(8, 4_096), longer=st.integers(0, 4_096), rows=st.integers(1, 5_000), more=st.integers(0, 5_000),
    epochs=st.integers(1, 5), further=st.integers(0, 3),
)  # fmt: skip
def test_more_work_takes_no_less_time(facts, length, longer, rows, more, epochs, further):
    less = seconds(facts, length=length, rows=rows, epochs=epochs)

    for grown in (
        seconds(facts, length=length + longer, rows=rows, epochs=epochs),
        seconds(facts, length=length, rows=rows + more, epochs=epochs),
        seconds(facts, length=length, rows=rows, epochs=epochs + further),
    ):
        assert grown is None or (less is not None and grown >= less * (1 - 1e-9))


@pytest.mark.parametrize("length", [128, 256, 512, 1_024, 2_048])
def test_rows_of_twice_the_length_take_no_less_time(facts, length):
    short, long = (seconds(facts, length=each, rows=1_000, epochs=1) for each in (length, 2 * length))

    assert short is not None and (long is None or long >= short * (1 - 1e-9))
