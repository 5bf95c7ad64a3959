"""A new adapter version meets the canary engine first: what dies or is refused there never reaches the customers'."""

from pathlib import Path

import pytest

from apps.contracts.serving import LoadState
from gpu_workers.serving.trials.adapter_trial import NOT_LOADABLE, NOT_LOADED_YET
from gpu_workers.serving.trials.canary_engine import DEADLY, IDLE_SECONDS, START_SECONDS
from gpu_workers.serving.trials.verdicts import RETRY_SECONDS
from tests.support.engines.models import name_of
from tests.support.engines.stage import (
    COUNTED_NAN,
    DEADLY_ONE,
    GOOD,
    LONG_NAN,
    MUTE,
    NAN,
    NOOP,
    UNLOADABLE,
    Stage,
    adapter,
    make_stage,
)


def test_a_new_version_is_loaded_for_customers_only_after_it_passed_elsewhere(tmp_path: Path) -> None:
    async def script(stage: Stage) -> None:
        await stage.turn()
        assert (stage.seen(GOOD).state, stage.seen(GOOD).reason) == (
            LoadState.LOADING,
            "A canary engine tries it first.",
        )
        assert stage.reconciler.observe().is_ready  # the others need not wait for it
        await stage.turn(2)
        assert stage.seen(GOOD).state is LoadState.LOADED

    make_stage(tmp_path, adapter(GOOD))(script)


def test_events_come_in_order(tmp_path: Path) -> None:
    async def script(stage: Stage) -> None:
        await stage.turn(3)
        assert stage.events == ["shared started", "canary started", "canary loads a-good", "shared loads a-good"]

    make_stage(tmp_path, adapter(GOOD))(script)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (NAN, "invalid numbers"),
        (LONG_NAN, "invalid numbers"),
        (COUNTED_NAN, "invalid numbers"),
        (MUTE, "invalid numbers"),
        (NOOP, "exactly as the base model"),
        (UNLOADABLE, "could not load"),
        (DEADLY_ONE, DEADLY),
    ],
)
def test_a_version_that_fails_there_is_rejected_and_the_shared_engine_never_saw_it(
    tmp_path: Path, name: str, reason: str
) -> None:
    async def script(stage: Stage) -> None:
        await stage.turn(8, seconds=RETRY_SECONDS)
        assert stage.seen(name).state is LoadState.REJECTED and reason in stage.seen(name).reason
        assert stage.seen(GOOD).state is LoadState.LOADED
        assert [event for event in stage.events if event.startswith("shared")] == [
            "shared started",
            "shared loads a-good",
        ]
        assert stage.events.count("canary died") == (2 if name == DEADLY_ONE else 0)

    make_stage(tmp_path, adapter(name), adapter(GOOD))(script)


@pytest.mark.parametrize("has_canary", [True, False])
@pytest.mark.parametrize("statuses", [[404] * 4, [503, 429, 404, 500, 500]])
def test_an_engine_that_cannot_load_now_is_asked_again(tmp_path: Path, has_canary: bool, statuses: list[int]) -> None:
    async def script(stage: Stage) -> None:
        engine = stage.trial if has_canary else stage.shared
        engine.refusals = list(statuses)
        await stage.turn(3)
        assert stage.seen(GOOD).state is LoadState.FAILED and NOT_LOADED_YET in stage.seen(GOOD).reason
        await stage.turn(len(statuses) * 3, seconds=RETRY_SECONDS)
        assert stage.seen(GOOD).state is LoadState.LOADED

    make_stage(tmp_path, adapter(GOOD), has_canary=has_canary)(script)


def test_a_load_that_fails_each_time_is_evidence_against_the_adapter(tmp_path: Path) -> None:
    async def script(stage: Stage) -> None:
        await stage.turn(2, seconds=RETRY_SECONDS)
        assert stage.seen(UNLOADABLE).state is LoadState.FAILED
        await stage.turn(seconds=RETRY_SECONDS)
        assert (stage.seen(UNLOADABLE).state, stage.seen(UNLOADABLE).reason) == (LoadState.REJECTED, NOT_LOADABLE)

    make_stage(tmp_path, adapter(UNLOADABLE), has_canary=False)(script)


