"""Random input for everything that reads what customers write, for as long as is wanted: `make fuzz SECONDS=3600`.

    python -m tests.fuzz [api gateway workers pages readers files templates] [--seconds 3600] [--seed 1]

Takes turns between the public API with the inference routes and the worker API (schemathesis, with bodies of the types
that read them), the gateway, the dashboard's queries and forms, and the readers of requests, files and chat templates.
A finding is a server error, a status that the OpenAPI document lacks, an answer that takes longer than 10 s, an
exception that is no refusal, or more processor time than an input may take. Each is printed
and kept with the platform's logs under .anneal/fuzz. Meanwhile another tenant asks for something cheap. The last line
is one JSON object. The exit code is 1 if there is a finding, a stall of the gateway above 200 ms, or a wrong answer to
the other tenant.
"""

import argparse
import json
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from tests.bench.neighbours.stage import ROOT, running_platform
from tests.fuzz.findings import Findings
from tests.fuzz.monitor import Monitor

KEPT = ROOT / ".anneal" / "fuzz"
SURFACES = ("api", "gateway", "workers", "pages", "readers", "files", "templates")
TURN_SECONDS = 10.0
MAX_STALL_MS = 200.0
# What is looked for is in the code behind the limits.
_WIDE = {"ANNEAL_WEB_REQUESTS_PER_MINUTE": "10000000", "ANNEAL_WEB_SECONDS_PER_MINUTE": "1000000"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("surfaces", nargs="*", metavar="SURFACE", help=f"{', '.join(SURFACES)}; all if none")
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--seed", type=int, default=int(time.time()), help="the first; each turn has the next")
    given = parser.parse_args()
    if unknown := set(given.surfaces) - set(SURFACES):
        parser.error(f"there is no {', '.join(sorted(unknown))}: choose from {', '.join(SURFACES)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the processes started here end too
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        home = Path(folder)
        home.chmod(0o755)  # PostgreSQL gives up root and must still reach its files
        findings = Findings(given.seed)
        with running_platform(home, more=_WIDE) as platform:
            from tests.fuzz.surfaces import surfaces  # Django is set up now

            with Monitor(platform) as monitor:
                made = surfaces(platform, findings)
                turns = {name: made[name] for name in given.surfaces or SURFACES}
                until, number = time.monotonic() + given.seconds, 0
                while (left := until - time.monotonic()) > 0:
                    name = list(turns)[number % len(turns)]
                    findings.begin(name, seed=given.seed + number)
                    try:
                        turns[name](min(left, TURN_SECONDS))
                    except Exception as error:  # noqa: BLE001 - the other turns go on
                        findings.note("faults", f"the turn itself: {error!r}", name)
                    number += 1
        if findings.kept:
            _keep(home, findings)
    summary = findings.summary() | monitor.summary() | {"seconds": given.seconds, "seed": given.seed}
    sys.stdout.write(json.dumps(summary) + "\n")
    is_well = summary["longest_stall_ms"] <= MAX_STALL_MS and not summary["neighbour_failed"]
    return int(bool(findings.kept) or not is_well)


def _keep(home: Path, findings: Findings) -> None:
    KEPT.mkdir(parents=True, exist_ok=True)
    (KEPT / "findings.jsonl").write_text("".join(json.dumps(one) + "\n" for one in findings.kept))
    for log in home.glob("*.log"):
        shutil.copy(log, KEPT / log.name)


sys.exit(main())
