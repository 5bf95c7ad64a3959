"""The package indexes that pip uses, and whether they answer."""

from __future__ import annotations

import ast
import re
import ssl
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from scripts.installation.commands import SetupFailed

PYPI = "https://pypi.org/simple"
PYTORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
INDEX_ANSWER_SECONDS = 5.0


def indexes_of(python: Path) -> list[str]:
    """Return the package indexes that pip would use, by its own configuration."""
    asked = subprocess.run([python, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False)
    if asked.returncode:
        return []  # Debian's Python has no pip; the new environment's pip will be asked
    settings: dict[str, str] = {}
    for section in ("global", "install", ":env:"):  # each takes precedence over the one before it
        for name, value in re.findall(rf"^{section}\.([a-z-]+)=(.*)$", asked.stdout, re.MULTILINE):
            settings[name] = ast.literal_eval(value)
    if "proxy" in settings or settings.get("no-index", "") in ("1", "true"):
        return []  # no check is possible through pip's own proxy
    return [settings.get("index-url", PYPI), *settings.get("extra-index-url", "").split()]


def check_indexes(addresses: Sequence[str]) -> None:
    """Make sure within seconds that each index answers. Raises SetupFailed with the setting to change."""
    with ThreadPoolExecutor(max(1, len(addresses))) as pool:
        reasons = zip(addresses, pool.map(_silence, addresses), strict=True)
        silent = [f"{_without_login(address)} ({why})" for address, why in reasons if why]
    if silent:
        names = "PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS" if PYTORCH_CPU_INDEX in addresses else "PIP_INDEX_URL"
        raise SetupFailed(
            f"The package index does not answer: {', '.join(silent)}. Set {names} to a mirror that you reach, or "
            "HTTPS_PROXY to your proxy. A package that pip has kept needs no index."
        )


def _without_login(address: str) -> str:
    parts = urlsplit(address)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def _silence(address: str) -> str:
    """Return why an index does not answer; empty if it answers with any status."""
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
