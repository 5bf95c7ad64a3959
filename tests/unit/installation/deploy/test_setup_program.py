"""What set-up says when it waits, is stopped or may not write, and the program that runs it before a launch."""

import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scripts import machine, setup, up
from scripts.installation import clients, commands, installer
from scripts.installation.commands import SetupFailed
from scripts.launch import __main__ as launch

SetUp = Callable[[Callable[[], float | None]], int]


def code_of(main: Callable[[], int]) -> int:
    """Return a program's exit code; fail, instead of ending all tests, if Ctrl-C would end it with a traceback."""
    try:
        return main()
    except KeyboardInterrupt:
        pytest.fail("A traceback.")


@pytest.fixture
def umask() -> Iterator[None]:
    before = os.umask(0o077)
    yield
    os.umask(before)


@pytest.fixture
def set_up(tmp_path: Path, umask: None, monkeypatch: pytest.MonkeyPatch) -> SetUp:
    """Return what runs the program with other work than the installation, under an umask of 077."""

    def run(work: Callable[[], float | None]) -> int:
        monkeypatch.setattr(setup, "set_up", lambda **_: work())
        return code_of(setup.main)

    monkeypatch.setattr(setup, "DATA", tmp_path / ".anneal")
    monkeypatch.setattr(setup.sys, "argv", ["setup.py"])
    monkeypatch.setattr(machine, "is_suitable", lambda python: True)
    return run


def test_whatever_the_umask_other_accounts_can_read_what_set_up_installs(set_up: SetUp, tmp_path: Path) -> None:
    """As root, PostgreSQL runs as another account."""
    program = tmp_path / "programs/postgres"

    def install() -> float:
        program.parent.mkdir()
        program.touch()
        return 1.25

    assert set_up(install) == 0
    assert (program.parent.stat().st_mode & 0o777, program.stat().st_mode & 0o777) == (0o755, 0o644)
    assert json.loads((tmp_path / ".anneal/setup.json").read_text()) == {"seconds_install": 1.2}


def test_a_second_set_up_says_that_it_waits_and_begins_when_the_first_has_ended(
    set_up: SetUp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / ".anneal").mkdir()
    first = (tmp_path / ".anneal/setup.lock").open("a")
    fcntl.flock(first, fcntl.LOCK_EX)
    lock, order = fcntl.flock, list[str]()

    def flock(file: Any, kind: int) -> None:
        if kind == fcntl.LOCK_EX:  # it would wait now
            order.append(capsys.readouterr().out)
            first.close()
        lock(file, kind)

    def install() -> None:
        order.append("installs")

    monkeypatch.setattr(fcntl, "flock", flock)

    assert set_up(install) == 0
    assert order == ["Another set-up of this folder is running. Waiting until it ends.\n", "installs"]


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_ctrl_c_ends_set_up_with_one_line(set_up: SetUp, capsys: pytest.CaptureFixture[str]) -> None:
    assert set_up(interrupt) == 130
    assert capsys.readouterr() == ("", "\nStopped. Run it again to continue.\n")


def test_ctrl_c_while_set_up_looks_for_a_python_is_no_traceback(
    set_up: SetUp, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine, "is_suitable", interrupt)

    assert set_up(lambda: None) == 130
    assert capsys.readouterr().err == "\nStopped. Run it again to continue.\n"


@pytest.mark.parametrize("code", [-signal.SIGINT, 130])
def test_a_command_that_ctrl_c_ended_is_not_replaced_by_another(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """Otherwise the installation from the cache goes on from the indexes, in its thread."""
    monkeypatch.setattr(commands.subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], code, stdout=""))

    with pytest.raises(KeyboardInterrupt):
        commands.run(["uv", "pip", "install", "--offline"])


