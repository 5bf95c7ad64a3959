"""Ids of processes that have one parent."""

import os

from apps.core.ids import new_ulid


def test_a_forked_process_makes_other_ids_than_the_one_it_came_from() -> None:
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
