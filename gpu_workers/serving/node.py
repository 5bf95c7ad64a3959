"""A replica on a machine that was started for it: `python -m gpu_workers.serving.node`.

It runs the engine's launcher and the serving agent in separate processes, as the chart does with two containers. It
ends after SIGTERM, once running answers have ended, or when the agent ends. An engine that ends is started again.
"""

import ipaddress
import logging
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from functools import partial
from urllib.parse import urlsplit

from gpu_workers.common.config import REPOSITORY, ConfigError, environment_with, read_config
from gpu_workers.common.process_tree import die_with_parent

log = logging.getLogger("anneal.node")

AGENT, ENGINE = "gpu_workers.serving.agent", "gpu_workers.engine.launcher"
_POLL_SECONDS = 0.2
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 1.0, 60.0  # before an engine starts again
_STEADY_SECONDS = 300.0  # an engine that ran for so long had no fault at its start
_ENGINE_ENDS_WITHIN_SECONDS = 60.0


def main() -> int:
    """Run as the program that a capacity engine starts on the machine."""
    logging.basicConfig(format="%(asctime)s %(name)s %(levelname)s %(message)s", stream=sys.stderr, level=logging.INFO)
    try:
        config = read_config()
        environment = environment_with(
            find_address(config.node_address, port=config.replica_port, internal_url=config.internal_url)
        )
    except (ConfigError, OSError) as error:
        log.error("%s", error)
        return 1
    stops: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _: stops.append(received))
    agent, engine = _start(AGENT, environment), _start(ENGINE, environment)
    started_at, pause, is_told = time.monotonic(), _FIRST_PAUSE_SECONDS, False
    while agent.poll() is None:
        if stops and not is_told:
            agent.terminate()  # it leaves the routes and finishes running answers, for which the engine stays
            is_told = True
        ran_for = time.monotonic() - started_at
        if engine.poll() is not None and not stops and ran_for > pause:
            pause = _FIRST_PAUSE_SECONDS if ran_for > _STEADY_SECONDS else min(2 * pause, _LONGEST_PAUSE_SECONDS)
            log.warning("the engine ended with %s and starts again", engine.returncode)
            engine, started_at = _start(ENGINE, environment), time.monotonic()
        time.sleep(_POLL_SECONDS)
    _end(engine)
    return agent.returncode


def find_address(machine: str, *, port: int = 0, internal_url: str = "") -> dict[str, str]:
    """Return the variables for the replica's listening address: this address or name of the machine.

    Port 0 means a free one. Raises ConfigError without an address, OSError if the address is not this machine's.
    """
    if not machine:
        raise ConfigError("ANNEAL_NODE_ADDRESS is not set.")
    address = _address_of(machine, internal_url)
    family, *_, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind(where)
        host, free = probe.getsockname()[:2]
    shown = f"[{host}]" if ipaddress.ip_address(host).version == 6 else host
    return {"ANNEAL_REPLICA_LISTEN": f"{host}:{free}", "ANNEAL_REPLICA_URL": f"http://{shown}:{free}"}


def _address_of(machine: str, internal_url: str) -> str:
    """Return the address at which others reach the machine.

    Debian gives a machine's own name a loopback address. In that case, use the address from which this machine calls
    the control plane.
    """
    found = [str(where[0]) for *_, where in socket.getaddrinfo(machine, 0, type=socket.SOCK_STREAM)]
    outside = [address for address in found if not ipaddress.ip_address(address).is_loopback]
    url = urlsplit(internal_url)
    if machine in found or outside or url.hostname is None:
        return machine if machine in found else (outside or found)[0]
    family, *_, where = socket.getaddrinfo(url.hostname, url.port or 443, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(where)  # sends nothing
        return str(probe.getsockname()[0])


def _start(module: str, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(  # a list of our own arguments
        [sys.executable, "-m", module],
        env=environment,
        cwd=REPOSITORY,
        preexec_fn=partial(die_with_parent, signal.SIGTERM),
    )


def _end(engine: subprocess.Popen[bytes]) -> None:
    """Stop the engine with all its processes. The launcher kills those that do not end."""
    if engine.poll() is None:
        engine.terminate()
    try:
        engine.wait(_ENGINE_ENDS_WITHIN_SECONDS)
    except subprocess.TimeoutExpired:
        engine.kill()
        engine.wait()


if __name__ == "__main__":
    sys.exit(main())
