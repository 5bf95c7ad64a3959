"""Create .venv and .venv-engines and install the locked dependencies; instant when they are up to date.

    python3 scripts/setup.py             what `make demo` needs
    python3 scripts/setup.py --dev       and the tools of `make check` and `make test`
    python3 scripts/setup.py --browser   and Chromium, by apt-get where we are root

Standard library only: it runs under whatever Python 3.11 or newer the machine has.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
REQUIREMENTS = REPOSITORY / "requirements"
DATA = REPOSITORY / ".anneal"
PYTORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# Client generations the API is tested with, importable beside the newest; and what they import and the newest does not.
OLD_OPENAI = ("openai==1.109.1", "openai==2.54.0")
OLD_OPENAI_NEEDS = ("distro==1.9.0",)
# Complete in themselves: a client to be tested, with its own openai; and a second opinion on Stripe, GPL, run as a
# process of its own and never imported.
APART = ("litellm", "localstripe")
# `anneal` from any folder; -P: an `apps` folder of the place it is called from is not ours.
COMMAND = """#!/bin/sh
here=$(dirname "$(readlink -f "$0")")
PYTHONPATH="$here/../..${PYTHONPATH:+:$PYTHONPATH}" exec "$here/python" -P -m apps.cli "$@"
"""
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PIP = ("-m", "pip", "--disable-pip-version-check", "install", "--no-compile", "--quiet", "--no-deps")


class SetupFailed(Exception):
    """A stage that could not be done; the message ends with what the tool said and what to do."""


@dataclass(frozen=True)
class Environment:
    """One virtual environment and the locks it is made of; the first lock is tried without further indexes."""

    name: str
    directory: Path
    locks: tuple[str, ...]
    fallback_index: str | None = None

    @property
    def python(self) -> Path:
        return self.directory / "bin/python"

    @property
    def stamp(self) -> str:
        """What this environment would be made of; equal stamps mean equal environments."""
        digest = hashlib.sha256(sys.version.encode())
        for lock in self.locks:
            digest.update(b"\n" + lock.encode() + b"\n" + (REQUIREMENTS / lock).read_bytes())
        return digest.hexdigest()

    def is_up_to_date(self) -> bool:
        stamp_file = self.directory / ".anneal-stamp"
        return self.python.exists() and stamp_file.exists() and stamp_file.read_text() == self.stamp


def has_nvidia_gpu() -> bool:
    if not shutil.which("nvidia-smi"):
        return False
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    return listed.returncode == 0 and "GPU 0" in listed.stdout


def environments(*, dev: bool) -> list[Environment]:
    """The two environments of this machine, the slower one first."""
    dev = dev or _has_dev_tools()
    web = ("web.lock", "demo.lock", *(["dev.lock"] if dev else []))
    kind = "gpu" if has_nvidia_gpu() else "cpu"
    locks = {"gpu": ["engines-gpu.lock"], "cpu": ["engines-cpu.lock", "engines.lock"]}[kind]
    engines = Environment(
        f"engines ({kind.upper()})",
        REPOSITORY / ".venv-engines",
        (*locks, *(["engines-dev.lock"] if dev else [])),
        fallback_index=PYTORCH_CPU_INDEX if kind == "cpu" else None,
    )
    return [engines, Environment("web", REPOSITORY / ".venv", web)]


def _has_dev_tools() -> bool:
    # `make demo` after `make test` must not throw the tools away and reinstall them next time.
    return (REPOSITORY / ".venv/bin/pytest").exists()


def install(environment: Environment) -> None:
    """This function will bring one environment to its locks. Raises SetupFailed."""
    if not environment.python.exists():
        run([sys.executable, "-m", "venv", str(environment.directory)])
    command = [str(environment.python), *PIP]
    for lock in environment.locks:
        command += ["-r", str(REQUIREMENTS / lock)]
    try:
        run(command)
    except SetupFailed:
        if environment.fallback_index is None:
            raise
        run([*command, "--extra-index-url", environment.fallback_index])
    check_torch_build(environment)
    (environment.directory / ".anneal-stamp").write_text(environment.stamp)


def check_torch_build(environment: Environment) -> None:
    """This function will make sure that torch, where installed, fits the machine. Raises SetupFailed."""
    found = list(environment.directory.glob("lib/python*/site-packages/torch/version.py"))
    is_cpu_build = bool(found) and re.search(r"^cuda[^=]*= None$", found[0].read_text(), re.MULTILINE) is not None
    if found and is_cpu_build is has_nvidia_gpu():
        build = "CPU" if is_cpu_build else "CUDA"
        raise SetupFailed(f"pip chose a {build} build of torch for {environment.name}: see `pip config list`")


def install_command(environment: Environment) -> None:
    """This function will put the `anneal` command into an environment."""
    command = environment.directory / "bin/anneal"
    if not command.exists() or command.read_text() != COMMAND:
        command.write_text(COMMAND)
        command.chmod(0o755)


def install_clients(python: Path) -> None:
    """This function will put other clients into folders of their own, for the tests that use them."""
    for client in OLD_OPENAI:
        target = DATA / client.replace("==", "-")
        if not (target / "openai").exists():
            run([str(python), *PIP, "--target", str(target), client, *OLD_OPENAI_NEEDS])
    for name in APART:
        stamp, wanted = DATA / name / ".anneal-stamp", (REQUIREMENTS / f"{name}.lock").read_text()
        if not stamp.exists() or stamp.read_text() != wanted:
            shutil.rmtree(stamp.parent, ignore_errors=True)
            run([str(python), *PIP, "--target", str(stamp.parent), "-r", str(REQUIREMENTS / f"{name}.lock")])
            stamp.write_text(wanted)


def install_browser() -> None:
    """This function will make sure that a Chromium or Chrome is on the path. Raises SetupFailed with the command."""
    if any(shutil.which(name) for name in BROWSERS):
        return
    if os.getuid() != 0 or not shutil.which("apt-get"):
        raise SetupFailed("the browser tests need Chromium: sudo apt-get install -y chromium")
    quiet = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    run(["apt-get", "update", "-qq"], environment=quiet)
    run(["apt-get", "install", "-y", "-qq", "--no-install-recommends", "chromium"], environment=quiet)


def run(command: Sequence[str], *, environment: dict[str, str] | None = None) -> None:
    """This function will run a command in silence. Raises SetupFailed with the end of its output."""
    done = subprocess.run(
        command,
        cwd=REPOSITORY,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        last_lines = "\n".join(done.stdout.strip().splitlines()[-12:])
        raise SetupFailed(f"{' '.join(map(str, command[:6]))} … failed:\n{last_lines}")


def stage(name: str, work: Callable[[], None]) -> None:
    """This function will do one stage and say how long it took."""
    started = time.monotonic()
    work()
    sys.stdout.write(f"  {name:<28} {time.monotonic() - started:6.1f} s\n")
    sys.stdout.flush()


def set_up(*, dev: bool, browser: bool) -> float | None:
    """This function will install what is missing and return the seconds it took, or None when nothing was."""
    started = time.monotonic()
    wanted = environments(dev=dev)
    stale = [environment for environment in wanted if not environment.is_up_to_date()]
    if stale:
        sys.stdout.write("Installing the locked dependencies\n")
        with ThreadPoolExecutor(len(stale)) as pool:
            for done in [pool.submit(stage, e.name, partial(install, e)) for e in stale]:
                done.result()
    install_command(wanted[-1])
    if dev:
        install_clients(wanted[-1].python)
    if browser:
        install_browser()
    return time.monotonic() - started if stale else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dev", action="store_true", help="the tools of `make check` and `make test`")
    parser.add_argument("--browser", action="store_true", help="Chromium for the browser tests")
    given = parser.parse_args()
    if sys.version_info < (3, 11):  # noqa: UP036  the very place where an older one is met
        sys.stderr.write(f"Anneal needs Python 3.11 or newer, this is {sys.version.split()[0]}\n")
        return 1
    DATA.mkdir(exist_ok=True)
    try:
        seconds = set_up(dev=given.dev, browser=given.browser)
    except SetupFailed as failure:
        sys.stderr.write(f"{failure}\n")
        return 1
    if seconds is not None:
        (DATA / "setup.json").write_text(json.dumps({"seconds_install": round(seconds, 1)}) + "\n")
        sys.stdout.write(f"  {'installed':<28} {seconds:6.1f} s\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
