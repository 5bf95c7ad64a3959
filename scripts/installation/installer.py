"""uv, which installs all packages; pip installs uv, and its configuration applies to both."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from functools import lru_cache
from pathlib import Path
from threading import Lock

from scripts.installation.commands import DATA, REQUIREMENTS, SetupFailed, run
from scripts.installation.indexes import check_indexes

DIRECTORY = DATA / "installer"
UV = DIRECTORY / "bin/uv"
LOCK = REQUIREMENTS / "programs/uv.lock"
PYPI = "https://pypi.org/simple"
_ONE_AT_A_TIME = Lock()
_VARIABLES = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "no-index": "UV_NO_INDEX",
    "trusted-host": "UV_INSECURE_HOST",
    "keyring-provider": "UV_KEYRING_PROVIDER",
    "timeout": "UV_HTTP_TIMEOUT",
    "default-timeout": "UV_HTTP_TIMEOUT",
    "proxy": "ALL_PROXY",
    "cert": "SSL_CERT_FILE",
    "client-cert": "SSL_CLIENT_CERT",
}
# Names of older versions of uv, which prefers the newer ones, of which we set the first.
_OLD_NAMES = {"UV_INDEX_URL": "UV_DEFAULT_INDEX", "UV_EXTRA_INDEX_URL": "UV_INDEX"}
_LEFT_OUT = (*_OLD_NAMES, "UV_REQUIRE_HASHES")  # one lock has no hashes; uv requires those of the others by itself


def prepare() -> None:
    """Install the locked uv, if it is missing, from the wheel in our cache or else from the indexes.

    Raises SetupFailed, naming a silent index.
    """
    with _ONE_AT_A_TIME:
        _prepare()


def _prepare() -> None:
    stamp = DIRECTORY / ".anneal-stamp"
    if stamp.exists() and stamp.read_text() == LOCK.read_text() and UV.exists():
        return
    shutil.rmtree(DIRECTORY, ignore_errors=True)
    wanted = ["--quiet", "--no-deps", "--only-binary=:all:", "--require-hashes", f"--requirement={LOCK}"]
    with tempfile.TemporaryDirectory() as temporary:
        wheels = cache_directory() or Path(temporary)
        install = [*pip_command(), "install", "--no-index", f"--find-links={wheels}", f"--target={DIRECTORY}", *wanted]
        # Settings for the user's own packages; with either, pip refuses a target folder.
        environment = os.environ | {"PIP_REQUIRE_VIRTUALENV": "0", "PIP_USER": "0"}
        try:
            run(install, environment=environment)
        except SetupFailed:
            check_indexes(indexes())
            run([*pip_command(), "download", f"--dest={wheels}", *wanted], environment=environment)
            run(install, environment=environment)
    stamp.write_text(LOCK.read_text())


@lru_cache(maxsize=None)  # noqa: UP033  Python 3.8, which gets as far as this, lacks functools.cache
def pip_command() -> tuple[str, ...]:
    """Return the command of this Python's pip. If it has none, as in Debian, return that of a new environment."""
    python = Path(sys.executable)
    if importlib.util.find_spec("pip") is None:
        import fcntl  # noqa: PLC0415 - Windows, which set-up refuses in words, lacks it

        python = DATA / "pip/bin/python"
        DATA.mkdir(parents=True, exist_ok=True)
        with (DATA / "pip.lock").open("w") as lock:  # several processes may set up at once
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not _has_pip(python):
                run([sys.executable, "-m", "venv", "--clear", str(DATA / "pip")])
    return str(python), "-m", "pip", "--disable-pip-version-check"


def _has_pip(python: Path) -> bool:
    """Return whether an environment of this same Python exists and has pip."""
    if not python.exists():
        return False
    asked = [str(python), "-c", "import pip, sys; print(sys.base_prefix)"]
    return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip() == sys.base_prefix


@lru_cache(maxsize=None)  # noqa: UP033  as above
def variables() -> dict[str, str]:
    """Return the environment in which uv uses pip's indexes, proxy, certificates and cache.

    So a mirror is configured once, for pip. Variables of uv that the user has set take precedence. Constraints are left
    out, because they cannot change a locked version and uv refuses them beside hashes. Raises SetupFailed if pip's
    configuration is not readable.
    """
    found = {"UV_DEFAULT_INDEX": PYPI, "UV_SYSTEM_CERTS": "1", "UV_PYTHON_DOWNLOADS": "never"}
    # As in pip, all indexes count as equal: the hashes of the locks decide which file is right.
    found["UV_INDEX_STRATEGY"] = "unsafe-best-match"
    if bundle := os.environ.get("REQUESTS_CA_BUNDLE"):  # pip uses it too
        found["SSL_CERT_FILE"] = bundle
    for name, value in _pip_settings().items():
        if name in _VARIABLES:
            separator = "," if name == "find-links" else " "
            found[_VARIABLES[name]] = separator.join(value.split())
    kept = cache_directory()
    found |= {"UV_CACHE_DIR": str(kept / "uv")} if kept else {"UV_NO_CACHE": "1"}
    own = {name: value for name, value in os.environ.items() if name.startswith("UV_")}
    own = {_OLD_NAMES[name]: own[name] for name in _OLD_NAMES if name in own} | own
    plain = {name: value for name, value in os.environ.items() if name not in own}
    return {name: value for name, value in (plain | found | own).items() if name not in _LEFT_OUT}


def indexes() -> list[str]:
    """Return the addresses of the package indexes that are in use."""
    found = variables()
    if found.get("UV_NO_INDEX", "").lower() in ("1", "true") or "ALL_PROXY" in found or "all_proxy" in found:
        return []  # through a proxy, only the installer itself can tell
    return [found["UV_DEFAULT_INDEX"], *found.get("UV_INDEX", "").split()]


def cache_directory() -> Path | None:
    """Return our folder in pip's cache, created if missing; None if pip keeps no cache or we may not write there."""
    asked = subprocess.run([*pip_command(), "cache", "dir"], capture_output=True, text=True, check=False)
    kept = Path(asked.stdout.strip()) / "anneal"
    if asked.returncode or "~" in kept.parts:  # an account without a home: pip would make a folder of this name
        return None
    try:
        kept.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return kept if os.access(kept, os.W_OK) else None


def _pip_settings() -> dict[str, str]:
    listed = subprocess.run([*pip_command(), "config", "list"], capture_output=True, text=True, check=False)
    if listed.returncode:
        raise SetupFailed(f"pip cannot read its settings:\n{listed.stderr.strip()}")
    settings: dict[str, str] = {}
    for section in ("global", "install", ":env:"):  # each takes precedence over the one before it
        for name, value in re.findall(rf"^{section}\.([a-z-]+)=(.*)$", listed.stdout, re.MULTILINE):
            settings[name] = ast.literal_eval(value)
    return settings
