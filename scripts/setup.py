"""Create .venv and .venv-engines and install the locked dependencies; instant when they are up to date.

    python3 scripts/setup.py             what `make demo` needs
    python3 scripts/setup.py --dev       and the tools of `make check` and `make test`
    python3 scripts/setup.py --browser   and Chromium and Node.js, by apt-get where we are root

Standard library only. Under a Python that Anneal does not support it goes on under one of the path that it does.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import re
import shutil
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))  # it runs as a file, under any Python

from scripts import machine  # noqa: E402

REQUIREMENTS = REPOSITORY / "requirements"
DATA = REPOSITORY / ".anneal"
PYPI = "https://pypi.org/simple"
PYTORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
INDEX_ANSWER_SECONDS = 5.0
# In folders of their own, each with a lock: earlier generations of OpenAI's client that the API is tested with; another
# client, with its own openai; a second opinion on Stripe, GPL, run as a process of its own and never imported; and the
# program of `make audit`.
APART = ("openai-1.109.1", "openai-2.54.0", "litellm", "localstripe", "pip-audit")
# OpenAI's clients for Node.js, at the versions of a lock file of npm's.
NODE_CLIENTS = REPOSITORY / "tests/api/node"
# `anneal` from any folder; -P: an `apps` folder of the place it is called from is not ours.
COMMAND = """#!/bin/sh
here=$(dirname "$(readlink -f "$0")")
PYTHONPATH="$here/../..${PYTHONPATH:+:$PYTHONPATH}" exec "$here/python" -P -m apps.cli "$@"
"""
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# PyTorch's own index has its CPU build and tells its hashes; no other does, so the lock has none.
WITHOUT_HASHES = "torch-cpu.lock"
PIP = ("-m", "pip", "--disable-pip-version-check", "install", "--no-compile", "--quiet", "--no-deps")


# Nothing is compiled. localstripe is plain Python that is published as source alone.
ONLY_WHEELS = ("--only-binary=:all:", "--no-binary=localstripe")


class SetupFailed(Exception):
    """A stage that could not be done; the message ends with what the tool said and what to do."""


class NoWheel(SetupFailed):
    """No index has a wheel of a locked version for this Python."""


@dataclass(frozen=True)
class Environment:
    """One virtual environment and the locks it is made of; `fallback_index` is asked where no other has a wheel."""

    name: str
    directory: Path
    locks: tuple[str, ...]
    fallback_index: str | None = None

    @property
    def python(self) -> Path:
        return self.directory / "bin/python"

    @property
    def lock_files(self) -> list[Path]:
        return [REQUIREMENTS / lock for lock in self.locks]

    @property
    def lock_groups(self) -> list[list[Path]]:
        """The locks in as few groups as pip takes: with hashes in one of them, it wants hashes in all."""
        apart = [path for path in self.lock_files if path.name == WITHOUT_HASHES]
        hashed = [path for path in self.lock_files if path.name != WITHOUT_HASHES]
        return [group for group in (apart, hashed) if group]

    @property
    def stamp_file(self) -> Path:
        return self.directory / ".anneal-stamp"

    @property
    def stamp(self) -> str:
        """What this environment would be made of; equal stamps mean equal environments."""
        digest = hashlib.sha256()
        for lock in self.locks:
            digest.update(b"\n" + lock.encode() + b"\n" + (REQUIREMENTS / lock).read_bytes())
        return digest.hexdigest()

    def is_up_to_date(self) -> bool:
        """Whether it is whole, runs, and holds what the locks say."""
        return self.is_sound() and self._stamped().get("made_of") == self.stamp

    def is_sound(self) -> bool:
        """Whether an installation of it ended, in this very folder, and its Python and packages are still there."""
        stamped = self._stamped()
        return (
            stamped.get("directory") == str(self.directory.resolve())
            and set(stamped["packages"]) <= set(self._packages())
            and _version_of(self.python) == stamped["python"]
        )

    def write_stamp(self) -> None:
        """This method will note that an installation ended, and what it left."""
        stamped = {
            "made_of": self.stamp,
            "directory": str(self.directory.resolve()),
            "python": _version_of(self.python),
            "packages": self._packages(),
        }
        self.stamp_file.write_text(json.dumps(stamped) + "\n")

    def make_anew(self, python: str) -> None:
        """This method will replace the folder by an empty environment of that Python. Raises SetupFailed."""
        if self.directory.is_symlink():
            self.directory.unlink()
        shutil.rmtree(self.directory, ignore_errors=True)
        run([python, "-m", "venv", str(self.directory)])

    def _stamped(self) -> dict[str, Any]:
        try:
            found = json.loads(self.stamp_file.read_text())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def _packages(self) -> list[str]:
        return sorted(path.name for path in self.directory.glob("lib/python*/site-packages/*"))


def _version_of(python: Path | str) -> str:
    """Major and minor version of an interpreter, or nothing where it does not start."""
    try:
        asked = "import sys; print(*sys.version_info[:2], sep='.')"
        return subprocess.run(
            [python, "-I", "-S", "-c", asked], capture_output=True, text=True, check=False
        ).stdout.strip()
    except OSError:
        return ""


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
    locks = {"gpu": ["engines-gpu.lock"], "cpu": [WITHOUT_HASHES, "engines-cpu.lock", "engines.lock"]}[kind]
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
    """This function will bring one environment to its locks, from nothing where it is not sound. Raises SetupFailed."""
    if environment.is_sound():
        environment.stamp_file.unlink()  # cut short, it is made anew
        _install_locks(environment)
    else:
        _install_anew(environment)
    check_torch_build(environment)
    environment.write_stamp()


def _install_anew(environment: Environment) -> None:
    """This function will try this Python and then the others of the path, as not each of them has every wheel."""
    failures: dict[str, NoWheel] = {}
    for python in _pythons():
        version = _version_of(python)
        if version in failures:
            continue
        environment.make_anew(python)
        try:
            _install_locks(environment)
            return
        except NoWheel as failure:
            failures[version] = failure
    tried = "\n".join(f"Python {version}: {failure}" for version, failure in failures.items())
    raise SetupFailed(f"{tried}\nput another Python ({machine.PYTHONS_TEXT}) on the path for {environment.name}")


def _pythons() -> Iterator[str]:
    yield sys.executable
    yield from machine.suitable_pythons()


def _install_locks(environment: Environment) -> None:
    for locks in environment.lock_groups:
        install_locked(environment.python, locks, fallback_index=environment.fallback_index)


def install_locked(
    python: Path, locks: Sequence[Path], *, fallback_index: str | None = None, target: Path | None = None
) -> None:
    """This function will install locks with pip: from the addresses of an earlier time, else from the indexes.

    Files have the hashes of the locks, and the addresses, kept once that was checked, carry them. pip asks an index for
    each package even when it keeps the wheel, so a full cache alone does not help where no index answers. The addresses
    lie in pip's cache beside the wheels. Raises NoWheel, or SetupFailed, naming a silent index.
    """
    into = ["--target", str(target)] if target else []
    wanted = [line.split()[0] for lock in locks for line in lock.read_text().splitlines() if "==" in line]
    kept = _addresses_file(python, locks)
    if kept and kept.exists():
        try:
            run([str(python), *PIP, *into, "--no-index", "--retries=0", "--timeout=5", "-r", str(kept)])
            return
        except SetupFailed:
            pass  # something left the cache
    are_hashed = all(lock.name != WITHOUT_HASHES for lock in locks)
    files = [word for lock in locks for word in ("-r", str(lock))]
    command = [str(python), *PIP, *into, *ONLY_WHEELS, *(["--require-hashes"] if are_hashed else []), *files]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command += ["--report", str(report)]
        check_indexes(indexes_of(python))
        try:
            run(command)
        except NoWheel as failure:
            if not fallback_index:
                raise
            try:
                check_indexes([fallback_index])
            except SetupFailed as silence:
                raise NoWheel(f"{failure}; {silence}") from silence
            run([*command, "--extra-index-url", fallback_index])
        installed = json.loads(report.read_text())["install"]
    if kept and len(installed) == len(wanted):  # what was there before is not in the report
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text("".join(f"{_address(entry)}\n" for entry in installed))


def _addresses_file(python: Path, locks: Sequence[Path]) -> Path | None:
    """Where the addresses are kept that these locks came from for this Python; None where pip keeps nothing."""
    asked = subprocess.run([python, "-m", "pip", "cache", "dir"], capture_output=True, text=True, check=False)
    if asked.returncode:
        return None
    digest = hashlib.sha256(_version_of(python).encode())
    for lock in locks:
        digest.update(lock.read_bytes())
    return Path(asked.stdout.strip()) / "anneal" / f"{digest.hexdigest()}.txt"


def _address(entry: dict[str, Any]) -> str:
    place = entry["download_info"]
    hashes = place.get("archive_info", {}).get("hashes", {})
    fragment = f"#sha256={hashes['sha256']}" if "sha256" in hashes else ""
    return f"{entry['metadata']['name']} @ {place['url']}{fragment}"


def indexes_of(python: Path) -> list[str]:
    """The package indexes that pip would ask, by its own configuration."""
    asked = subprocess.run([python, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False)
    if asked.returncode:
        return []  # Debian's Python has no pip; that of the new environment will tell
    settings: dict[str, str] = {}
    for section in ("global", "install", ":env:"):  # each overrules the one before it
        for name, value in re.findall(rf"^{section}\.([a-z-]+)=(.*)$", asked.stdout, re.MULTILINE):
            settings[name] = ast.literal_eval(value)
    if "proxy" in settings or settings.get("no-index", "") in ("1", "true"):
        return []  # through pip's own proxy we cannot look
    return [settings.get("index-url", PYPI), *settings.get("extra-index-url", "").split()]


def check_indexes(addresses: Sequence[str]) -> None:
    """This function will make sure within seconds that each index answers. Raises SetupFailed with what to set."""
    with ThreadPoolExecutor(max(1, len(addresses))) as pool:
        reasons = zip(addresses, pool.map(_silence, addresses), strict=True)
        silent = [f"{_without_login(address)} ({why})" for address, why in reasons if why]
    if silent:
        names = "PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS" if PYTORCH_CPU_INDEX in addresses else "PIP_INDEX_URL"
        raise SetupFailed(
            f"the package index does not answer: {', '.join(silent)}. Set {names} to a mirror that you reach, or "
            "HTTPS_PROXY to your proxy; a package that pip has kept needs no index"
        )


def _without_login(address: str) -> str:
    parts = urlsplit(address)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def _silence(address: str) -> str:
    """Why an index does not answer; nothing where it answers with any status."""
    if not address.startswith(("http://", "https://")):
        return ""
    page = Request(f"{_without_login(address).rstrip('/')}/pip/", method="HEAD")
    try:
        urlopen(page, timeout=INDEX_ANSWER_SECONDS).close()
    except HTTPError:
        return ""
    except URLError as error:
        return "" if isinstance(error.reason, ssl.SSLError) else str(error.reason)  # pip may have its own certificates
    except OSError as error:
        return str(error)
    return ""


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
    """This function will put other clients and programs into folders of their own, for what uses them."""
    for name in APART:
        lock = REQUIREMENTS / f"{name}.lock"
        stamp, wanted = DATA / name / ".anneal-stamp", lock.read_text()
        if not stamp.exists() or stamp.read_text() != wanted:
            shutil.rmtree(stamp.parent, ignore_errors=True)
            install_locked(python, [lock], target=stamp.parent)
            stamp.write_text(wanted)


def install_node_clients() -> None:
    """This function will put OpenAI's clients for Node.js into a folder of their own, for the tests that use them."""
    target, lock = DATA / "node", (NODE_CLIENTS / "package-lock.json").read_text()
    stamp = target / ".anneal-stamp"
    if stamp.exists() and stamp.read_text() == lock:
        return
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    for name in ("package.json", "package-lock.json"):
        shutil.copy(NODE_CLIENTS / name, target)
    run(["npm", "ci", "--prefix", str(target), "--no-audit", "--no-fund", "--ignore-scripts"])
    stamp.write_text(lock)


