"""An engine that could mix customers' weights up is given nothing."""

from pathlib import Path

import pytest

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
