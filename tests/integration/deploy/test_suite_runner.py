"""`make test`: what fails, breaks down or finds nothing fails the suite, and the last line counts every test."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts import test as runner
from scripts.touched import find_changed
from tests.services.ports import free_port

ROOT = Path(__file__).resolve().parents[3]
PASSES = "def test_that_passes(): pass\n"
FAILS = "import pytest\ndef test_that_fails(): assert 1 == 2\ndef test_that_is_skipped(): pytest.skip('not here')\n"
BREAKS_DOWN = "import os\ndef test_that_passes(): pass\ndef test_that_ends_the_process(): os._exit(9)\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -q -p no:cacheprovider --import-mode=importlib\n")
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # they take each start of pytest a second
    monkeypatch.setattr(runner, "LOGS", tmp_path / "logs")
    monkeypatch.setattr(runner, "DURATIONS", tmp_path / "durations.json")
    monkeypatch.setattr(runner, "CONFIGURATIONS", {"web": str(tmp_path / "pytest.ini")})
    return tmp_path


CHECKS = """
import os, threading, urllib.request
from http.server import HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path
from urllib.parse import urlsplit

from django.conf import settings

def test_that_the_settings_are_those_of_the_tests():
    assert settings.SETTINGS_MODULE == "apps.config.settings.test"
    assert Path(urlsplit(settings.OBJECT_STORE).path).is_relative_to(Path.cwd() / ".anneal/test")
    assert not {"DATABASE_SYS_URL", "HF_ENDPOINT", "OTEL_TRACES_SAMPLER"} & set(os.environ)
    assert os.environ["ANNEAL_TEST_DSTACK_URL"] and os.environ["STRIPE_TEST_KEY"]

def test_that_a_server_is_reached_around_the_proxy():
    with HTTPServer(("127.0.0.1", 0), SimpleHTTPRequestHandler) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        assert urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/manage.py", timeout=20).status == 200
