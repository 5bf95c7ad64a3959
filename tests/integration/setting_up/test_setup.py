"""Set-up with real virtual environments and a package index on the loopback interface that answers as PyPI does."""

import base64
import hashlib
import os
import shutil
import socket
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from scripts import machine, setup
from scripts.installation import environments, indexes, installer
from scripts.installation.commands import NoWheel, SetupFailed
from scripts.installation.environments import Environment
from scripts.installation.packages import WITHOUT_HASHES, install_locked
from scripts.setup import install
from tests.services.ports import free_port


class Index(SimpleHTTPRequestHandler):
    """Pages that must be asked for each time, wheels that may be kept for ever."""

    def end_headers(self) -> None:
        kept = "max-age=365000000, immutable" if self.path.endswith(".whl") else "max-age=0"
        self.send_header("Cache-Control", f"{kept}, public")
        super().end_headers()

    def log_message(self, *parts: object) -> None:
        pass


def write_wheel(folder: Path, name: str, more: dict[str, str] | None = None) -> str:
    """Write a wheel with one module and more files; return its file name."""
    files = {
        **(more or {}),
        f"{name}/__init__.py": "",
        f"{name}-1.0.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{name}-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = []
    for path, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        record.append(f"{path},sha256={digest},{len(text)}\n")
    files[f"{name}-1.0.dist-info/RECORD"] = "".join(record) + f"{name}-1.0.dist-info/RECORD,,\n"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        for path, text in files.items():
            wheel.writestr(path, text)
    return f"{name}-1.0-py3-none-any.whl"


def locked(folder: Path, name: str) -> str:
    """Return the line of a lock for the wheel that the folder has of this name."""
    digest = hashlib.sha256((folder / f"{name}-1.0-py3-none-any.whl").read_bytes()).hexdigest()
    return f"{name}==1.0 --hash=sha256:{digest}"


@pytest.fixture
def index(tmp_path: Path) -> Iterator[ThreadingHTTPServer]:
    root = tmp_path / "index"
    for name in ("alpha", "beta"):
        (root / "simple" / name).mkdir(parents=True)
        wheel = write_wheel(root, name)
        (root / "simple" / name / "index.html").write_text(f'<!DOCTYPE html><a href="/{wheel}">{wheel}</a>')
    server = ThreadingHTTPServer(("127.0.0.1", 0), lambda *parts: Index(*parts, directory=str(root)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def environment(tmp_path: Path, index: ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Environment]:
    requirements = tmp_path / "requirements"
    requirements.mkdir()
    alpha, beta = (locked(tmp_path / "index", name) for name in ("alpha", "beta"))
    (requirements / "two.lock").write_text(f"{alpha}\n{beta}\n")
    (requirements / "more.lock").write_text(f"gamma==1.0 --hash=sha256:{'0' * 64}\n")
    monkeypatch.setattr(environments, "REQUIREMENTS", requirements)
    for name, value in {
        "PIP_CONFIG_FILE": "/dev/null",
        "PIP_INDEX_URL": f"http://127.0.0.1:{index.server_port}/simple",
        "PIP_TRUSTED_HOST": "127.0.0.1",
        "PIP_EXTRA_INDEX_URL": "",
        "PIP_FIND_LINKS": "",
        "PIP_CACHE_DIR": str(tmp_path / "cache"),
    }.items():
        monkeypatch.setenv(name, value)
    for name in [name for name in os.environ if name.startswith("UV_")]:
        monkeypatch.delenv(name)
    installer.variables.cache_clear()
    yield Environment("web", tmp_path / "venv", ("two.lock",))
    installer.variables.cache_clear()


def packages_of(environment: Environment) -> Path:
    return next(environment.directory.glob("lib/python*/site-packages"))


def delete_python(environment: Environment) -> None:
    environment.python.unlink()


def point_python_nowhere(environment: Environment) -> None:
    environment.python.unlink()
    environment.python.symlink_to("/nowhere/python3.11")


def upgrade_python(environment: Environment) -> None:
    environment.python.unlink()
    environment.python.write_text("#!/bin/sh\necho 3.99\n")
    environment.python.chmod(0o755)


def delete_a_package(environment: Environment) -> None:
    shutil.rmtree(packages_of(environment) / "alpha")


def interrupt(environment: Environment) -> None:
    environment.stamp_file.unlink()


def move_the_folder(environment: Environment) -> None:
    environment.directory.rename(environment.directory.with_name("elsewhere"))
    shutil.copytree(environment.directory.with_name("elsewhere"), environment.directory, symlinks=True)
    environment.stamp_file.write_text(environment.stamp_file.read_text().replace("/venv", "/elsewhere"))


DAMAGES = [delete_python, point_python_nowhere, upgrade_python, delete_a_package, interrupt, move_the_folder]


@pytest.mark.slow
def test_a_damaged_environment_is_noticed_and_made_anew_without_an_index(
    environment: Environment, index: ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install(environment)
    assert environment.is_up_to_date()
    whole = tmp_path / "whole"
    shutil.copytree(environment.directory, whole, symlinks=True)
    for damage in DAMAGES:
        damage(environment)
        assert not environment.is_sound(), damage.__name__
        shutil.rmtree(environment.directory)
        shutil.copytree(whole, environment.directory, symlinks=True, copy_function=os.link)
        assert environment.is_up_to_date()

    delete_a_package(environment)
    (packages_of(environment) / "leftover.py").touch()
    index.shutdown()
    index.server_close()
    install(environment)

    assert environment.is_up_to_date()
    assert (packages_of(environment) / "alpha/__init__.py").exists()
    assert not (packages_of(environment) / "leftover.py").exists()


@pytest.mark.slow
def test_an_index_that_refuses_is_named_with_what_to_set(
    environment: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    point_to(monkeypatch, f"http://user:secret@127.0.0.1:{free_port()}/simple")
    started = time.monotonic()
    with pytest.raises(SetupFailed, match=r"Connection refused.*Set PIP_INDEX_URL") as failed:
        install_locked(Path(sys.executable), environment.lock_files)

    assert "127.0.0.1" in str(failed.value) and "secret" not in str(failed.value)
    assert time.monotonic() - started < 60


@pytest.mark.slow
def test_where_no_index_answers_and_nothing_is_kept_set_up_makes_no_environment(
    environment: Environment, own_installer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    point_to(monkeypatch, f"http://127.0.0.1:{free_port()}/simple")
    monkeypatch.setattr(setup, "check_machine", lambda **_: None)
    monkeypatch.setattr(setup, "environments", lambda *, dev: [environment])

    with pytest.raises(SetupFailed, match="does not answer"):
        setup.set_up(dev=False, browser=False)
    assert not environment.directory.exists()


def test_an_index_that_says_nothing_is_named_after_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexes, "INDEX_ANSWER_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}/whl/cpu"
        with pytest.raises(SetupFailed, match=rf"{address} \(.*timed out"):
            indexes.check_indexes([address])


@pytest.mark.slow
def test_pytorchs_index_is_asked_for_what_the_others_lack_and_named_where_it_is_silent(
    environment: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = f"http://127.0.0.1:{free_port()}/whl/cpu"
    monkeypatch.setattr(indexes, "PYTORCH_CPU_INDEX", dead)
    with pytest.raises(NoWheel, match=rf"gamma==1.0.*{dead}.*PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS"):
        install_locked(Path(sys.executable), [environments.REQUIREMENTS / "more.lock"], fallback_index=dead)


def test_another_python_of_the_path_is_tried_where_this_one_has_no_wheel(
    environment: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def install_locks(environment: Environment) -> None:
        tried.append(made[-1])
        if len(tried) == 1:
            raise NoWheel("no wheel of gamma==1.0")

    made: list[str] = []
    monkeypatch.setattr(machine, "suitable_pythons", lambda: ["/other/python3.12"])
    monkeypatch.setattr(setup, "version_of", lambda python: "3.12" if "other" in str(python) else "3.11")
    monkeypatch.setattr(Environment, "make_anew", lambda self, python: made.append(python))
    monkeypatch.setattr(setup, "_install_locks", install_locks)

    setup._install_anew(environment)
    assert tried == [sys.executable, "/other/python3.12"]


@pytest.mark.slow
def test_a_version_without_a_wheel_is_named_with_the_pythons_that_were_tried(
    environment: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "suitable_pythons", list)
    version = ".".join(map(str, sys.version_info[:2]))

    with pytest.raises(SetupFailed, match=rf"Python {version}: .*gamma==1.0"):
        install(Environment("web", environment.directory, ("more.lock",)))
    assert not environment.is_sound()


@pytest.mark.slow
def test_a_lock_that_changed_is_installed_into_the_sound_environment(
    environment: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(environment)
    (packages_of(environment) / "by_hand.py").touch()
    lock = environments.REQUIREMENTS / "two.lock"
    lock.write_text(lock.read_text().splitlines()[0] + "\n")

    assert not environment.is_up_to_date()
    install(environment)
    assert environment.is_up_to_date()
    assert (packages_of(environment) / "by_hand.py").exists()


@pytest.mark.slow
@pytest.mark.parametrize("change", ["altered", "without a hash"])
def test_a_file_that_the_lock_has_no_hash_of_is_not_installed(
    environment: Environment, tmp_path: Path, change: str
) -> None:
    lock = environments.REQUIREMENTS / "two.lock"
    if change == "altered":
        with zipfile.ZipFile(tmp_path / "index/beta-1.0-py3-none-any.whl", "a") as wheel:
            wheel.writestr("beta/more.py", "")
    else:
        lock.write_text(lock.read_text().rpartition(" --hash")[0] + "\n")

    with pytest.raises(SetupFailed, match=r"(?i)hash"):
        install(environment)
    assert not environment.is_sound()


@pytest.mark.slow
def test_what_has_no_hashes_is_installed_apart_from_what_has() -> None:
    cpu = Environment("engines", Path("x"), (WITHOUT_HASHES, "engines-cpu.lock", "engines.lock"))

    assert [[path.name for path in group] for group in cpu.lock_groups] == [
        ["torch-cpu.lock"], ["engines-cpu.lock", "engines.lock"],
    ]  # fmt: skip


@pytest.mark.nightly
def test_the_installer_comes_from_the_index_and_then_from_the_cache(
    environment: Environment,
    own_installer: Path,
    index: ThreadingHTTPServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = tmp_path / "pip.conf"  # pip refuses a target folder with either of these
    settings.write_text("[global]\nrequire-virtualenv = true\nuser = true\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(settings))

    installer.prepare()
    assert (own_installer / "uv/__init__.py").exists()

    (own_installer / "bin/uv").unlink()
    index.shutdown()
    index.server_close()
    installer.prepare()
    assert (own_installer / "bin/uv").exists()


@pytest.mark.slow
def test_pips_settings_reach_the_installer_but_its_own_take_precedence(
    environment: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {
        "PIP_EXTRA_INDEX_URL": "https://one/simple https://two/simple",
        "PIP_FIND_LINKS": "/here /there",
        "PIP_CERT": "/certificates.pem",
        "PIP_PROXY": "http://proxy:3128",
        "UV_HTTP_TIMEOUT": "7",
    }.items():
        monkeypatch.setenv(name, value)

    found = installer.variables()
    assert found["UV_INDEX"] == "https://one/simple https://two/simple"
    assert found["UV_FIND_LINKS"] == "/here,/there"
    assert (found["SSL_CERT_FILE"], found["ALL_PROXY"]) == ("/certificates.pem", "http://proxy:3128")
    assert found["UV_HTTP_TIMEOUT"] == "7"
    assert found["UV_CACHE_DIR"] == str(tmp_path / "cache/anneal/uv")
    assert installer.indexes() == [], "no check is possible through pip's own proxy"


@pytest.mark.slow
def test_the_older_names_of_the_installers_indexes_count_unless_the_newer_are_set(
    environment: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UV_INDEX_URL", "https://mirror/simple")
    monkeypatch.setenv("UV_EXTRA_INDEX_URL", "https://old/simple")
    monkeypatch.setenv("UV_INDEX", "https://new/simple")
    monkeypatch.setenv("UV_REQUIRE_HASHES", "1")

    assert installer.indexes() == ["https://mirror/simple", "https://new/simple"]
    assert not {"UV_INDEX_URL", "UV_EXTRA_INDEX_URL", "UV_REQUIRE_HASHES"} & installer.variables().keys()


@pytest.mark.slow
def test_without_a_writable_cache_packages_are_not_kept(
    environment: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_CACHE_DIR", "/dev/null/cache")

    assert installer.cache_directory() is None
    assert installer.variables()["UV_NO_CACHE"] == "1"


@pytest.fixture
def own_installer(environment: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the empty folder of an installer whose wheel has one module and a program named uv."""
    folder = tmp_path / "installer"
    root = tmp_path / "index"
    (root / "simple/uv").mkdir()
    wheel = write_wheel(root, "uv", {"uv-1.0.data/scripts/uv": "#!/bin/sh\n"})
    (root / "simple/uv/index.html").write_text(f'<!DOCTYPE html><a href="/{wheel}">{wheel}</a>')
    lock = environments.REQUIREMENTS / "uv.lock"
    lock.write_text(locked(root, "uv") + "\n")
    monkeypatch.setattr(installer, "DIRECTORY", folder)
    monkeypatch.setattr(installer, "UV", folder / "bin/uv")
    monkeypatch.setattr(installer, "LOCK", lock)
    return folder


def point_to(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", address)
    installer.variables.cache_clear()
