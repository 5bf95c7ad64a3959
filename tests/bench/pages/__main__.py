"""How fast pages are over large tables: `make bench-pages`.

    python -m tests.bench.pages [--jobs N] [--events N] [--organizations N] [--rounds N] [--streams N] [--seconds N]
        [--home DIR] [--explain] [--without-browser]

Fills an empty database (tests/bench/pages/rows.py), then asks for each page and partial in turn as an operator and as
the owner of an organization that has a twentieth of all rows (tests/bench/pages/visits.py). The process that answers
has the web role with row-level security and its limits, and renders the whole answer; the network is left out. With
`--home`, the data stay in that folder and are used again. `--explain` prints the plans of the slowest statements.

Then the web process starts as it is deployed. Chromium opens the main pages behind a slow line
(tests/bench/pages/loading.py); `--without-browser` leaves this out. `--streams` watchers follow running jobs over
loopback, and each job gets an event every few seconds for `--seconds` (tests/bench/pages/streams.py); `--streams 0`
leaves this out.

The last line is one JSON object: `page_p95_ms` and `partial_p95_ms` over all visits, the 95th percentile of each
address among `slowest`; `lcp_s` and `cls`, the worst of the pages in Chromium; how many `streams` stayed open, and
`stream_p99_s` from an event to its receipt. It exits with status 1 where they miss `wanted`.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from scripts.embedded import ensure_running
from tests.bench.pages.streams import running_web

ROOT = Path(__file__).resolve().parents[3]
WANTED = {"page_p95_ms": 150, "partial_p95_ms": 80, "lcp_s": 1.5, "cls": 0.05, "stream_p99_s": 1.5}
_SHOWN = 12
_OTHER_FILES = 500  # of a process, beside one for each stream


def p95(values: list[float]) -> float:
    ranked = sorted(values)
    return round(ranked[min(len(ranked) - 1, int(len(ranked) * 0.95))], 1)


def _environ(home: Path, database_url: str, services: Any) -> dict[str, str]:
    return {
        "ANNEAL_HOME": str(home),
        "ANNEAL_SECRET_KEY": "bench-secret-key-that-is-long-enough-for-django",
        "ANNEAL_KEY_PEPPER": "bench-pepper",
        "ANNEAL_SIGNING_KEY": "bench-signing-key",
        "DATABASE_URL": database_url,
        "REDIS_URL": services.redis_url,
        "CELERY_BROKER_URL": services.broker_url,
        "DJANGO_SETTINGS_MODULE": "apps.config.settings.dev",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1_000_000)
    parser.add_argument("--events", type=int, default=10_000_000)
    parser.add_argument("--organizations", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--streams", type=int, default=3_000)
    parser.add_argument("--seconds", type=int, default=60, help="of events for the streams")
    parser.add_argument("--home", type=Path)
    parser.add_argument("--explain", action="store_true")
    parser.add_argument("--without-browser", action="store_true")
    given = parser.parse_args()
    _allow_files(given.streams + _OTHER_FILES)
    with ExitStack() as stack:
        home = given.home or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench")))
        home.mkdir(exist_ok=True)
        home.chmod(0o755)  # PostgreSQL gives up root and must still reach its files
        services = stack.enter_context(ensure_running(home, durable=False))
        places, began = home / "places.json", time.monotonic()
        if not places.exists():
            os.environ.update(_environ(home, services.database_url("owner"), services))
            import django

            django.setup()
            from tests.bench.pages.rows import Size, fill

            made = fill(Size(given.jobs, given.events, given.organizations))
            made["size"] = {"jobs": given.jobs, "events": given.events, "organizations": given.organizations}
            places.write_text(json.dumps(made))
        filled = round(time.monotonic() - began)
        command = [sys.executable, "-m", "tests.bench.pages.visits", str(places), str(given.rounds)]
        environ = os.environ | _environ(home, services.database_url("app"), services)
        visited = subprocess.run(
            [*command, *(["explain"] if given.explain else [])],
            cwd=ROOT,
            env=environ,
            stdout=subprocess.PIPE,
            check=True,
        )
        result = _result_of(json.loads(visited.stdout), json.loads(places.read_text())["size"], filled)
        owner = os.environ | _environ(home, services.database_url("owner"), services)
        if given.streams or not given.without_browser:
            with running_web(home, environ) as url:
                if not given.without_browser:
                    result |= _loading(url, places)
                if given.streams:
                    result |= _streams(url, owner, given)
    sys.stdout.write(json.dumps(result) + "\n")
    is_missed = any(result.get(name, 0) > most for name, most in WANTED.items())
    if is_missed or result.get("streams", 0) < given.streams:
        sys.exit(1)


def _allow_files(count: int) -> None:
    """Raise the limit of open files of this process and of those that it starts."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < count:
        raise SystemExit(f"a process may open {hard} files (ulimit -Hn), and so many streams need {count}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, count), hard))


def _loading(url: str, places: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.bench.pages.loading", url, str(places)]
    opened = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True)
    found: dict[str, dict[str, Any]] = json.loads(opened.stdout)
    return {
        "lcp_s": round(max(each["lcp_s"] for each in found.values()), 2),
        "cls": round(max(each["cls"] for each in found.values()), 3),
        "loading": {name: (round(each["lcp_s"], 2), round(each["cls"], 3)) for name, each in found.items()},
    }


def _streams(url: str, owner: dict[str, str], given: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.bench.pages.streams", url, str(given.streams), str(given.seconds)]
    watched = subprocess.run(command, cwd=ROOT, env=owner, stdout=subprocess.PIPE, check=True)
    return json.loads(watched.stdout)


def _result_of(found: dict[str, Any], size: dict[str, int], filled: int) -> dict[str, Any]:
    each = {address: p95(times) for part in found.values() for address, times in part.items()}
    slowest = sorted(each, key=lambda address: -each[address])[:_SHOWN]
    return {
        "page_p95_ms": p95([time for times in found["pages"].values() for time in times]),
        "partial_p95_ms": p95([time for times in found["partials"].values() for time in times]),
        "wanted": WANTED,
        "slowest": {address: each[address] for address in slowest},
        "pages": len(found["pages"]), "partials": len(found["partials"]), **size,
        "fill_seconds": filled, "cpus": os.cpu_count(),
    }  # fmt: skip


if __name__ == "__main__":
    main()
