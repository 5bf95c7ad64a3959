"""The worker of a node. It is the real one, except that its children train without torch (child.py).

python -m tests.bench.capacity.worker ADAPTER_FOLDER IDLE_SECONDS
"""

import logging
import signal
import sys
import threading

from apps.contracts.struct import prepare_types
from gpu_workers.common.api_client import ApiClient
from gpu_workers.common.config import read_config
from gpu_workers.common.enrolment import ensure_enrolled
from gpu_workers.trainer.agent import Agent
from gpu_workers.trainer.children.devices import Devices
from gpu_workers.trainer.children.executor import SubprocessExecutor
from gpu_workers.trainer.polling import poll


def main() -> None:
    adapter, idle_seconds = sys.argv[1:]
    stopped = threading.Event()
    logging.basicConfig(level="INFO", format="%(asctime)s %(levelname)s %(name)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    prepare_types()
    config = read_config()
    config.work_dir.mkdir(parents=True, exist_ok=True)
    agent = Agent(
        config,
        ApiClient(config.internal_url, credential=ensure_enrolled(config, kind="trainer").credential),
        devices=Devices(("0",)),
        executor=SubprocessExecutor(
            thread_limit=1, command=(sys.executable, "-m", "tests.bench.capacity.child", adapter)
        ),
        publisher=None,
        prober=None,
        address=config.node_address,
    )

    def stop(*_: object) -> None:
        stopped.set()
        agent.request_stop()

    signal.signal(signal.SIGTERM, stop)
    agent.recover()
    poll(agent, idle_seconds=float(idle_seconds), stopped=stopped)


if __name__ == "__main__":
    main()
