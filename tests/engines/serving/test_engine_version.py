"""What an engine's version decides: whether it gets adapters, and whether these are compared with their trainer."""

from pathlib import Path

import msgspec
import pytest

from apps.contracts.parity import ParityResult
from gpu_workers.serving import reconciler
from gpu_workers.serving.trials import adapter_trial
from tests.support.engines.stage import GOOD, Stage, adapter, make_stage


@pytest.mark.parametrize(
    ("version", "is_taken"),
    [
        ("0.32.0", True),
        ("0.25.0rc1", True),
        ("1.0.0+cpu", True),
        ("0.24.3", False),
        ("0.9.2", False),
        ("dev", False),
    ],
)
def test_an_older_engine_gets_no_adapter_and_its_replica_says_why(tmp_path: Path, version: str, is_taken: bool) -> None:
    async def script(stage: Stage) -> None:
        stage.shared.version = version
        await stage.turn(2)
        seen = stage.reconciler.observe()
        assert (seen.is_ready, GOOD in stage.shared.loaded) == (is_taken, is_taken)
        assert is_taken or f"vLLM is {version}, older" in seen.reason

    make_stage(tmp_path, adapter(GOOD), has_canary=False)(script)


def test_an_agent_follows_a_restored_control_plane(tmp_path: Path) -> None:
    async def script(stage: Stage) -> None:
        stage.plane.desired = msgspec.structs.replace(stage.plane.desired, generation=50)
        await stage.turn(2)
        stage.plane.desired = msgspec.structs.replace(stage.plane.desired, generation=7, adapters=())
        await stage.turn(2)
        assert (stage.reconciler.observe().generation, stage.shared.loaded) == (7, {})

    make_stage(tmp_path, adapter(GOOD), has_canary=False)(script)


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The adapters that were compared with their trainer, in order."""
    names: list[str] = []

    async def measure(*_: object, lora_name: str, base_name: str) -> ParityResult:
        names.append(lora_name)
        return ParityResult(
            tokens=9, tuned_difference=0.01, base_difference=0.01, largest_difference=0.1, effect=2.0, tolerance=0.1
        )

    monkeypatch.setattr(adapter_trial, "measure", measure)
    return names


def test_an_adapter_is_compared_with_its_trainer_once_for_each_version(tmp_path: Path, compared: list[str]) -> None:
    """A comparison takes seconds, and no customer is served until all adapters are back after a crash."""

    async def script(stage: Stage) -> None:
        await stage.turn(2)
        assert (stage.reconciler.observe().is_ready, compared) == (True, [GOOD])
        await stage.shared.restart()
        await stage.turn(2)
        assert (stage.reconciler.observe().is_ready, compared) == (True, [GOOD])
        assert stage.seen(GOOD).parity is not None
        await stage.shared.stop()
        stage.shared.version = "0.33.0"
        await stage.shared.start()
        await stage.turn(2)
        assert (stage.reconciler.observe().is_ready, compared) == (True, [GOOD, GOOD])

    make_stage(tmp_path, adapter(GOOD), has_canary=False)(script)


@pytest.mark.parametrize("changed", ["settings", "weights"])
def test_an_adapter_is_compared_again_after_a_start_with_other_settings_or_weights(
    tmp_path: Path, compared: list[str], monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    monkeypatch.setattr(reconciler, "hash_weights", lambda _: "other")

    async def script(stage: Stage) -> None:
        await stage.turn(2)
        await stage.shared.stop()
        if changed == "settings":
            stage.shared.settings_sha256 = "other"
        else:
            stage.plane.desired = msgspec.structs.replace(stage.plane.desired, base_model_sha256="other", generation=2)
        await stage.shared.start()
        await stage.turn(3)
        assert (stage.reconciler.observe().is_ready, compared) == (True, [GOOD, GOOD])

    make_stage(tmp_path, adapter(GOOD), has_canary=False)(script)


def test_a_suspected_adapter_is_compared_again(tmp_path: Path, compared: list[str]) -> None:
    async def script(stage: Stage) -> None:
        await stage.turn(2)
        stage.reconciler._trials.suspect([GOOD])
        await stage.shared.restart()
        await stage.turn(2)
        assert compared == [GOOD, GOOD]

    make_stage(tmp_path, adapter(GOOD), has_canary=False)(script)
