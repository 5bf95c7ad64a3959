"""The restart of processes whose code has changed."""

from collections.abc import Sequence

from scripts.launch.starting import say
from scripts.processes import REPOSITORY, Tier
from scripts.supervision import Supervision

WATCHED = {
    ".venv": ("apps", "templates", "static", "locale"),
    ".venv-engines": ("gpu_workers", "apps/contracts", "apps/estimates"),
}


def newest_changes() -> dict[str, tuple[int, int]]:
    """Return, for each environment, the number of watched files and the newest change among them."""
    return {venv: _newest_change(folders) for venv, folders in WATCHED.items()}


def _newest_change(folders: Sequence[str]) -> tuple[int, int]:
    paths = [path for folder in folders for path in (REPOSITORY / folder).rglob("*.*") if path.suffix != ".pyc"]
    changes = [path.stat().st_mtime_ns for path in paths if path.exists()]
    return len(changes), max(changes, default=0)


def restart_changed(supervision: Supervision, venvs: set[str]) -> None:
    # The engine is not restarted: it takes half a minute to load, and reads none of our code after its start.
    changed = [
        p for p in supervision.prepared.programs if p.venv in venvs and p.tier != Tier.SERVICES and p.name != "vllm"
    ]
    say(f"Your code changed: restarting {', '.join(program.name for program in changed)}")
    for program in changed:
        supervision.restart(program)
