"""Locked packages, installed from the cache or from the indexes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from scripts.installation import installer
from scripts.installation.commands import NoWheel, SetupFailed, run
from scripts.installation.indexes import check_indexes

# Nothing is compiled. localstripe is plain Python that is published as source only.
OPTIONS = ("--quiet", "--no-deps", "--only-binary=:all:", "--no-binary=localstripe")
# Only PyTorch's own index has its CPU build and its hashes, so the lock has none.
WITHOUT_HASHES = "torch-cpu.lock"


def install_locked(
    python: Path, locks: Sequence[Path], *, fallback_index: str | None = None, target: Path | None = None
) -> None:
    """Install locks into the environment of `python` or the folder `target`. The hashes of the locks must match.

    Uses no index if the cache has everything. Raises NoWheel, or SetupFailed, which names an index that does not
    answer.
    """
    installer.prepare()
    command = [str(installer.UV), "pip", "install", f"--python={python}", *OPTIONS]
    command += [f"--target={target}"] if target else []
    if all(lock.name != WITHOUT_HASHES for lock in locks):
        command.append("--require-hashes")
    command += [f"--requirements={lock}" for lock in locks]
    try:
        _run([*command, "--offline"])
        return
    except SetupFailed:
        check_indexes(installer.indexes())
    try:
        _run(command)
    except NoWheel as failure:
        if not fallback_index:
            raise
        try:
            check_indexes([fallback_index])
        except SetupFailed as silence:
            raise NoWheel(f"{failure} {silence}") from silence
        _run([*command, f"--index={fallback_index}"])


def _run(command: Sequence[str]) -> None:
    run(command, environment=installer.variables())
