"""The doorbell: `train.wake` says that a run may wait. Losing it, or getting it twice, is harmless.

`celery -A gpu_workers.trainer.celery_app worker --queues train.<pool> --pool solo`. On SIGTERM the current runs save
checkpoints, report and return within 110 seconds.
"""

import logging

from celery import Celery
from celery.exceptions import WorkerShutdown
from celery.platforms import EX_FAILURE
from celery.signals import setup_logging, worker_ready, worker_shutting_down

from gpu_workers.common.config import read_config
from gpu_workers.trainer.polling import WorkerProcess

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
    # Acknowledgements and further priorities need keys that its user cannot access; a lost doorbell is rung again.
    broker_transport_options={
        "global_keyprefix": config.broker_key_prefix,
        "ack_emulation": False,
        "priority_steps": [0],
    },
)


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
    """Drain once at the start, to replace any doorbell that was lost while this process was down.

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
