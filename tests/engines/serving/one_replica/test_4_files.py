"""Files that an engine may read stay, and never change under a name."""

import os
from pathlib import Path

import pytest

from apps.contracts.serving import DesiredAdapter, LoadState
from tests.support.engines.adapters import make_arrays, make_files
from tests.support.engines.models import BASE_MODEL
from tests.support.engines.replica import Replica
from tests.support.engines.world import GOOD, NAN, OTHER, THIRD
from tests.support.waiting import wait_until


def test_unwanted_adapter_is_unloaded_but_its_files_stay_while_the_engine_lives(
    replica: Replica, adapters: dict[str, DesiredAdapter]
) -> None:
    folder = Path(replica.list_loaded()[THIRD])

    replica.plane.want(*(a for name, a in adapters.items() if name != THIRD))
    wait_until(lambda: THIRD not in replica.list_loaded(), "the adapter to be unloaded")

    assert replica.complete(THIRD).status_code == 404
    assert (folder / "adapter_model.safetensors").exists()
    with pytest.raises(PermissionError) if os.geteuid() else pytest.raises(FileExistsError):
        folder.mkdir()


@pytest.mark.slow
def test_other_weights_under_an_old_name_get_their_own_folder_and_are_never_swapped_in_place(
    replica: Replica, adapters: dict[str, DesiredAdapter]
) -> None:
    before = replica.list_loaded()[OTHER]
    changed = replica.plane.describe(OTHER, make_files(make_arrays(BASE_MODEL, seed=9)))

    replica.plane.want(adapters[GOOD], changed)
    wait_until(lambda: replica.list_loaded().get(OTHER, before) != before, "the new folder")

    assert Path(before, "adapter_model.safetensors").exists()
    folder = replica.list_loaded()[OTHER]
    again = replica.engine_http.post("/v1/load_lora_adapter", json={"lora_name": OTHER, "lora_path": before})
    assert again.status_code == 400  # so a load as the agent sends it (test_engine_client.py) can never swap weights
    assert replica.list_loaded()[OTHER] == folder


@pytest.mark.slow
def test_rejected_adapter_is_never_tried_again(replica: Replica, adapters: dict[str, DesiredAdapter]) -> None:
    replica.plane.want(adapters[GOOD], adapters[NAN])
    wait_until(lambda: replica.plane.get_adapter(NAN), "the verdict to be repeated")

    row = replica.plane.get_adapter(NAN)

    assert row.state is LoadState.REJECTED and "NaN" in row.reason
    log = (replica.paths.work_dir / "serving.agent.log").read_text()
    assert log.count(f"{NAN} is rejected") == 1
