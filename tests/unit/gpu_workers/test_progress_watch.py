"""Time without progress, as far as the child could use it."""

import pytest

from gpu_workers.trainer.progress_watch import Activity, ProgressWatch


class Machine:
    """A clock, and a child whose activity the test sets."""

    def __init__(self) -> None:
        self.now = 0.0
        self.activity = Activity()
        self.watch = ProgressWatch(least_seconds=100.0, clock=lambda: self.now)
        self.watch.follow(self)

    def read(self) -> Activity:
        return self.activity

    def pass_seconds(self, seconds: int) -> None:
        for _ in range(seconds):
            self.now += 1.0
            self.watch.check()


@pytest.fixture
def machine():
    return Machine()


def test_a_child_that_does_nothing_is_stalled_at_the_limit(machine):
    machine.pass_seconds(99)
    assert not machine.watch.is_stalled

    machine.pass_seconds(2)

    assert machine.watch.is_stalled


def test_a_suspended_worker_counts_seconds_of_the_hours_it_slept(machine):
    machine.pass_seconds(50)

    machine.now += 8 * 3600.0
    machine.watch.check()

    assert machine.watch.still_seconds == pytest.approx(60.0, abs=2.0)


def test_time_spent_waiting_for_a_core_does_not_count(machine):
    for second in range(1, 301):
        machine.activity = Activity(waited_seconds=0.9 * second)
        machine.pass_seconds(1)

    assert machine.watch.still_seconds == pytest.approx(30.0, abs=3.0)


@pytest.mark.parametrize(
    ("activity", "is_progress"),
    [
        (Activity(pulse=1), True),
        (Activity(moved_bytes=4 * 2**20), True),
        (Activity(moved_bytes=100_000), False),  # the log of a process that hangs
    ],
)
def test_what_counts_as_progress(machine, activity, is_progress):
    machine.pass_seconds(90)
    work = machine.watch.work

    machine.activity = activity
    machine.pass_seconds(20)

    assert machine.watch.is_stalled is not is_progress
    assert (machine.watch.work > work) is is_progress


def test_few_bytes_at_a_time_become_progress_when_they_are_many(machine):
    for second in range(1, 301):
        machine.activity = Activity(moved_bytes=second * 2**17)
        machine.pass_seconds(1)

    assert not machine.watch.is_stalled and machine.watch.still_seconds < 40


def test_a_slow_step_has_ten_times_its_time_and_never_less_than_the_least(machine):
    machine.watch.expect(0.001)
    assert machine.watch.limit_seconds == 100.0

    machine.watch.expect(60.0)

    assert machine.watch.limit_seconds == 600.0
