"""The control plane's Celery: short idempotent tasks; long work is a row, and its message only a doorbell."""

from celery import Celery
from django.conf import settings

from apps.config.schedule import SCHEDULE

app = Celery("anneal")
app.config_from_object(
    {
        "broker_url": settings.BROKER_URL,
        "task_ignore_result": True,
        "task_serializer": "json",
        "accept_content": ["json"],
        "task_default_queue": "control",
        # Reading a customer's file takes minutes: it must not hold up leases, mail and money.
        "task_routes": {
            "datasets.validate": {"queue": "data"},
            "datasets.count": {"queue": "data"},
            "datasets.inspect": {"queue": "data"},
            "datasets.sweep_orphans": {"queue": "data"},
        },
        "task_acks_late": True,
        "task_reject_on_worker_lost": True,
        "task_soft_time_limit": 60,
        "task_time_limit": 90,
        "worker_prefetch_multiplier": 1,
        "worker_hijack_root_logger": False,
        "broker_connection_retry_on_startup": True,
        "broker_transport_options": {"visibility_timeout": 900, "global_keyprefix": "anneal:"},
        "beat_schedule": SCHEDULE,
        "timezone": "UTC",
    }
)
app.autodiscover_tasks(
    ["apps.core", "apps.accounts", "apps.billing", "apps.datasets", "apps.finetuning", "apps.serving"]
)


def wake_outbox() -> None:
    """Ask for a delivery of the outbox now; when the broker is away, the periodic sweep delivers."""
    try:
        app.send_task("core.deliver_outbox", retry=False)
    except app.connection_for_write().recoverable_connection_errors:
        return
