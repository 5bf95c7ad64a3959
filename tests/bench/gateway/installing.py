"""Installs the rivals at the versions committed here, and nginx and wrk, into .anneal/bench-gateway.

    python -m tests.bench.gateway.installing            # install what is missing
    python -m tests.bench.gateway.installing --lock     # resolve the Python rivals anew and write their locks

Nothing of it enters our own environments. nginx and wrk come from Debian's archive, which keeps one version of each at
a time: the result names it. They are unpacked, not installed, which needs no root.
"""

import argparse
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable
from functools import partial
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[3]
CONFIGURATION = Path(__file__).with_name("configuration")
FOLDER = REPOSITORY / ".anneal" / "bench-gateway"
_VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
# LiteLLM's Redis client needs async-timeout where Python is older than 3.11.3, as Debian's is.
PYTHON_RIVALS = {"litellm": ["litellm[proxy]", "async-timeout"], "sglang-router": ["sglang-router"]}


class NotInstalled(Exception):
    """A rival could not be had; without it there is no comparison."""


def install() -> None:
    """Install what is missing or was locked anew since. Raises NotInstalled."""
    for name in PYTHON_RIVALS:
        _once(f"{name}.lock", partial(_install_python, name))
    _once("portkey/package-lock.json", _install_portkey)
    _once("debian.txt", _install_debian)


def versions() -> dict[str, str]:
    """Return what is compared: the committed versions, and those that Debian had."""
    named = {}
    for name in PYTHON_RIVALS:
        locked = dict(line.split("==") for line in (CONFIGURATION / f"{name}.lock").read_text().split())
        named[name.replace("-", "_")] = locked[name]
    debian = dict(_run("dpkg-deb", ["dpkg-deb", "--show", str(deb)]).split() for deb in debian_root().glob("*.deb"))
    lines = (CONFIGURATION / "portkey/package.json").read_text().split('"')
    asked = [str(interpreter()), "-c", "import platform; print(platform.python_version())"]
    return named | {
        "python": f"{_run('python', asked).strip()} ({interpreter()})",
        "portkey": lines[lines.index("@portkey-ai/gateway") + 2],
        "nginx": debian["nginx"],
        "wrk": debian["wrk"],
    }


def python_of(name: str) -> Path:
    return FOLDER / name / "bin" / "python"


def interpreter() -> Path:
    """Return the Python that our gateway and LiteLLM run on: Debian's where the machine has the same version of it.

    It is built with profile-guided optimisation, as the one in the images of deploy/ is; one that a version manager
    compiled is not, and runs plain Python about a quarter slower.
    """
    debians = Path(f"/usr/bin/python{_VERSION}")
    return debians if debians.exists() else Path(sys.executable)


def packages(environment: Path) -> dict[str, str]:
    """Return what lets `interpreter` find the packages of a virtual environment."""
    return {"PYTHONPATH": str(environment / "lib" / f"python{_VERSION}" / "site-packages")}


def debian_root() -> Path:
    return FOLDER / "debian"


def libraries() -> dict[str, str]:
    """Return the environment under which unpacked programs find their libraries."""
    return {"LD_LIBRARY_PATH": str(debian_root() / "usr/lib/x86_64-linux-gnu")}


def _once(lock: str, do: Callable[[], None]) -> None:
    wanted = (CONFIGURATION / lock).read_text()
    stamp = FOLDER / "stamps" / lock.replace("/", "-")
    if stamp.exists() and stamp.read_text() == wanted:
        return
    do()
    stamp.parent.mkdir(parents=True, exist_ok=True)
    stamp.write_text(wanted)


def _run(what: str, command: list[str], *, cwd: Path | None = None) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotInstalled(f"{what}: {' '.join(command[:6])} …\n{done.stderr.strip()[-2000:]}")
    return done.stdout


def _install_python(name: str) -> None:
    folder = FOLDER / name
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=True)
    pip = [str(python_of(name)), "-m", "pip", "--disable-pip-version-check", "--quiet", "install", "--no-deps"]
    _run(name, [*pip, "-r", str(CONFIGURATION / f"{name}.lock")])


def _install_portkey() -> None:
    folder = FOLDER / "portkey"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(CONFIGURATION / "portkey", folder)
    _run("portkey", ["npm", "ci", "--no-audit", "--no-fund", "--ignore-scripts"], cwd=folder)


def _install_debian() -> None:
    root = debian_root()
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    wanted = (CONFIGURATION / "debian.txt").read_text().split()
    if not shutil.which("apt-get"):
        raise NotInstalled(f"this benchmark takes {', '.join(wanted[:2])} from Debian: run it on Debian or Ubuntu")
    # The system's lists may be missing or old, and only root may fetch them anew: it fetches lists of its own.
    lists = FOLDER / "apt"
    for folder in ("lists/partial", "cache/archives/partial"):
        (lists / folder).mkdir(parents=True, exist_ok=True)
    settings = {"Dir::State::Lists": lists / "lists", "Dir::Cache": lists / "cache", "APT::Sandbox::User": "root"}
    apt = ["apt-get", "-qq", *(part for name, value in settings.items() for part in ("-o", f"{name}={value}"))]
    _run("Debian's lists of packages", [*apt, "update"])
    _run("Debian packages", [*apt, "download", *wanted], cwd=root)
    shutil.rmtree(lists)
    for package in sorted(root.glob("*.deb")):
        _run("dpkg", ["dpkg", "-x", str(package), str(root)])


def write_locks() -> None:
    for name, wanted in PYTHON_RIVALS.items():
        folder = FOLDER / f"{name}-lock"
        shutil.rmtree(folder, ignore_errors=True)
        venv.create(folder, with_pip=True)
        pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
        _run(name, [*pip, "--quiet", "install", *wanted])
        frozen = _run(name, [*pip, "freeze", "--exclude=pip", "--exclude=setuptools"])
        (CONFIGURATION / f"{name}.lock").write_text(frozen)
        shutil.rmtree(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lock", action="store_true")
    if parser.parse_args().lock:
        write_locks()
    install()
    sys.stdout.write(f"{versions()}\n")