def test_an_engine_with_bad_numbers_in_it_tries_no_other_version(tmp_path: Path) -> None:
    async def script(stage: Stage) -> None:
        await stage.turn(6)
        assert stage.events[1:] == [
            "canary started", "canary loads a-nan", "canary ended", "canary started", "canary loads a-good",
            "shared loads a-good",
        ]  # fmt: skip

    make_stage(tmp_path, adapter(NAN), adapter(GOOD))(script)


def test_several_versions_share_one_start_and_the_engine_ends_when_it_is_idle(tmp_path: Path) -> None:
    others = [adapter(name_of(f"other{n}")) for n in range(3)]

    async def script(stage: Stage) -> None:
        await stage.turn(8)
        assert all(stage.seen(one.lora_name).state is LoadState.LOADED for one in others)
        await stage.turn(seconds=IDLE_SECONDS - 10)
        assert "canary ended" not in stage.events
        await stage.turn(2, seconds=11)
        assert (stage.events.count("canary started"), stage.events.count("canary ended")) == (1, 1)
        await stage.turn(3)
        assert stage.events[-1] == "canary ended"  # it stays so while no request needs it

    make_stage(tmp_path, *others)(script)


def test_what_an_engine_tried_before_needs_no_canary_engine_nor_does_anything_where_there_is_none(
    tmp_path: Path,
) -> None:
    async def script(stage: Stage) -> None:
        await stage.turn(2)
        assert stage.events == ["shared started", "shared loads a-good"]

    for folder, has_canary in (("tried", True), ("none", False)):
        (tmp_path / folder).mkdir()
        make_stage(tmp_path / folder, adapter(GOOD, is_tried=has_canary), has_canary=has_canary)(script)


@pytest.mark.parametrize("name", [LONG_NAN, COUNTED_NAN])
def test_without_a_canary_engine_the_shared_one_finds_bad_numbers_too_and_is_given_up(
    tmp_path: Path, name: str
) -> None:
    async def script(stage: Stage) -> None:
        await stage.turn()
        assert stage.seen(name).state is LoadState.REJECTED and "invalid numbers" in stage.seen(name).reason
        assert stage.shared.paths.restart_request.read_text() == stage.shared.generation
        assert name not in stage.shared.loaded

    make_stage(tmp_path, adapter(name), has_canary=False)(script)


def test_an_engine_is_given_fewer_adapters_than_its_cache_holds_by_its_slots(tmp_path: Path) -> None:
    """Unloading frees nothing: without that room those that come and go would push out those being served."""

    async def script(stage: Stage) -> None:
        await stage.turn(2)
        states = [row.state for row in stage.reconciler.observe().adapters]
        assert (states.count(LoadState.LOADED), states.count(LoadState.FAILED)) == (6, 1)  # eight cached, two slots

    make_stage(tmp_path, *(adapter(name_of(f"one{n}")) for n in range(7)), has_canary=False)(script)


def test_a_passed_version_is_not_tried_again_by_the_next_agent(tmp_path: Path) -> None:
    async def first(stage: Stage) -> None:
        await stage.turn(3)
        assert stage.seen(GOOD).state is LoadState.LOADED

    async def second(stage: Stage) -> None:
        await stage.turn(2)
        assert stage.seen(GOOD).state is LoadState.LOADED and "canary started" not in stage.events

    make_stage(tmp_path, adapter(GOOD))(first)
    make_stage(tmp_path, adapter(GOOD))(second)


def test_an_engine_that_never_starts_lets_nothing_through_and_says_so(tmp_path: Path) -> None:
    async def script(stage: Stage) -> None:
        stage.trial.starts_never = True
        await stage.turn(2)
        await stage.turn(2, seconds=START_SECONDS)
        assert stage.seen(GOOD).state is LoadState.FAILED
        assert stage.seen(GOOD).reason == "The canary engine does not start."
        assert stage.events == ["shared started"]

    make_stage(tmp_path, adapter(GOOD))(script)


def test_an_engine_that_nobody_wants_any_more_is_ended(tmp_path: Path) -> None:
    """Its agent was killed between taking back the wish and saying so."""

    async def script(stage: Stage) -> None:
        await stage.trial.start()
        await stage.turn(2)
        assert stage.events[-1] == "canary ended"

    make_stage(tmp_path)(script)
