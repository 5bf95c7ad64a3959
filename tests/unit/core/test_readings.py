"""Readings of large files take turns between owners, and no call waits for one."""

import threading

import pytest

from apps.core.objects.readings import FilesUnread, Readings
from tests.support.waiting import join_readings


def test_an_owner_reads_one_thing_at_a_time_and_a_result_is_told_to_whoever_asks() -> None:
    readings, go_on, read = Readings(threads=1), threading.Event(), []

    def reading(name: str, *, fails: bool = False) -> None:
        go_on.wait(60)
        read.append(name)
        if fails:
            raise ValueError(name)

    def ask(owner: str, name: str, *, fails: bool = False) -> None:
        readings.require(name, lambda: reading(name, fails=fails), owner=owner)

    for owner, name in (("loud", "a"), ("loud", "b"), ("loud", "c"), ("quiet", "d"), ("loud", "a")):
        with pytest.raises(FilesUnread):
            ask(owner, name)
    go_on.set()
    join_readings()
    assert read == ["a", "d"], "the loud one has the rest read later"
    ask("loud", "a"), ask("quiet", "d"), ask("loud", "a")

    with pytest.raises(FilesUnread):
        ask("loud", "b", fails=True)
    join_readings()
    with pytest.raises(ValueError, match="b"):
        ask("loud", "b")
    with pytest.raises(FilesUnread):
        ask("loud", "b")  # read again, for the file may have come
    join_readings()
    ask("loud", "b")
    assert read == ["a", "d", "b", "b"]
