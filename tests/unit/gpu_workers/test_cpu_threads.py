import pytest

from gpu_workers.trainer.children import cpu_threads
from gpu_workers.trainer.children.cpu_threads import choose_threads, count_cores, threads_for


@pytest.mark.parametrize(
    ("cores", "busy", "limit", "threads"),
    [
        (1, 0.0, 0, 1),
        (2, 0.0, 0, 1),  # one core stays free
        (2, 2.0, 0, 1),
        (4, 0.2, 0, 3),
        (4, 1.1, 0, 3),
        (4, 1.6, 0, 2),
        (4, 4.0, 0, 1),
        (16, 0.0, 4, 4),
        (16, 14.0, 4, 2),
        (16, 0.0, 0, 15),
    ],
)
def test_each_thread_finds_a_free_core(cores, busy, limit, threads):
    assert threads_for(cores=cores, busy_cores=busy, limit=limit) == threads


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Return what makes a machine with so many cores, and the limits of our control group."""

    def make(cores: int, files: dict[str, str]) -> None:
        monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(cores)))
        monkeypatch.setattr(cpu_threads, "_CGROUP", tmp_path)
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(text)

    return make


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cpu.max": "max 100000\n"}, 8),
        ({"cpu.max": "250000 100000\n"}, 2),
        ({"cpu.max": "50000 100000\n"}, 1),
        ({"cpu.max": ""}, 8),
        ({}, 8),
        ({"cpu/cpu.cfs_quota_us": "300000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 3),  # version 1
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 8),
    ],
)
def test_a_control_group_may_grant_fewer_cores_than_there_are(machine, files, cores):
    machine(8, files)

    assert count_cores() == cores


@pytest.mark.parametrize(("busy_share", "threads"), [(0.0, 7), (0.5, 4), (1.0, 1)])
def test_a_busy_host_counts_by_the_part_of_its_cores_that_a_container_has(
    machine, monkeypatch, tmp_path, busy_share, threads
):
    """Of 64 cores we have 8. With half of all busy, four of ours are free, although 32 do other work."""
    machine(64, {"cpu.max": "800000 100000\n"})
    stat = tmp_path / "stat"
    stat.write_text("cpu 1000 0 500 9000 0 0 0 0 0 0\n")

    def sleep(seconds: float) -> None:
        ticks = int(64 * 100 * seconds)
        busy = int(ticks * busy_share)
        stat.write_text(f"cpu {1000 + busy} 0 500 {9000 + ticks - busy} 0 0 0 0 0 0\n")

    monkeypatch.setattr(cpu_threads, "_STAT", stat)
    monkeypatch.setattr(cpu_threads.time, "sleep", sleep)

    assert choose_threads() == threads