def install_programs() -> None:
    """This function will make sure that a browser and Node.js are on the path. Raises SetupFailed with the command."""
    missing = [] if any(shutil.which(name) for name in BROWSERS) else ["chromium"]
    missing += [package for package, program in (("nodejs", "node"), ("npm", "npm")) if not shutil.which(program)]
    if not missing:
        return
    if os.getuid() != 0 or not shutil.which("apt-get"):
        raise SetupFailed(f"the tests need Chromium and Node.js: sudo apt-get install -y {' '.join(missing)}")
    quiet = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    run(["apt-get", "update", "-qq"], environment=quiet)
    run(["apt-get", "install", "-y", "-qq", "--no-install-recommends", *missing], environment=quiet)


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
    # The second is what pip says where a constraints file names the package too.
    if match := re.search(r"ERROR: (?:No matching distribution found for|Cannot install) (\S+)", done.stdout):
        raise NoWheel(f"the package indexes have no wheel of {match[1]} for this Python: see `pip config list`")
    if done.returncode:
        last_lines = "\n".join(done.stdout.strip().splitlines()[-12:])
        raise SetupFailed(f"{' '.join(map(str, command[:6]))} … failed:\n{last_lines}")


def stage(name: str, work: Callable[[], None]) -> None:
    """This function will do one stage and say how long it took."""
    started = time.monotonic()
    work()
    sys.stdout.write(f"  {name:<28} {time.monotonic() - started:6.1f} s\n")
    sys.stdout.flush()


