"""deploy/demo.*: the demo in one container, reached from the browser of the machine it runs on."""

import os
import re
import shlex
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from scripts.environment import EnvironmentIncomplete, prepare
from scripts.launch.starting import has_demo
from scripts.machine import LIBRARIES, PYTHONS
from scripts.processes import PROGRAMS, REPOSITORY

DEPLOY = REPOSITORY / "deploy"
DEMO: dict[str, Any] = yaml.safe_load((DEPLOY / "demo.compose.yaml").read_text())["services"]["demo"]
DOCKERFILE = (DEPLOY / "images/demo.Dockerfile").read_text()


@pytest.fixture(autouse=True)
def _plain_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if re.match("ANNEAL_|DATABASE_|REDIS_|CELERY_", name)]:
        monkeypatch.delenv(name)


def test_the_printed_address_is_the_published_port_and_the_web_process_listens_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in DEMO["environment"].items():
        monkeypatch.setenv(name, value)
    prepared = prepare(tmp_path, is_debug=False, is_launch=False)

    [web] = [program for program in PROGRAMS if program.name == "web"]
    command = shlex.join(prepared.place.command(web))
    host, published, inside = DEMO["ports"][0].split(":")
    address = urlsplit(prepared.public_url)
    assert (address.hostname, str(address.port)) == (host, published)
    assert published == inside  # the main job calls the public address from inside
    assert f"--host 0.0.0.0 --port {inside}" in command


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "anneal.example.com"])
def test_a_launch_that_lets_others_in_wants_the_public_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    """With the default address it would make the demo's operator, without a second factor, for everybody."""
    monkeypatch.setenv("ANNEAL_WEB_HOST", host)
    with pytest.raises(EnvironmentIncomplete, match="Also set ANNEAL_PUBLIC_URL"):
        prepare(tmp_path, is_debug=False, is_launch=True)
    monkeypatch.setenv("ANNEAL_PUBLIC_URL", "http://anneal.example.com:8000")

    assert not has_demo(prepare(tmp_path, is_debug=False, is_launch=False))


def test_without_the_variable_the_web_process_listens_on_the_loopback_interface_alone(
    tmp_path: Path,
) -> None:
    prepared = prepare(tmp_path, is_debug=False, is_launch=False)

    [web] = [program for program in PROGRAMS if program.name == "web"]
    assert "--host 127.0.0.1 " in shlex.join(prepared.place.command(web))


def test_the_image_has_a_supported_python_and_the_library_that_a_slim_debian_lacks_and_runs_without_root() -> None:
    version = re.search(r"^FROM python:(\d+)\.(\d+)-slim", DOCKERFILE, re.MULTILINE)

    assert version and (int(version[1]), int(version[2])) in PYTHONS
    assert LIBRARIES["libnuma.so.1"] in DOCKERFILE
    assert re.findall(r"^USER (\S+)", DOCKERFILE, re.MULTILINE) == ["anneal"]
    assert DEMO["volumes"] == ["data:" + re.findall(r"^VOLUME (\S+)", DOCKERFILE, re.MULTILINE)[0]]


def test_every_file_that_set_up_imports_is_copied_before_it_runs() -> None:
    copied, run = DOCKERFILE.split("RUN python scripts/setup.py")[0], (REPOSITORY / "scripts/setup.py").read_text()

    modules = re.findall(r"^from scripts import (\w+)", run, re.MULTILINE)
    packages = set(re.findall(r"^from scripts\.(\w+)\.", run, re.MULTILINE))
    assert modules and all(f"scripts/{name}.py" in copied for name in [*modules, "setup", "__init__"])
    assert packages and all(f"scripts/{name} scripts/{name}\n" in copied for name in packages)
