"""One replica of real processes for all files of this folder: their tests run in order, the last ones kill it.

The engine starts four times, and is killed in two of these starts.
"""

import shutil
from collections.abc import Iterator

import pytest

from apps.contracts.serving import DesiredAdapter
from gpu_workers.common.process_tree import is_alive
from tests.support.engines.control_plane import ControlPlane
from tests.support.engines.models import BASE_MODEL, SERVED_NAME
from tests.support.engines.replica import Replica
from tests.support.engines.world import make_adapters


@pytest.fixture(scope="package")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    base_model = shutil.copytree(BASE_MODEL, tmp_path_factory.mktemp("base") / "model")
    plane = ControlPlane(base_model_path=str(base_model), served_name=SERVED_NAME)
    yield plane
    plane.close()


@pytest.fixture(scope="package")
def started(plane: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replica]:
    """The replica, with what earlier tests left on it."""
    replica = Replica(tmp_path_factory.mktemp("replica"), plane)
    try:
        replica.wait_until_ready()
        yield replica
    finally:
        left = replica.list_processes()
        replica.stop()
        assert not [p for p in left if is_alive(p)]


@pytest.fixture(scope="package")
def adapters(plane: ControlPlane) -> dict[str, DesiredAdapter]:
    return make_adapters(plane)


@pytest.fixture(scope="package")
def replica(started: Replica, adapters: dict[str, DesiredAdapter]) -> Replica:
    """The replica with the adapters of `world`."""
    started.serve(*adapters.values())
    return started
