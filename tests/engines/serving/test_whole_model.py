"""A merged model on a replica of its own, with a real engine: fetched, served alone, and gone once it is deleted."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_workers.common.process_tree import is_alive
from gpu_workers.train.after.merge import merge_adapter
from tests.support.engines.adapters import make_arrays, make_files
from tests.support.engines.control_plane import ControlPlane
from tests.support.engines.models import BASE_MODEL, SERVED_NAME
from tests.support.engines.replica import Replica
from tests.support.waiting import wait_until

OWN = "b-" + "own".ljust(26, "0")


def merged_files(folder: Path) -> dict[str, bytes]:
    """Return the files of the demo model with an adapter merged into it."""
    adapter = folder / "adapter"
    adapter.mkdir(parents=True)
    for name, content in make_files(make_arrays(BASE_MODEL, seed=7)).items():
        (adapter / name).write_bytes(content)
    merge_adapter(BASE_MODEL, adapter, folder / "merged")
    return {path.name: path.read_bytes() for path in (folder / "merged").iterdir()}


@pytest.fixture(scope="module")
def replica(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replica]:
    plane = ControlPlane(base_model_path=str(BASE_MODEL), served_name=SERVED_NAME)
    plane.serve_whole(merged_files(tmp_path_factory.mktemp("model")), served_name=OWN)
    replica = Replica(tmp_path_factory.mktemp("replica"), plane)
    try:
        replica.wait_until_ready()
        yield replica
    finally:
        left = replica.list_processes()
        replica.stop()
        plane.close()
        assert not [p for p in left if is_alive(p)]


@pytest.mark.slow
def test_the_merged_model_answers_under_its_own_name_alone(replica: Replica) -> None:
    answers = {model: replica.complete(model) for model in (OWN, SERVED_NAME, "a-" + "0" * 26)}

    assert [answer.status_code for answer in answers.values()] == [200, 404, 404]
    assert answers[OWN].json()["choices"][0]["text"]
    assert list(replica.list_loaded()) == [OWN]
    assert any(state.reason == "downloading the model" for state in replica.plane.observed)
    assert replica.plane.observed[-1].capacity == 0


@pytest.mark.slow
def test_a_deleted_model_is_served_no_more_and_its_files_go(replica: Replica) -> None:
    models = replica.paths.work_dir / "models"
    before = replica.list_processes()
    assert list(models.iterdir())

    replica.plane.withdraw()

    wait_until(lambda: not list(models.iterdir()), "the files gone")
    wait_until(lambda: not [p for p in before if is_alive(p)], "the engine gone")
    wait_until(lambda: not replica.plane.observed[-1].is_ready, "reported as not ready")
    assert replica.complete(OWN).status_code == 503
