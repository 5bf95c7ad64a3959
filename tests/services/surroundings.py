"""What a test run takes from the shell that started it, and what it must not."""

import os

_LOCAL = ("127.0.0.1", "localhost", "::1")


def go_around_proxies() -> None:
    """Reach servers on this machine directly, although the shell names a proxy, which cannot reach them."""
    kept = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    names = [name.strip() for name in kept.split(",") if name.strip()]
    added = [] if "*" in names else [name for name in _LOCAL if name not in names]  # a lone star means all
    value = ",".join([*names, *added])
    os.environ.update(no_proxy=value, NO_PROXY=value)
