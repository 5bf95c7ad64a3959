"""The plan chosen accumulates to exactly the batch."""

from apps.estimates.placement import choose_plan, task_of
from apps.estimates.quote import quote
from tests.unit.estimates.pools import pool


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
