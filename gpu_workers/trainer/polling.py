"""A trainer without a broker. It asks for runs every few seconds, and may end when it has been idle for some time.

`python -m gpu_workers.trainer.polling [--exit-when-idle 300]`. An elastic pool starts it with a one-time token and no
other secret. On SIGTERM the current runs save checkpoints, report and return.
"""

import argparse
import logging
import math
import signal
import sys
import threading
import time
from functools import partial

from apps.contracts.struct import prepare_types
from gpu_workers.common import interruptions
from gpu_workers.common.api_client import ApiClient
from gpu_workers.common.config import ConfigError, WorkerConfig, read_config
from gpu_workers.common.enrolment import NotEnrolled, ensure_enrolled
from gpu_workers.common.preflight import GpuUnreachable, inspect_machine, list_devices, list_gpus
from gpu_workers.trainer.agent import Agent
from gpu_workers.trainer.children.cpu_threads import count_cores
from gpu_workers.trainer.children.devices import Devices
from gpu_workers.trainer.children.executor import MODULE as TRAINING_CHILD
from gpu_workers.trainer.children.executor import SubprocessExecutor
from gpu_workers.trainer.children.fork_server import ForkServer
from gpu_workers.trainer.idle.conversions import Converter
from gpu_workers.trainer.idle.examinations import Examiner
from gpu_workers.trainer.idle.probes import MODULE as PROBING_CHILD
from gpu_workers.trainer.idle.probes import Prober
from gpu_workers.trainer.idle.rehearsals import Rehearser
from gpu_workers.trainer.publication import MODULE as PUBLISHING_CHILD
from gpu_workers.trainer.publication import Publisher

log = logging.getLogger(__name__)

_SECONDS_BETWEEN_CLAIMS = 5.0


class WorkerProcess:
    """The agent of this process, created at start so that it is ready for the first message."""

    def __init__(self) -> None:
        self.agent: Agent | None = None
        self._stopped = threading.Event()

    def start(self, settings: WorkerConfig, *, address: str = "") -> Agent:
        """Enrol if needed, clean up after an earlier process, and return the agent.

        With an `address`, it offers itself to groups of machines. Only a worker that claims often may do that. If the
        machine's cloud announces that it takes the machine away, the process gets SIGTERM. One that starts again after
        that claims nothing.
        """
        watch = interruptions.Watch()
        if watch.has_notice():
            self._stopped.set()
        watch.start(stopped=self._stopped)
        prepare_types()
        settings.work_dir.mkdir(parents=True, exist_ok=True)
        devices = Devices(list_devices())
        count = len(devices.names)
        executor_of = partial(
            SubprocessExecutor,
            thread_limit=settings.trainer_thread_limit or (max(1, count_cores() // count) if count > 1 else 0),
            fork_server=None if list_gpus() else ForkServer(),
        )
        enrollment = ensure_enrolled(settings, kind="trainer")
        api = ApiClient(settings.internal_url, credential=enrollment.credential)
        machine = inspect_machine(settings.work_dir, gpu_key=settings.self_check_gpu_key)
        self.agent = Agent(
            settings,
            api,
            devices=devices,
            executor=executor_of(TRAINING_CHILD),
            publisher=(publisher := Publisher(executor_of(PUBLISHING_CHILD))),
            prober=Prober(
                settings, api, gpu_key=machine.gpu_key, device=devices.names[0], executor=executor_of(PROBING_CHILD)
            ),
            rehearser=Rehearser(api),
            examiner=Examiner(settings, api, device=devices.names[0], publisher=publisher),
            converter=Converter(settings, api, device=devices.names[0], publisher=publisher),
            address=address,
        )
        self.agent.recover()
        if self._stopped.is_set():
            self.agent.request_stop()
        return self.agent

    def stop(self) -> None:
        self._stopped.set()
        if self.agent is not None:
            self.agent.request_stop()


def poll(agent: Agent, *, idle_seconds: float, stopped: threading.Event) -> None:
    """Claim runs until `stopped` is set or no run came for `idle_seconds`. Measurements do not count as work."""
    worked_at = time.monotonic()
    while not stopped.is_set():
        if agent.drain():
            worked_at = time.monotonic()
        if time.monotonic() - worked_at >= idle_seconds:
            log.info("Idle for %g seconds: this worker ends", idle_seconds)
            return
        stopped.wait(min(_SECONDS_BETWEEN_CLAIMS, idle_seconds))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m gpu_workers.trainer.polling", description=__doc__)
    parser.add_argument("--exit-when-idle", type=float, metavar="SECONDS", default=math.inf)
    arguments = parser.parse_args()
    process, stopped = WorkerProcess(), threading.Event()

    def stop(*_: object) -> None:
        stopped.set()
        process.stop()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    try:
        config = read_config()
        logging.basicConfig(level=config.log_level, format="%(asctime)s %(levelname)s %(name)s %(message)s")
        logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs each URL, and a signed URL is a credential
        poll(process.start(config, address=config.node_address), idle_seconds=arguments.exit_when_idle, stopped=stopped)
    except (ConfigError, NotEnrolled, GpuUnreachable) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
