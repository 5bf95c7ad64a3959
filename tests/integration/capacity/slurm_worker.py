"""The worker of a node without training: it enrols, polls and claims like the real one, and fails each run at once."""

import signal
import sys
import threading
import time

from apps.contracts.failures import FailureCode
from apps.contracts.runs import Failed
from apps.contracts.worker_api import ClaimRequest
from gpu_workers.common.api_client import ApiClient, Lease
from gpu_workers.common.config import read_config
from gpu_workers.common.enrolment import ensure_enrolled
from gpu_workers.trainer.polling import poll

config = read_config()
api = ApiClient(config.internal_url, credential=ensure_enrolled(config, kind="trainer").credential)
stopped = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: stopped.set())


class FailingAgent:
    """Stands for the agent."""

    def drain(self) -> int:
        claim = api.claim(ClaimRequest(base_models=None, software={}, free_gpus=1, gpu_count=1, leases=()))
        if claim is None:
            return 0
        time.sleep(1)
        outcome = Failed(code=FailureCode.OUT_OF_MEMORY, message="as the test wants", training_seconds=0.0)
        api.finish(Lease.of(claim), outcome)
        return 1


poll(FailingAgent(), idle_seconds=float(sys.argv[1]), stopped=stopped)  # type: ignore[arg-type]