def test_a_file_of_another_account_is_named_with_its_owner(
    set_up: SetUp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()

    def install() -> None:
        raise PermissionError(13, "Permission denied", str(theirs / "stamp"))

    assert set_up(install) == 1
    assert capsys.readouterr().err == f"Set-up stopped: Permission denied: {theirs}/stamp\n"

    monkeypatch.setattr(machine.os, "getuid", lambda: theirs.stat().st_uid + 1)
    monkeypatch.setattr(machine, "_name_of", lambda user: f"account {user - theirs.stat().st_uid}")

    assert set_up(install) == 1
    assert f"{theirs} belongs to another account (account 0). Run Anneal as" in capsys.readouterr().err


def test_a_full_disk_ends_set_up_with_one_line(set_up: SetUp, capsys: pytest.CaptureFixture[str]) -> None:
    def install() -> None:
        raise OSError(28, "No space left on device")

    assert set_up(install) == 1
    assert capsys.readouterr().err == "Set-up stopped: [Errno 28] No space left on device\n"


# --- the program that runs set-up, then a launch ------------------------------------------------------------------


class SetUpProcess:
    """A set-up that ends a moment after Ctrl-C, which reaches both."""

    def __init__(self, code: int) -> None:
        self.returncode: int | None = None
        self._code, self._interrupts = code, iter([True, True])

    def poll(self) -> int | None:
        return self.returncode

    def wait(self) -> None:
        if next(self._interrupts, False):
            raise KeyboardInterrupt
        self.returncode = self._code


@pytest.mark.parametrize("code", [130, 0])
def test_after_ctrl_c_set_up_is_waited_for_and_nothing_starts(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """Were it killed, it could not say that it stopped, and its installers would go on without it."""
    monkeypatch.setattr(up, "subprocess", SimpleNamespace(Popen=lambda *_, **__: SetUpProcess(code)))
    monkeypatch.setattr(up.sys, "argv", ["up.py"])
    monkeypatch.setattr(up.os, "execv", lambda *_: pytest.fail("it starts"))

    with pytest.raises(SystemExit) as ended:
        up.main()
    assert ended.value.code == 130


def test_help_needs_no_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(up, "REPOSITORY", tmp_path)
    monkeypatch.setattr(up.sys, "argv", ["up.py", "--help"])
    monkeypatch.setattr(up.os, "chdir", lambda path: None)

    with pytest.raises(SystemExit) as ended:
        up.main()
    assert ended.value.code == 0 and "--no-main-job" in capsys.readouterr().out


def test_ctrl_c_before_anything_was_started_is_no_traceback(
    umask: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ending the processes of a launch that was cut off can take 15 s."""
    monkeypatch.setattr(launch.signal, "signal", lambda *_: None)
    monkeypatch.setattr(launch.sys, "argv", ["up.py", "--home", str(tmp_path)])
    monkeypatch.setattr(launch, "find_leftovers", interrupt)

    assert code_of(launch.main) == 130
    assert capsys.readouterr().err == "\nStopped.\n"


def test_settings_that_pip_cannot_read_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = subprocess.CompletedProcess([], 1, stdout="", stderr="ERROR: pip.conf contains parsing errors\n")
    monkeypatch.setattr(installer, "pip_command", lambda: (sys.executable, "-m", "pip"))
    monkeypatch.setattr(installer.subprocess, "run", lambda *_, **__: broken)

    with pytest.raises(SetupFailed, match=r"pip cannot read its settings:\nERROR: pip\.conf contains parsing errors"):
        installer._pip_settings()


def test_an_account_without_a_home_keeps_no_packages_and_gets_no_folder_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = subprocess.CompletedProcess([], 0, stdout=f"{tmp_path}/~/.cache/pip\n", stderr="")
    monkeypatch.setattr(installer, "pip_command", lambda: (sys.executable, "-m", "pip"))
    monkeypatch.setattr(installer.subprocess, "run", lambda *_, **__: answer)
    monkeypatch.chdir(tmp_path)

    assert installer.cache_directory() is None
    assert list(tmp_path.iterdir()) == []


def test_helm_on_the_path_is_enough_and_without_one_the_tests_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clients, "_HELM", tmp_path / "of the lock")
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(SetupFailed, match="Helm 4"):
        clients.find_helm()
    (tmp_path / "helm").touch(mode=0o755)
    assert clients.find_helm() == tmp_path / "helm"


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Return the programs on the path of an administrator, with Node.js at a version that a test may change."""
    found = {name: f"/usr/bin/{name}" for name in ("apt-get", "google-chrome", "npm", "node")} | {"version": "v20.0.0"}
    monkeypatch.setattr(clients.os, "getuid", lambda: 0)
    monkeypatch.setattr(clients.shutil, "which", found.get)
    answer = SimpleNamespace(run=lambda *_, **__: SimpleNamespace(stdout=found["version"] + "\n"))
    monkeypatch.setattr(clients, "subprocess", answer)
    return found


def test_where_apt_has_no_chromium_another_browser_is_named(
    programs: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(command: list[str], **_: object) -> None:
        if "chromium-headless-shell" in command:
            raise SetupFailed("E: Unable to locate package chromium-headless-shell")

    monkeypatch.setattr(clients, "run", refuse)
    clients.install_programs()
    del programs["google-chrome"]

    with pytest.raises(SetupFailed, match=r"(?s)E: Unable to locate.*On Ubuntu.*install Google Chrome"):
        clients.install_programs()


@pytest.mark.parametrize("version", ["v18.19.0", ""])
def test_an_old_node_is_named_with_what_is_needed(
    programs: dict[str, str], version: str, capsys: pytest.CaptureFixture[str]
) -> None:
    clients.install_programs()
    assert capsys.readouterr().out == ""

    programs["version"] = version
    clients.install_programs()

    assert f"Node.js 20 or later; /usr/bin/node is {version or 'not usable'}." in capsys.readouterr().out
