"""How much slower everything is for one tenant while another takes all it can get: `make bench-neighbours`.

    python -m tests.bench.neighbours [web gateway validation]

For each entrance a tenant works at an ordinary pace, first alone, then while a hostile one asks at full rate from its
own address. The platform runs as it is deployed, its processes on this one machine, so the attacker's own program takes
from the processor too. The last line is one JSON object.
"""

import argparse
import asyncio
import importlib
import json
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from tests.bench.neighbours.stage import Platform, running_platform

MODULES = ("web", "gateway", "validation")  # each has `async def measure(platform) -> dict` of figures by entrance


async def measure(platform: Platform, names: list[str]) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for name in names:
        module = importlib.import_module(f"tests.bench.neighbours.{name}")
        for entrance, figures in (await module.measure(platform)).items():
            ratio = round(figures["attacked_p95_ms"] / figures["quiet_p95_ms"], 2)
            found[entrance] = figures | {"ratio": ratio}
            sys.stdout.write(
                f"{entrance:18} {figures['quiet_p95_ms']:8.1f} ms alone, {figures['attacked_p95_ms']:8.1f} ms beside"
                f" the other, x {ratio}\n"
            )
            sys.stdout.flush()
    return found


def main() -> None:
    there = [name for name in MODULES if find_spec(f"tests.bench.neighbours.{name}")]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "modules", nargs="*", metavar="MODULE", help=f"which entrances: {', '.join(there)}; all if none"
    )
    given = parser.parse_args()
    if unknown := set(given.modules) - set(there):
        parser.error(f"there is no {', '.join(sorted(unknown))}: choose from {', '.join(there)}")
    with tempfile.TemporaryDirectory(prefix="bench-neighbours-") as folder:
        home = Path(folder)
        home.chmod(0o755)  # PostgreSQL gives up root and must still reach its files
        with running_platform(home) as platform:
            entrances = asyncio.run(measure(platform, given.modules or there))
    worst = max(figures["ratio"] for figures in entrances.values())
    sys.stdout.write(json.dumps({"entrances": entrances, "worst_ratio": worst}) + "\n")


main()