"""


def make_part(folder: Path, name: str, content: str, **options: Any) -> runner.Part:
    path = folder / name / f"test_{name}.py"
    path.parent.mkdir()
    path.write_text(content)
    return runner.Part(name, (str(path),), **options)


@pytest.mark.slow
def test_the_last_line_counts_every_part_and_one_failure_fails_all(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = [
        make_part(folder, "good", PASSES),
        make_part(folder, "bad", FAILS),
        make_part(folder, "alone", PASSES, is_alone=True),
    ]

    assert runner.main([], all_parts=parts) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "2 passed, 1 failed, 1 skipped"
    assert any("assert 1 == 2" in line for line in lines)  # the output of what failed, and of nothing else
    assert not any("that_passes" in line and "PASSED" in line for line in lines)
    assert [line.split()[0] for line in lines if line.endswith(" skipped")][-2] == "alone"  # it came last

    assert runner.main(["good"], all_parts=parts) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "1 passed, 0 failed, 0 skipped"


@pytest.mark.slow
@pytest.mark.parametrize("content", [BREAKS_DOWN, "", "import nothing_of_this_name\n"])
def test_a_part_that_breaks_down_or_finds_no_test_fails_the_suite(
    folder: Path, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    assert runner.main([], all_parts=[make_part(folder, "broken", content)]) == 1

    assert capsys.readouterr().out.splitlines()[-1].split(", ")[1] == "1 failed"


@pytest.mark.slow
def test_slow_tests_run_if_all_or_their_part_is_asked_for(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "pytest.ini").write_text((folder / "pytest.ini").read_text() + "markers = slow\n")
    slow = "import pytest\n" + PASSES + "@pytest.mark.slow\n" + PASSES.replace("passes", "passes_late")
    parts = [make_part(folder, "mixed", slow), make_part(folder, "platform", PASSES, is_slow=True)]

    for arguments, count in (([], 1), (["--all"], 3), (["mixed"], 2), (["platform"], 1)):
        assert runner.main(arguments, all_parts=parts) == 0
        assert capsys.readouterr().out.splitlines()[-1] == f"{count} passed, 0 failed, 0 skipped", arguments


@pytest.mark.slow
def test_tests_have_short_paths_for_sockets_and_as_many_parts_at_once_as_the_container_has_cores(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    long = folder / ("x" * 46)
    long.mkdir()
    monkeypatch.setenv("TMPDIR", str(long))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr(runner, "count_cores", lambda: 1)
    counts: list[int] = []
    run = runner._run

    def count(parts: list[runner.Part], durations: dict[str, float], at_once: int) -> list[runner.Run]:
        counts.append(at_once)
        return run(parts, durations, at_once)

    monkeypatch.setattr(runner, "_run", count)
    short = (
        "import tempfile\ndef test_it(tmp_path): assert len(str(tmp_path)) < 60 and tempfile.gettempdir() == '/tmp'\n"
    )

    assert runner.main([], all_parts=[make_part(folder, "short", short)]) == 0
    assert counts == [3]


@pytest.mark.slow
def test_the_files_nearest_to_a_change_may_hold_nightly_tests_only(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "pytest.ini").write_text((folder / "pytest.ini").read_text() + "markers = nightly\n")
    long = make_part(folder, "long", "import pytest\n@pytest.mark.nightly\n" + PASSES, marks="not nightly")
    broken = make_part(folder, "broken", "import nothing_of_this_name\n", marks="not nightly")
    monkeypatch.setattr(runner, "PARTS", (long, broken))

    monkeypatch.setattr(runner, "pick_tests", lambda *parts, **options: list(long.paths))
    assert runner.main(["--quick"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "0 passed, 0 failed, 0 skipped"

    monkeypatch.setattr(runner, "pick_tests", lambda *parts, **options: list(broken.paths))
    assert runner.main(["--quick"]) == 1


@pytest.mark.slow
def test_a_shell_with_an_installation_and_a_proxy_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "test_checks.py"
    path.write_text(CHECKS)
    shell = {
        "ANNEAL_OBJECT_STORE": f"file://{tmp_path}/real",
        "DJANGO_SETTINGS_MODULE": "apps.config.settings.dev",
        "DATABASE_SYS_URL": "postgresql://real",
        "HF_ENDPOINT": "http://mirror.invalid",
        "OTEL_TRACES_SAMPLER": "unknown",
        "ANNEAL_TEST_DSTACK_URL": "http://dstack.invalid",
        "STRIPE_TEST_KEY": "sk_test_x",
        **dict.fromkeys(("http_proxy", "HTTP_PROXY"), f"http://127.0.0.1:{free_port()}"),
        **dict.fromkeys(("no_proxy", "NO_PROXY"), ".example.com"),
    }

    command = [sys.executable, "-m", "pytest", "-c", "pyproject.toml", "--rootdir", ".", str(path)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | shell, capture_output=True, text=True)

    assert done.returncode == 0, done.stdout


def test_a_port_of_an_address_that_this_machine_lacks_is_not_looked_for_for_ever() -> None:
    with pytest.raises(OSError, match="assign"):
        free_port("203.0.113.1")


def test_without_git_the_change_is_unknown_and_nothing_passes(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="make test-quick needs a git checkout"):
        find_changed(tmp_path)


@pytest.mark.slow
def test_what_was_recorded_decides_what_starts_first(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parts = [make_part(folder, name, PASSES) for name in ("short", "long")]
    assert runner.main(["--record"], all_parts=parts) == 0
    recorded = runner.DURATIONS.read_text()
    assert "short/test_short.py" in recorded and "long/test_long.py" in recorded

    runner.DURATIONS.write_text(json.dumps({parts[0].paths[0]: 1.0, parts[1].paths[0]: 9.0}))
    capsys.readouterr()
    assert runner.main(["--at-once", "1"], all_parts=parts) == 0
    ended = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.endswith(" skipped")]
    assert ended[:2] == ["long", "short"]


def test_the_shares_of_a_part_have_each_file_once_and_equal_times() -> None:
    part = next(part for part in runner.PARTS if part.name == "web")
    files = sorted(str(file.relative_to(ROOT)) for file in (ROOT / "tests/web").rglob("test_*.py"))
    durations = dict.fromkeys(files, 1.0) | {files[0]: len(files) - 1.0}

    shares = part.split(durations)

    assert [share.name for share in shares] == ["web-1", "web-2"]
    assert sorted(path for share in shares for path in share.paths) == files
    assert {share.seconds(durations) for share in shares} == {len(files) - 1.0}


def test_a_part_of_two_places_leaves_one_of_three_and_an_alone_one_none() -> None:
    small, large, alone = (
        runner.Part(name, (), places=places, is_alone=name == "alone")
        for name, places in (("small", 1), ("large", 2), ("alone", 1))
    )

    def may_start(part: runner.Part, *going: runner.Part, at_once: int = 3) -> bool:
        return runner.has_place(part, going, at_once)

    assert may_start(large) and may_start(large, small) and may_start(small, large)
    assert not may_start(small, large, small) and not may_start(large, small, small)
    assert may_start(large, at_once=1)  # or it would never run
    assert not may_start(small, large, at_once=1)
    assert may_start(alone) and not may_start(alone, small) and not may_start(small, alone)


STOPPED = """
import sys
from pathlib import Path
from scripts import test as runner

folder = Path(sys.argv[1])
runner.LOGS, runner.CONFIGURATIONS = folder / "logs", {"web": str(folder / "pytest.ini")}
sys.exit(runner.main([], all_parts=[runner.Part("slow", (sys.argv[2],))]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_lets_the_tests_take_down_what_they_started(folder: Path, number: signal.Signals) -> None:
    mark, ended = folder / "started", folder / "ended"
    content = f"""
import pathlib, time, pytest
@pytest.fixture
def server():
    yield
    pathlib.Path({str(ended)!r}).touch()
def test_that_waits(server):
    pathlib.Path({str(mark)!r}).touch()  # here, because a fixture stopped before it yields takes nothing down
    while True:  # a signal that comes just before a nap does not end it
        time.sleep(0.05)
"""
    part = make_part(folder, "slow", content)
    with subprocess.Popen([sys.executable, "-c", STOPPED, folder, part.paths[0]], cwd=ROOT) as process:
        while not mark.exists():
            assert process.poll() is None
            os.sched_yield()
        process.send_signal(number)
        assert process.wait(timeout=120) == 130

    assert ended.exists()
