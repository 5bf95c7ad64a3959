"""The control plane's Celery app, for short idempotent tasks. Long work is a row; its message is only a doorbell."""

import logging
import os
from typing import Any

from celery import Celery
from celery.signals import worker_init, worker_process_shutdown, worker_shutdown
from django.conf import settings
from kombu.exceptions import KombuError
from kombu.pools import producers

from apps.config.schedule import PAYMENTS_SCHEDULE, SCHEDULE
from apps.contracts.struct import prepare_types
from apps.core.messages import tracing
from apps.core.messages.topics import CONTROL

logger = logging.getLogger(__name__)

# A request waits for this publish, so it must be short. A periodic task repeats what it lost.
_WAKE_OPTIONS = {"max_retries": 0, "socket_connect_timeout": 1, "socket_timeout": 1}
_WAKE_SECONDS = 1

_SHORT = {"soft_time_limit": 60, "time_limit": 90}
# Work on files gives way to the web, the API and the gateway where processors are scarce.
_NICENESS = {
    "hub-uploads": 10, "hub-large": 10, "data": 10, "data-middle": 10, "data-small": 5, "batches": 5,
}  # fmt: skip
# The workers of the first two have short tasks to run as well. Small pushes may take all places of theirs.
_LANE_LIMITS = {"hub": _SHORT, "payments": _SHORT, "hub-uploads": {"soft_time_limit": 900, "time_limit": 960}}
_WITH_TASKS = (
    "core", "accounts", "catalog", "billing", "payments", "datasets", "batches", "batches.completions", "finetuning",
    "serving",
)  # fmt: skip
app = Celery("anneal")
app.config_from_object(
    {
        "broker_url": settings.BROKER_URL,
        "task_ignore_result": True,
        "task_serializer": "json",
        "accept_content": ["json"],
        "task_default_queue": CONTROL,
        # A message for `core.carry_out` is in the queue of its lane.
        "task_routes": {
            "datasets.sweep_orphans": {"queue": "data"},
            "batches.sweep_orphans": {"queue": "data"},
            "finetuning.sweep_orphans": {"queue": "data"},
            "payments.*": {"queue": "payments"},
            "batches.work": {"queue": "batches"},
        },
        "task_acks_late": True,
        "task_reject_on_worker_lost": True,
        "task_soft_time_limit": _SHORT["soft_time_limit"],
        "task_time_limit": _SHORT["time_limit"],
        "worker_prefetch_multiplier": 1,
        "worker_hijack_root_logger": False,
        "broker_connection_retry_on_startup": True,
        "broker_transport_options": {"visibility_timeout": 900, "global_keyprefix": "anneal:"},
        "beat_schedule": SCHEDULE | (PAYMENTS_SCHEDULE if settings.STRIPE_WEBHOOK_SECRET else {}),
        "timezone": "UTC",
    }
)
app.autodiscover_tasks([f"apps.{name}" for name in _WITH_TASKS])


@worker_init.connect
def give_way(sender: Any, **kwargs: object) -> None:
    """Have this worker give way to other processes, as the most important of its queues may."""
    os.nice(min(_NICENESS.get(queue, 0) for queue in sender.app.amqp.queues.consume_from))


@worker_init.connect
def prepare(sender: Any, **_: object) -> None:
    """Prepare for threads, once the tasks are imported."""
    prepare_types()
    queue = next(iter(sender.app.amqp.queues.consume_from))
    tracing.start("celery" if queue == CONTROL else f"celery-{queue}")  # as in scripts/processes.py


@worker_process_shutdown.connect
@worker_shutdown.connect  # a pool without processes of its own
def stop_tracing(**_: object) -> None:
    tracing.stop()


def wake_outbox(lane: str) -> None:
    """Request a delivery of an outbox lane now. If the broker is down, the periodic wake delivers instead."""
    name, options = "core.deliver_outbox", dict[str, Any]()
    if lane != CONTROL:
        name, options = "core.carry_out", {"queue": lane, "kwargs": {"lane": lane}} | _LANE_LIMITS.get(lane, {})
    connection = app.connection_for_write(transport_options=_WAKE_OPTIONS)
    try:
        with producers[connection].acquire(block=True, timeout=_WAKE_SECONDS) as producer:
            app.send_task(name, producer=producer, retry=False, **options)
    except (KombuError, *connection.connection_errors, *connection.channel_errors) as error:
        logger.warning("the outbox was not woken: %s", type(error).__name__)