def check_machine() -> None:
    """This function will print what is needed and what was found. Raises SetupFailed where something is missing."""
    found = machine.checks(REPOSITORY)
    sys.stdout.write(machine.report(found))
    sys.stdout.flush()
    if missing := [check.name for check in found if check.fix]:
        raise SetupFailed(f"set-up has not begun, because of: {', '.join(missing)}")


def check_sources(stale: Sequence[Environment]) -> None:
    """This function will make sure that an index answers, where pip's cache is not known to have everything.

    Before environments are made, which takes longer. Raises SetupFailed.
    """
    python = Path(sys.executable)
    kept = [_addresses_file(python, locks) for environment in stale for locks in environment.lock_groups]
    if not all(path and path.exists() for path in kept):
        check_indexes(indexes_of(python))


@contextmanager
def alone() -> Iterator[None]:
    """Let one set-up of this folder run at a time; the next waits and finds its work done."""
    import fcntl  # noqa: PLC0415  not on Windows, where we are gone by now

    with (DATA / "setup.lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def set_up(*, dev: bool, browser: bool) -> float | None:
    """This function will install what is missing and return the seconds it took, or None when nothing was."""
    started = time.monotonic()
    wanted = environments(dev=dev)
    stale = [environment for environment in wanted if not environment.is_up_to_date()]
    if stale:
        check_machine()
        check_sources(stale)
        sys.stdout.write("Installing the locked dependencies\n")
        with ThreadPoolExecutor(len(stale)) as pool:
            for done in [pool.submit(stage, e.name, partial(install, e)) for e in stale]:
                done.result()
    install_command(wanted[-1])
    if dev:
        install_clients(wanted[-1].python)
    if browser:
        install_programs()
        install_node_clients()
    return time.monotonic() - started if stale else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dev", action="store_true", help="the tools of `make check` and `make test`")
    parser.add_argument("--browser", action="store_true", help="Chromium and Node.js, for the tests that use them")
    given = parser.parse_args()
    if foreign := machine.foreign_system():
        sys.stdout.write(f"{foreign}\n")
        return 1
    if not machine.is_suitable(sys.executable) and (others := machine.suitable_pythons()):
        os.execv(others[-1], [others[-1], __file__, *sys.argv[1:]])  # noqa: S606  no shell wanted
    DATA.mkdir(exist_ok=True)
    try:
        with alone():
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
