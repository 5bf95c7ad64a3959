"""An adapter version is ready only after an engine gave the trainer's numbers with it."""

import asyncio
from types import SimpleNamespace

import msgspec
import pytest
from django.db import transaction

from apps.adapters.models import AdapterVersion
from apps.contracts.parity import (
    MAX_ROW_TOKENS,
    MAX_ROWS,
    PARITY_FILE,
    EngineScores,
    ParityChat,
    ParityProbe,
    ParityResult,
    ParityRow,
    compare,
    problem_of,
)
from apps.contracts.serving import LoadState, ObservedAdapter, ObservedState
from apps.core.errors import InvalidState
from apps.core.messages.outbox import deliver_due
from apps.finetuning.models import FineTuningJob
from apps.serving.models import Placement, Replica
from apps.serving.operations import deploy, record_observed
from gpu_workers.serving.trials.parity_check import measure

GOOD = ParityResult(
    tokens=300, tuned_difference=0.014, base_difference=0.013, largest_difference=0.1, effect=1.1, tolerance=0.05
)
PROBE = ParityProbe(rows=(ParityRow(token_ids=(1, 2, 3), tuned=(-1.0, -2.0), base=(-3.0, -4.0)),))


def scores(tuned: tuple[float, float], base: tuple[float, float] = (-3.0, -4.0)) -> ParityResult:
    return compare(PROBE, [EngineScores(tuned=tuned, base=base)], is_template_equal=True, engine="test")


@pytest.mark.parametrize(
    ("result", "problem"),
    [
        (scores((-1.01, -2.01)), ""),
        (scores((-1.5, -2.5)), "not the weights"),
        (scores((-3.0, -4.0)), "exactly as the base model"),
        (scores((float("nan"), -2.0)), "invalid numbers"),
    ],
)
def test_numbers_certify_or_say_why_not(result, problem):
    assert problem in problem_of(result) and bool(problem) == bool(problem_of(result))


def test_a_small_change_must_be_met_more_closely_than_the_tolerance():
    """Otherwise any other small change would pass for it."""
    small = ParityProbe(rows=(ParityRow(token_ids=(1, 2), tuned=(-1.0,), base=(-1.04,)),))
    other = compare(small, [EngineScores(tuned=(-1.045,), base=(-1.04,))], is_template_equal=None, engine="test")

    assert other.tuned_difference < other.tolerance
    assert "not the weights" in problem_of(other)


@pytest.mark.parametrize(("asked", "held"), [(1.0, 0.05), (0.01, 0.01)])
def test_an_adapter_may_ask_for_more_agreement_than_the_tolerance_and_not_for_less(asked, held):
    probe = msgspec.structs.replace(PROBE, tolerance=asked)
    found = compare(probe, [EngineScores(tuned=(-1.1, -2.1), base=(-3.0, -4.0))], is_template_equal=True, engine="test")

    assert found.tolerance == held and "not the weights" in problem_of(found)


class CountingEngine:
    """Scores rows, and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    async def list_models(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(id="base", max_model_len=None)]

    async def score_tokens(self, model: str, token_ids: tuple[int, ...]) -> tuple[float, ...]:
        self.asked.append(len(token_ids))
        return (-1.0,) * (len(token_ids) - 1)

    async def tokenize_chat(self, model: str, messages: object) -> list[int]:
        raise AssertionError("a long chat holds up an engine's other tenants")

    async def get_version(self) -> str:
        return "test"


def test_an_engine_is_asked_little_whatever_a_probe_holds(tmp_path):
    row = ParityRow(token_ids=tuple(range(3_000)), tuned=(-1.0,) * 2_999, base=(-1.0,) * 2_999)
    chat = ParityChat(messages=({"role": "user", "content": "x" * 40_000},), token_ids=(1,))
    (tmp_path / PARITY_FILE).write_bytes(msgspec.json.encode(ParityProbe(rows=(row,) * 40, chat=chat)))
    engine = CountingEngine()

    found = asyncio.run(measure(engine, tmp_path, lora_name="a-1", base_name="base"))

    assert engine.asked == [MAX_ROW_TOKENS] * 2 * MAX_ROWS
    assert found.is_template_equal is None


@pytest.fixture
def say(version, floor):
    """Return a function with which a replica says what it holds; it gives the version as it is then."""
    replica = Replica.objects.create(base_model=floor.base_model, region_id=floor.pool.region_id, url="unix:///x")
    Placement.objects.create(organization=version.organization, replica=replica, adapter_version=version)

    def observe(state: LoadState, reason: str = "", parity: ParityResult | None = None) -> AdapterVersion:
        seen = ObservedAdapter(lora_name=version.lora_name, state=state, reason=reason, parity=parity)
        observed = ObservedState(
            replica_id=replica.pk, generation=1, engine_generation="e1", is_ready=True, adapters=(seen,)
        )
        record_observed(replica=replica, observed=observed)
        return AdapterVersion.objects.get(pk=version.pk)

    return observe


def test_a_new_version_waits_for_its_certificate(version, say):
    assert version.status == "checking"
    assert say(LoadState.LOADING).status == "checking"
    assert say(LoadState.FAILED, "too busy").status == "checking"


@pytest.mark.slow
def test_an_engine_that_agrees_makes_it_ready_and_the_job_tells(version, say):
    ready = say(LoadState.LOADED, parity=GOOD)
    with transaction.atomic():
        deliver_due()

    assert (ready.status, ready.parity["effect"]) == ("ready", 1.1)
    assert ready.certified_at is not None
    assert "Certified by" in _job_of(version).events.order_by("-sequence").first().message


def test_exchanged_weights_are_refused_with_the_reason_among_the_jobs_events(version, say):
    refused = say(LoadState.REJECTED, "these are not the weights that were trained", GOOD)
    with transaction.atomic():
        deliver_due()

    assert refused.status == "refused"
    event = _job_of(version).events.order_by("-sequence").first()
    assert (event.level, "not the weights" in event.message) == ("error", True)


def test_one_replicas_trouble_takes_nothing_from_a_certified_version(say):
    say(LoadState.LOADED, parity=GOOD)

    assert say(LoadState.REJECTED, "no").status == "ready"


def test_without_a_probe_it_is_served_but_not_certified(say):
    served = say(LoadState.LOADED)

    assert (served.status, served.certified_at) == ("uncertified", None)
    assert say(LoadState.LOADED, parity=GOOD).status == "ready"


def test_what_the_engine_cannot_load_is_delivered_as_files(floor, claim, reload):
    job = floor.job()
    job.hyperparameters["use_dora"] = True
    job.save(update_fields=["hyperparameters"])
    claim().start().succeed(floor.base_model)

    made = reload(job).adapter_version

    assert made.status == "files_only"
    with pytest.raises(InvalidState, match="download"):
        deploy(version=made, by="system")


def _job_of(version):
    return FineTuningJob.objects.get(adapter_version=version)
