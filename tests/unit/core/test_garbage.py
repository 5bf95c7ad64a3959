"""The collector of garbage looks at what a process makes, and not at what it has loaded."""

import gc
from collections.abc import Iterator

import pytest

from apps.core.http.garbage import spare_lasting_objects


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    thresholds = gc.get_threshold()
    yield
    gc.set_threshold(*thresholds)


def test_what_is_loaded_is_left_out_and_new_garbage_is_still_found() -> None:
    gc.set_threshold(700, 10, 10)
    loaded: list[object] = [[]]
    spare_lasting_objects()

    assert not any(each is loaded for each in gc.get_objects())
    assert gc.get_threshold()[0] > 700
    cycle: list[object] = []
    cycle.append(cycle)
    del cycle
    assert gc.collect() >= 1
