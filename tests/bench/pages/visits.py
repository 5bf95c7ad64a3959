"""Visits of the pages as an operator and as the owner of a large organization, under the role of the web process.

    python -m tests.bench.pages.visits PLACES ROUNDS [explain]

Prints one JSON object: the milliseconds of each address, and the slowest statements.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import django

STAFF = (
    "/staff/", "/staff/jobs", "/staff/jobs?after={deep}", "/staff/jobs?status=queued", "/staff/jobs?status=failed",
    "/staff/jobs?status=paused", "/staff/jobs/{job}", "/staff/jobs/{live}", "/staff/workers/{worker}", "/staff/pools",
    "/staff/pools/{pool}", "/staff/pools/{pool}/calibrations", "/staff/replicas", "/staff/base-models",
    "/staff/prices", "/staff/payments", "/staff/books", "/staff/books?sort=newest", "/staff/margin", "/staff/workers",
    "/staff/organizations", "/staff/organizations/{organization}", "/staff/organizations/{organization}/adjust",
    "/staff/quotas", "/staff/quotas/{organization}", "/staff/audit", "/staff/audit?organization={organization}",
)  # fmt: skip
MEMBER = (
    "/", "/jobs", "/jobs?after={deep}", "/jobs?status=paused", "/jobs?status=failed", "/jobs?sort=cost",
    "/jobs/{live}", "/jobs/{queued}", "/adapters", "/datasets", "/datasets/{file}", "/usage", "/usage?days=90",
    "/usage/traffic", "/invoices", "/budgets", "/keys", "/members", "/batches", "/notifications", "/organization",
    "/organization/audit",
)  # fmt: skip
PARTIALS = (
    ("operator", "/staff/search?q=tenant", ""), ("owner", "/search?q=bot", ""), ("owner", "/", "section#running"),
    ("owner", "/?whole", "div#overview"), ("owner", "/jobs", "table"), ("owner", "/jobs?q=bot-5", "table"),
    ("owner", "/jobs?after={deep}", "table"), ("owner", "/jobs/{live}", "live"), ("owner", "/adapters", "table"),
    ("owner", "/datasets", "table"),
)  # fmt: skip
_SLOWEST = 10


class Statements:
    """The longest time of each statement, with the arguments that it then had."""

    def __init__(self) -> None:
        self.slowest: dict[str, tuple[float, Any, str]] = {}
        self.place = ""

    def __call__(self, run: Callable[..., Any], statement: str, arguments: Any, many: bool, context: Any) -> Any:
        began = time.perf_counter()
        try:
            return run(statement, arguments, many, context)
        finally:
            seconds = time.perf_counter() - began
            if seconds > self.slowest.get(statement, (0.0, None, ""))[0]:
                self.slowest[statement] = seconds, arguments, self.place


def measure(places: dict[str, str], rounds: int) -> tuple[dict[str, list[float]], dict[str, list[float]], Statements]:
    """Return the milliseconds of each page and of each partial, without those of the first visit."""
    from django.conf import settings
    from django.db import connection
    from django.test import Client

    clients = {}
    for person in ("operator", "owner"):
        clients[person] = Client(SERVER_NAME="localhost")
        clients[person].cookies[settings.SESSION_COOKIE_NAME] = places[person]
    visits = [("operator", path, None) for path in STAFF] + [("owner", path, None) for path in MEMBER]
    pages: dict[str, list[float]] = {}
    partials: dict[str, list[float]] = {}
    statements = Statements()
    with connection.execute_wrapper(statements):
        for turn in range(rounds + 1):
            for person, path, target in (*visits, *PARTIALS):
                statements.place = path
                asked = {"HX-Request": "true", "HX-Target": target} if target is not None else {}
                began = time.perf_counter()
                answer = clients[person].get(path.format(**places), headers=asked)
                passed = (time.perf_counter() - began) * 1000
                if answer.status_code != 200:
                    raise AssertionError(f"{path} answered {answer.status_code}")
                if turn:
                    (pages if target is None else partials).setdefault(f"{person} {path}", []).append(passed)
            if not turn:
                statements.slowest.clear()
    return pages, partials, statements


def explain(statements: Statements) -> None:
    """Print the plans of the slowest statements."""
    from django.db import connection

    from apps.core.database.tenancy import system

    ranked = sorted(statements.slowest.items(), key=lambda item: -item[1][0])[:_SLOWEST]
    for statement, (seconds, arguments, place) in ranked:
        sys.stderr.write(f"\n{seconds * 1000:.0f} ms, {place}\n{statement[:1500]}\n")
        if statement.lstrip().startswith(("SELECT", "WITH")):
            with system(), connection.cursor() as cursor:
                cursor.execute(f"EXPLAIN (ANALYZE, BUFFERS) {statement}", arguments)
                sys.stderr.write("\n".join(line for (line,) in cursor.fetchall()) + "\n")


def _prepare() -> None:
    """Do what the web process does before it serves requests."""
    django.setup()
    import apps.config.urls  # noqa: F401
    from apps.config.startup import guard_roles, share_interpreter
    from apps.contracts.struct import prepare_types
    from apps.core.http.garbage import spare_lasting_objects

    guard_roles()
    share_interpreter()
    prepare_types()
    spare_lasting_objects()


def main() -> None:
    _prepare()
    places = json.loads(Path(sys.argv[1]).read_text())
    pages, partials, statements = measure(places, int(sys.argv[2]))
    if "explain" in sys.argv[3:]:
        explain(statements)
    sys.stdout.write(json.dumps({"pages": pages, "partials": partials}) + "\n")


if __name__ == "__main__":
    main()
