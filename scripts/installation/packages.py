"""Locked packages, installed with pip from the addresses of an earlier installation or from the indexes."""

from __future__ import annotations

import hashlib
import json
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.installation.commands import NoWheel, SetupFailed, run, version_of
from scripts.installation.indexes import check_indexes, indexes_of

PIP = ("-m", "pip", "--disable-pip-version-check", "install", "--no-compile", "--quiet", "--no-deps")
# Nothing is compiled. localstripe is plain Python that is published as source only.
ONLY_WHEELS = ("--only-binary=:all:", "--no-binary=localstripe")
# Only PyTorch's own index has its CPU build and its hashes, so the lock has none.
WITHOUT_HASHES = "torch-cpu.lock"


def install_locked(
    python: Path, locks: Sequence[Path], *, fallback_index: str | None = None, target: Path | None = None
) -> None:
    """Install locks with pip: from the addresses of an earlier installation, else from the indexes.

    The files must match the hashes of the locks. The addresses are kept after that check, and contain the hashes. pip
    contacts an index for each package even if it has the wheel, so a full cache alone does not help when no index
    answers. The addresses are in pip's cache beside the wheels. Raises NoWheel, or SetupFailed, naming a silent index.
    """
    into = ["--target", str(target)] if target else []
    wanted = [line.split()[0] for lock in locks for line in lock.read_text().splitlines() if "==" in line]
    kept = addresses_file(python, locks)
    if kept and kept.exists():
        try:
            run([str(python), *PIP, *into, "--no-index", "--retries=0", "--timeout=5", "-r", str(kept)])
            return
        except SetupFailed:
            pass  # a file is no longer in the cache
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
                raise NoWheel(f"{failure} {silence}") from silence
            run([*command, "--extra-index-url", fallback_index])
        installed = json.loads(report.read_text())["install"]
    if kept and len(installed) == len(wanted):  # the report omits packages that were there before
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text("".join(f"{_address(entry)}\n" for entry in installed))


def addresses_file(python: Path, locks: Sequence[Path]) -> Path | None:
    """Return the file with the addresses of these locks for this Python; None if pip keeps no cache."""
    asked = subprocess.run([python, "-m", "pip", "cache", "dir"], capture_output=True, text=True, check=False)
    if asked.returncode:
        return None
    digest = hashlib.sha256(version_of(python).encode())
    for lock in locks:
        digest.update(lock.read_bytes())
    return Path(asked.stdout.strip()) / "anneal" / f"{digest.hexdigest()}.txt"


def _address(entry: dict[str, Any]) -> str:
    place = entry["download_info"]
    hashes = place.get("archive_info", {}).get("hashes", {})
    fragment = f"#sha256={hashes['sha256']}" if "sha256" in hashes else ""
    return f"{entry['metadata']['name']} @ {place['url']}{fragment}"
