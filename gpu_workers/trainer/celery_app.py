"""The doorbell: `train.wake` says that something may wait. Losing it, or getting it twice, is harmless.

`celery -A gpu_workers.trainer.celery_app worker --queues train.<pool> --pool solo`. On SIGTERM the current runs save
checkpoints, report and return within 110 seconds.
"""

import logging
from functools import partial

from celery import Celery
from celery.exceptions import WorkerShutdown
from celery.platforms import EX_FAILURE
from celery.signals import setup_logging, worker_ready, worker_shutting_down

from gpu_workers.common.api_client import ApiClient
from gpu_workers.common.config import WorkerConfig, read_config
from gpu_workers.common.enrolment import ensure_enrolled
from gpu_workers.common.preflight import inspect_machine, list_devices, list_gpus
from gpu_workers.trainer.agent import Agent
from gpu_workers.trainer.children.cpu_threads import count_cores
from gpu_workers.trainer.children.executor import MODULE as TRAINING_CHILD
from gpu_workers.trainer.children.executor import SubprocessExecutor
from gpu_workers.trainer.children.fork_server import ForkServer
from gpu_workers.trainer.devices import Devices
from gpu_workers.trainer.probes import MODULE as PROBING_CHILD
from gpu_workers.trainer.probes import Prober
from gpu_workers.trainer.publication import MODULE as PUBLISHING_CHILD
from gpu_workers.trainer.publication import Publisher
from gpu_workers.trainer.rehearsals import Rehearser

log = logging.getLogger(__name__)

config = read_config()

app = Celery("anneal-trainer", broker=config.require_broker_url())
app.conf.update(
    task_ignore_result=True,
    task_acks_late=False,  # the row is the truth: a redelivered hours-long message would only run it twice
    task_default_queue=f"train.{config.pool}",
    task_create_missing_queues=True,
    task_serializer="json",
    accept_content=["json"],
    worker_prefetch_multiplier=1,
    worker_pool="solo",
    worker_enable_remote_control=False,  # its broker user may only consume one queue
    worker_send_task_events=False,
    broker_connection_retry_on_startup=True,
    # Acknowledgements need keys that its user cannot access; a lost doorbell is rung again.
    broker_transport_options={"global_keyprefix": config.broker_key_prefix, "ack_emulation": False},
)


class WorkerProcess:
    """The agent of this process, created at start so that it is ready for the first message."""

    def __init__(self) -> None:
        self.agent: Agent | None = None
        self.is_stopping = False

    def start(self, settings: WorkerConfig) -> Agent:
        """Enrol if needed, clean up after an earlier process, and return the agent."""
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
            publisher=Publisher(executor_of(PUBLISHING_CHILD)),
            prober=Prober(
                settings, api, gpu_key=machine.gpu_key, device=devices.names[0], executor=executor_of(PROBING_CHILD)
            ),
            rehearser=Rehearser(api),
        )
        self.agent.recover()
        if self.is_stopping:
            self.agent.request_stop()
        return self.agent

    def stop(self) -> None:
        self.is_stopping = True
        if self.agent is not None:
            self.agent.request_stop()


trainer = WorkerProcess()


@app.task(name="train.wake")
def wake(*, pool: str = "", **_: object) -> None:
    """Execute waiting runs of this machine's pool; the message carries no run."""
    if trainer.agent is not None:
        trainer.agent.drain()


@setup_logging.connect
def _configure_logging(**_: object) -> None:
    """Log like every other process; otherwise Celery would set up the root logger at its own level."""
    logging.basicConfig(level=config.log_level, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs each URL, and a signed URL is a credential


@worker_ready.connect
def _begin(**_: object) -> None:
    """Drain once at start, to replace any doorbell that was rung while this process was down.

    Celery only logs the exceptions of a receiver, so a worker that failed to start would look alive and do nothing. The
    worker ends instead, and its supervisor starts another.
    """
    try:
        trainer.start(config).drain()
    except Exception as error:
        log.exception("The trainer could not start")
        raise WorkerShutdown(EX_FAILURE) from error


@worker_shutting_down.connect
def _end(**_: object) -> None:
    trainer.stop()
