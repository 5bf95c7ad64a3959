"""The check that package indexes answer."""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from scripts.installation.commands import SetupFailed

PYTORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
INDEX_ANSWER_SECONDS = 5.0


def check_indexes(addresses: Sequence[str]) -> None:
    """Make sure within seconds that each index answers. Raises SetupFailed with the setting to change."""
    with ThreadPoolExecutor(max(1, len(addresses))) as pool:
        reasons = zip(addresses, pool.map(_silence, addresses), strict=True)
        silent = [f"{_without_login(address)} ({why})" for address, why in reasons if why]
    if silent:
        names = "PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS" if PYTORCH_CPU_INDEX in addresses else "PIP_INDEX_URL"
        raise SetupFailed(
            f"The package index does not answer: {', '.join(silent)}. Set {names} to a mirror that you reach, or "
            "HTTPS_PROXY to your proxy. Packages in pip's cache need no index."
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
