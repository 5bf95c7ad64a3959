"""What set-up reports about a machine before it downloads anything."""

import ast
from pathlib import Path
from types import SimpleNamespace

import pytest

from scripts import machine, setup


def test_a_machine_that_has_everything_gets_a_table_and_no_advice(tmp_path: Path) -> None:
    text = machine.report([machine.Check("memory", "4 GB free", "12.0 GB free")])

    assert text.splitlines() == [
        f"  {'':<12}{'needed':<43}found",
        f"  {'memory':<12}{'4 GB free':<43}12.0 GB free",
    ]


def test_a_python_without_venv_is_named_with_the_package_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(machine.sys, "version_info", (3, 11, 2))

    assert machine._python().fix == "sudo apt-get install python3.11-venv"


def test_a_python_that_the_locks_do_not_cover_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.sys, "version_info", (3, 15, 0))

    assert "make PYTHON=python3.13" in machine._python().fix


def test_a_processor_without_avx2_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(machine, "_read", lambda path: "flags : fpu sse4_2 avx fma f16c")

    found = machine._processor()
    assert found.found == "no avx2" and found.fix


def test_an_arm_processor_needs_its_own_features(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(machine, "_read", lambda path: "Features : fp asimd evtstrm bf16")

    assert machine._processor() == machine.Check("processor", "asimd", "asimd, bf16")


def test_a_system_without_glibc_is_sent_to_the_container(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.platform, "libc_ver", lambda: ("", ""))

    assert machine.CONTAINER in machine._system().fix


def test_a_library_that_is_missing_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "LIBRARIES", {"libnowhere.so.7": "libnowhere7", "libm.so.6": "libc6"})

    found = machine._libraries()
    assert found.found == "no libnowhere.so.7"
    assert found.fix.startswith("sudo apt-get install libnowhere7 ")


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({"proc/meminfo": "MemAvailable:  8000000 kB\n"}, 8_192_000_000),
        (
            {
                "proc/meminfo": "MemAvailable:  8000000 kB\n",
                "sys/fs/cgroup/memory.max": "3000000000\n",
                "sys/fs/cgroup/memory.current": "1000000000\n",
            },
            2_000_000_000,
        ),
        (
            {
                "proc/meminfo": "MemAvailable:  8000000 kB\n",
                "sys/fs/cgroup/memory.max": "3000000000\n",
                "sys/fs/cgroup/memory.current": "2500000000\n",
                "sys/fs/cgroup/memory.stat": "anon 1\nfile 2000000000\ninactive_file 1500000000\nactive_file 5\n",
            },
            2_000_000_000,
        ),
        (
            {
                "proc/meminfo": "MemAvailable:  8000000 kB\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "3000000000\n",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": "2500000000\n",
                "sys/fs/cgroup/memory/memory.stat": "inactive_file 7\ntotal_inactive_file 500000000\n",
            },
            1_000_000_000,
        ),
        ({"proc/meminfo": "MemAvailable:  8000000 kB\n", "sys/fs/cgroup/memory.max": "max\n"}, 8_192_000_000),
    ],
)
def test_free_memory_is_that_of_the_machine_or_the_container(tmp_path: Path, files: dict[str, str], free: int) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    assert machine.free_memory_bytes(tmp_path) == free


def test_a_disk_that_is_too_small_is_named_with_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "DISK_BYTES", 10**18)

    assert machine._disks(tmp_path, has_gpu=False)[0].fix == f"make room on the disk of {tmp_path}"


def test_a_machine_with_a_gpu_needs_room_for_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda _: SimpleNamespace(free=machine.DISK_BYTES))

    assert [machine._disks(tmp_path, has_gpu=has_gpu)[0].fix == "" for has_gpu in (False, True)] == [True, False]


@pytest.mark.parametrize(("system", "platform"), [("Darwin", "darwin"), ("Windows", "win32")])
def test_on_another_system_the_first_line_is_the_command_of_the_container(
    system: str, platform: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(setup.sys, "argv", ["setup.py"])
    monkeypatch.setattr(setup.sys, "platform", platform)
    monkeypatch.setattr(machine.platform, "system", lambda: system)

    assert setup.main() == 1
    assert machine.CONTAINER in capsys.readouterr().out.splitlines()[0]
    assert (setup.REPOSITORY / machine.CONTAINER.split()[3]).exists()


# What set-up once used or is likely to use, and Python 3.8 lacks.
NEWER_THAN_3_8 = {"functools.cache", "itertools.pairwise", "itertools.batched", "enum.StrEnum", "contextlib.chdir"}


@pytest.mark.parametrize("pattern", ["setup.py", "machine.py", "up.py", "installation/*.py"])
def test_what_every_python_runs_is_written_for_older_ones(pattern: str) -> None:
    paths = list((setup.REPOSITORY / "scripts").glob(pattern))
    assert paths
    for path in paths:
        tree = ast.parse(path.read_text(), feature_version=(3, 8))
        imported = {
            f"{node.module}.{alias.name}"
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        assert not imported & NEWER_THAN_3_8, path


def test_set_up_does_not_begin_on_a_machine_that_lacks_something(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lacking = machine.Check("memory", "4 GB free", "1.0 GB free", "close other programs")
    monkeypatch.setattr(machine, "checks", lambda repository, has_gpu: [lacking])

    with pytest.raises(setup.SetupFailed, match="has not begun, because of: memory"):
        setup.check_machine(has_gpu=False)
    assert "memory: close other programs" in capsys.readouterr().out
