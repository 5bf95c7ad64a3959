"""Ids sort by the time they were made and never meet, in whatever process they were made."""

import os
import time

import pytest

from apps.core.ids import ULID_LENGTH, new_id, new_ulid, ulid_of


def test_ids_are_different_and_sort_by_time():
    first = [new_ulid() for _ in range(300)]  # more than are made at a time
    time.sleep(0.002)
    later = new_ulid()

    assert len(set(first)) == len(first)
    assert max(one[:10] for one in first) < later[:10]
    assert {len(one) for one in first} == {ULID_LENGTH}


def test_a_forked_process_makes_others_than_the_one_it_came_from():
    new_ulid()
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        os.write(writing, new_ulid().encode())
        os._exit(0)
    os.waitpid(child, 0)
    made_there = os.read(reading, 100).decode()
    os.close(reading)
    os.close(writing)

    assert made_there[10:] != new_ulid()[10:]


def test_the_ulid_of_an_id():
    one = new_id("ds")
    assert one == f"ds_{ulid_of(one)}"
    with pytest.raises(ValueError, match="does not end in a ULID"):
        ulid_of("ds_")
