"""How these tests share two cores: each worker computes on one, and what shares a process stays on one worker."""

import gc
import os
from pathlib import PurePath
from typing import Any

import pytest

from tests.services.surroundings import go_around_proxies

os.environ["OMP_NUM_THREADS"] = "1"  # torch reads it when it is imported
go_around_proxies()
gc.disable()  # until all tests are collected: imports leave almost no garbage

REPLICA = "one_replica"  # the folder whose files share one replica with vLLM
FORKING = "forking"  # the modules that share the process that forks trainers
FORKING_MODULES = (
    "test_processes",
    "test_runs",
    "test_groups",
    "test_fork_server",
    "test_memory_rehearsal",
    "test_examination",
    "test_parts",
)
# The rest follows, a module at a time, in the order in which it was collected.
LONGEST = (REPLICA, FORKING, "test_reliability", "test_whole_model", "test_canary_engine_of_vllm", "test_methods")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start with the longest groups, so that no worker waits for one at the end."""
    rank = {group: number for number, group in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(group_of(item.nodeid), len(rank)))


def pytest_collection_finish() -> None:
    """Leave all that was imported out of garbage collections: a training begins with one, which took half a second."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give each worker whole groups, in order. (Marks with `xdist_group` have no effect since pytest 9.2.)"""
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    config.option.loadscopereorder = False
    return Groups(config, log)


def group_of(nodeid: str) -> str:
    path = PurePath(nodeid.partition("::")[0])
    if path.parent.name == REPLICA:
        return REPLICA
    return FORKING if path.stem in FORKING_MODULES else path.stem
