"""The names of the dashboard's static files, for checks before a request reaches Django."""

from functools import cache
from pathlib import Path

from django.conf import settings
from django.contrib.staticfiles import finders


def has_file(path: str) -> bool:
    """Return whether a path under `/static/` names a collected file or, during development, a source file."""
    if settings.DEBUG:
        return finders.find(path.removeprefix(settings.STATIC_URL)) is not None
    return path in _collected()


@cache
def _collected() -> frozenset[str]:
    root = Path(settings.STATIC_ROOT)
    return frozenset(f"{settings.STATIC_URL}{each.relative_to(root)}" for each in root.rglob("*") if each.is_file())
