"""A failed job says whose fault it was, why, from what that follows, and what to change at which price."""

import pytest

from apps.contracts import runs as wire
from apps.contracts.failures import CAUSES, Blame, FailureCode
from apps.core.database.clock import db_now
from apps.finetuning.jobs.explanations import explain


@pytest.fixture
def fail(floor, claim, reload):
    """Return a function that lets a job fail with a code, and explains it."""

    def with_code(code: FailureCode, **recipe):
        job = floor.job(hyperparameters=recipe)
        attempt = claim().start()
        attempt.report(
            wire.StepCompleted,
            step=3,
            total_steps=10,
            epoch=0.3,
            train_loss=2.5,
            learning_rate=1e-3,
            grad_norm=1.0,
            trained_tokens=50,
            tokens_per_second=900.0,
            training_seconds=1.0,
        )
        attempt.finish(wire.Failed(code=code, message="As the worker put it.", peak_memory_bytes=2**30))
        return explain(job=reload(job), now=db_now())

    return with_code


def test_every_code_has_a_cause_in_one_sentence_and_a_party_to_blame():
    assert set(CAUSES) == set(FailureCode)
    assert all(text.endswith(".") and ". " not in text for text in CAUSES.values())
    assert {code.blame for code in FailureCode} == set(Blame)


def test_a_diverged_loss_is_the_customers_with_a_lower_rate_and_its_price(fail):
    why = fail(FailureCode.LOSS_NOT_FINITE, learning_rate=0.01)

    assert (why.blame, why.cause) == (Blame.CUSTOMER, CAUSES[FailureCode.LOSS_NOT_FINITE])
    evidence = {item.name: item.value for item in why.evidence}
    assert (evidence["Step"], evidence["Last losses"]) == ("3 of 10", "2.500")
    assert evidence["Reported"] == "As the worker put it."
    assert why.suggestion.changes == {"learning_rate": 0.001}
    assert (why.suggestion.price_nano > 0, why.suggestion.pool) == (True, "local-cpu")


def test_out_of_memory_is_ours_and_qlora_is_the_way_out(fail):
    why = fail(FailureCode.OUT_OF_MEMORY)

    assert why.blame is Blame.PLATFORM
    assert why.suggestion.changes == {"method": "qlora", "quantization": "nf4"}
    assert "GiB" in {item.name: item.value for item in why.evidence}["Peak memory"]


def test_rows_cut_to_nothing_want_a_longer_limit(fail):
    why = fail(FailureCode.NO_TRAINABLE_TOKENS, max_length=64)

    assert why.suggestion.changes == {"max_length": 128}


def test_a_lost_machine_is_the_providers_and_nothing_needs_to_change(floor, claim, reload):
    job = floor.job()
    for _ in range(3):
        claim().finish(wire.Failed(code=FailureCode.GPU_FAULT, message="The GPU reported a fault."))

    why = explain(job=reload(job), now=db_now())

    assert (why.code, why.blame) == ("crash_loop", Blame.PLATFORM)
    assert FailureCode.GPU_FAULT.blame is Blame.PROVIDER
    assert {item.name: item.value for item in why.evidence}["Attempts"] == "3: gpu_fault, gpu_fault, gpu_fault"
    assert why.suggestion.changes == {} and why.suggestion.price_nano > 0


def test_only_a_failed_job_is_explained(floor):
    assert explain(job=floor.job(), now=db_now()) is None
