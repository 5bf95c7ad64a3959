"""How much slower everything is for one tenant while another takes all it can get: `make bench-neighbours`.

    python -m tests.bench.neighbours [--only TEXT] [MODULE …]

The modules are web, api, orders, gateway, streams, workers, mail, validation, queues and control.

For each entrance a tenant works at an ordinary pace, alone and beside a hostile one in turns. Each attack has a tenant
of its own, which asks at full rate from its own address. The platform runs as it is deployed, its processes on this one
machine. The attacker's program runs there too, with the lowest priority. The last line is one JSON object, with the
cores that each program used during each attack.
The exit code is 1 if a unit of the ordinary tenant's work failed, or a ratio is above 2.
"""

import argparse
import asyncio
import json
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.bench.neighbours import api, control, gateway, mail, orders, queues, streams, validation, web, workers
from tests.bench.neighbours.stage import Platform, running_platform
from tests.bench.neighbours.traffic import Entrance, compare

MODULES = {
    "web": web, "api": api, "orders": orders, "gateway": gateway, "streams": streams, "workers": workers, "mail": mail,
    "validation": validation, "queues": queues, "control": control,
}  # fmt: skip


MAX_RATIO = 2.0


async def measure(platform: Platform, entrances: dict[str, Entrance]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    server = await platform.mail_server.start()
    for name, entrance in entrances.items():
        figures = found[name] = (await compare(platform, entrance)).figures()
        sys.stdout.write(
            f"{name:36} {figures['quiet_p95_ms']:8.1f} ms alone, {figures['attacked_p95_ms']:8.1f} ms beside the other,"
            f" x {figures['ratio']:<5} answers to the attack: {figures['answers']}, cores: {figures['cores']}\n"
        )
        sys.stdout.flush()
    server.close()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", metavar="MODULE", help=f"of {', '.join(MODULES)}; all if none")
    parser.add_argument("--only", action="append", metavar="TEXT", help="entrances whose name contains it; repeatable")
    given = parser.parse_args()
    if unknown := set(given.modules) - set(MODULES):
        parser.error(f"there is no {', '.join(sorted(unknown))}: choose from {', '.join(MODULES)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the processes started here end too
    with tempfile.TemporaryDirectory(prefix="bench-neighbours-") as folder:
        home = Path(folder)
        home.chmod(0o755)  # PostgreSQL gives up root and must still reach its files
        with running_platform(home) as platform:
            entrances: dict[str, Entrance] = {}
            for name in given.modules or MODULES:
                entrances |= MODULES[name].entrances(platform)
            wanted = {
                name: entrance
                for name, entrance in entrances.items()
                if not given.only or any(text in name for text in given.only)
            }
            found = asyncio.run(measure(platform, wanted))
    worst = max(figures["ratio"] for figures in found.values())
    sys.stdout.write(json.dumps({"entrances": found, "worst_ratio": worst}) + "\n")
    return int(worst > MAX_RATIO or any(figures["failed"] for figures in found.values()))


if __name__ == "__main__":
    sys.exit(main())
