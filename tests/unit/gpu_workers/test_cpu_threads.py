import pytest

from gpu_workers.trainer.children import cpu_threads
from gpu_workers.trainer.children.cpu_threads import count_cores, threads_for


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


@pytest.mark.parametrize(("quota", "cores"), [("max 100000", 8), ("250000 100000", 2), ("50000 100000", 1), ("", 8)])
def test_a_control_group_may_grant_fewer_cores_than_there_are(monkeypatch, tmp_path, quota, cores):
    (tmp_path / "cpu.max").write_text(quota)
    monkeypatch.setattr(cpu_threads, "_CGROUP_LIMIT", tmp_path / "cpu.max")
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))

    assert count_cores() == cores
