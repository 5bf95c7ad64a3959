"""The two virtual environments of this machine: their locks, and whether they are complete."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.installation.commands import REPOSITORY, REQUIREMENTS, run, version_of
from scripts.installation.indexes import PYTORCH_CPU_INDEX
from scripts.installation.packages import WITHOUT_HASHES


@dataclass(frozen=True)
class Environment:
    """One virtual environment and its locks; `fallback_index` is used if no other index has a wheel."""

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
        """Return the locks in as few groups as possible.

        If one lock has hashes, uv requires hashes in all of its group.
        """
        apart = [path for path in self.lock_files if path.name == WITHOUT_HASHES]
        hashed = [path for path in self.lock_files if path.name != WITHOUT_HASHES]
        return [group for group in (apart, hashed) if group]

    @property
    def stamp_file(self) -> Path:
        return self.directory / ".anneal-stamp"

    @property
    def stamp(self) -> str:
        """Return the stamp of this environment's contents; equal stamps mean equal environments."""
        digest = hashlib.sha256()
        for path in self.lock_files:
            digest.update(b"\n" + path.name.encode() + b"\n" + path.read_bytes())
        return digest.hexdigest()

    def is_up_to_date(self) -> bool:
        """Return whether the environment is complete, runs, and matches the locks."""
        return self.is_sound() and self._stamped().get("made_of") == self.stamp

    def is_sound(self) -> bool:
        """Return whether an installation finished in this same folder, and its Python and packages still exist."""
        stamped = self._stamped()
        return (
            stamped.get("directory") == str(self.directory.resolve())
            and set(stamped["packages"]) <= set(self._packages())
            and version_of(self.python) == stamped["python"]
        )

    def write_stamp(self) -> None:
        """Record that an installation finished, and its contents."""
        stamped = {
            "made_of": self.stamp,
            "directory": str(self.directory.resolve()),
            "python": version_of(self.python),
            "packages": self._packages(),
        }
        self.stamp_file.write_text(json.dumps(stamped) + "\n")

    def make_anew(self, python: str) -> None:
        """Replace the folder with an empty environment of this Python. Raises SetupFailed."""
        if self.directory.is_symlink():
            self.directory.unlink()
        shutil.rmtree(self.directory, ignore_errors=True)
        run([python, "-m", "venv", "--without-pip", str(self.directory)])

    def _stamped(self) -> dict[str, Any]:
        try:
            found = json.loads(self.stamp_file.read_text())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def _packages(self) -> list[str]:
        return sorted(path.name for path in self.directory.glob("lib/python*/site-packages/*"))


def environments(*, dev: bool) -> list[Environment]:
    """Return the two environments of this machine, the slower one first."""
    # `make demo` after `make test` must not remove the tools, only to reinstall them next time.
    dev = dev or (REPOSITORY / ".venv/bin/pytest").exists()
    web = ("web.lock", "demo.lock", *(["dev.lock"] if dev else []))
    kind = "gpu" if has_nvidia_gpu() else "cpu"
    names = {"gpu": ["engines-gpu.lock"], "cpu": [WITHOUT_HASHES, "engines-cpu.lock", "engines.lock"]}[kind]
    names += ["engines-dev.lock"] if dev else []
    engines = Environment(
        f"engines ({kind.upper()})",
        REPOSITORY / ".venv-engines",
        tuple(f"engines/{name}" for name in names),
        fallback_index=PYTORCH_CPU_INDEX if kind == "cpu" else None,
    )
    return [engines, Environment("web", REPOSITORY / ".venv", web)]


def has_nvidia_gpu() -> bool:
    if not shutil.which("nvidia-smi"):
        return False
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    return listed.returncode == 0 and "GPU 0" in listed.stdout
