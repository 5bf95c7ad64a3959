"""Run one embedded server in the foreground until SIGTERM, as a supervisor expects."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from scripts.embedded.postgres import serve_postgres
from scripts.embedded.redis import serve_redis
from scripts.embedded.servers import EmbeddedServiceError


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Run one embedded server in the foreground until SIGTERM.")
    parser.add_argument("server", choices=["postgres", "redis"])
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--tcp-port", type=int, help="postgres only: also listen on this loopback port")
    parser.add_argument("--not-durable", action="store_true", help="faster; survives kill -9, not a power cut")
    parser.add_argument("--until-unused", action="store_true", help="stop when no process holds ensure_running()")
    given = parser.parse_args(arguments)
    durable = not given.not_durable
    try:
        if given.server == "postgres":
            return serve_postgres(
                given.data_dir, tcp_port=given.tcp_port, durable=durable, until_unused=given.until_unused
            )
        return serve_redis(given.data_dir, durable=durable, until_unused=given.until_unused)
    except EmbeddedServiceError as error:
        sys.stderr.write(f"{error}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main())
