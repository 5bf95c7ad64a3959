"""The periodic tasks. They are defined in code, so that a deploy changes them.

A task with a number runs so many seconds after beat has started, and again each time they have passed. Hourly and daily
tasks run by the clock: containers forget when a task last ran, and beat may never run for as long as a day.
"""

from typing import Any

from celery.schedules import crontab

SCHEDULE: dict[str, dict[str, Any]] = {
    "deliver outbox": {"task": "core.deliver_outbox", "schedule": 5.0},
    # Dropped when the next one is due: after an outage one wake is enough.
    "wake lanes of the outbox": {"task": "core.wake_lanes", "schedule": 5.0, "options": {"expires": 5}},
    "prune outbox": {"task": "core.prune_outbox", "schedule": 600.0},
    "prune answers to repeat": {"task": "core.prune_answers", "schedule": 600.0},
    "reclaim expired leases": {"task": "finetuning.reclaim_expired_leases", "schedule": 15.0},
    "ring doorbells": {"task": "finetuning.ring_doorbells", "schedule": 15.0},
    "admit waiting jobs": {"task": "finetuning.admit_waiting", "schedule": 5.0},
    # Dropped when the next one is due: what it leaves over is found again.
    "retrain models": {"task": "finetuning.retrain", "schedule": 60.0, "options": {"expires": 60}},
    "adjust capacity": {"task": "finetuning.adjust_capacity", "schedule": 10.0, "options": {"expires": 10}},
    "learn from finished runs": {"task": "finetuning.learn_from_runs", "schedule": 300.0},
    "look for newer base models": {"task": "catalog.check_revisions", "schedule": crontab(minute=6)},
    "delete expired datasets": {"task": "datasets.delete_expired", "schedule": 300.0},
    # Dropped when the next one is due: one task works as long as there are requests.
    "work on batches": {"task": "batches.work", "schedule": 5.0, "options": {"expires": 5}},
    "delete expired files of batches": {"task": "batches.delete_expired", "schedule": 300.0},
    "delete expired completions": {"task": "completions.delete_expired", "schedule": crontab(minute=10)},
    "expire uploads": {"task": "datasets.expire_uploads", "schedule": 300.0},
    "sweep orphaned objects": {"task": "datasets.sweep_orphans", "schedule": crontab(hour=2, minute=30)},
    "sweep orphaned files of batches": {"task": "batches.sweep_orphans", "schedule": crontab(hour=3, minute=30)},
    "sweep orphaned adapters": {"task": "finetuning.sweep_orphans", "schedule": crontab(hour=4, minute=30)},
    "place adapters": {"task": "serving.place", "schedule": 5.0},
    "charge for adapters kept warm": {"task": "serving.charge_warm", "schedule": 60.0},
    "reconcile metering with the engines": {"task": "serving.reconcile_metering", "schedule": crontab(minute=14)},
    "sweep old checkpoints": {"task": "finetuning.sweep_checkpoints", "schedule": crontab(minute=18)},
    "sweep expired tokens": {"task": "accounts.sweep_expired_tokens", "schedule": crontab(minute=22)},
    "prune notifications": {"task": "accounts.prune_notifications", "schedule": crontab(minute=26)},
    "rate usage": {"task": "billing.rate_usage", "schedule": 5.0, "options": {"expires": 5}},
    "prune traffic": {"task": "billing.prune_traffic", "schedule": crontab(minute=30)},
    "give volume back": {"task": "billing.post_rebates", "schedule": crontab(minute=34)},
    "sample storage": {"task": "finetuning.sample_storage", "schedule": 900.0},
    "mail daily reports": {"task": "billing.mail_reports", "schedule": 1800.0},
    "warn of low balances": {"task": "billing.warn_low_balances", "schedule": 900.0},
    "close months": {"task": "billing.close_months", "schedule": crontab(minute=38)},
    "reconcile the books": {"task": "billing.reconcile", "schedule": crontab(minute=42)},
    "expire credit": {"task": "billing.expire_lots", "schedule": 300.0},
    "seal the ledger": {"task": "billing.seal_ledger", "schedule": crontab(minute=46)},
    "close expired holds": {"task": "billing.close_expired_holds", "schedule": 30.0},
}

# Only where Stripe is configured: elsewhere nothing reads their queue, which would grow without bound.
PAYMENTS_SCHEDULE: dict[str, dict[str, Any]] = {
    "sweep payments": {"task": "payments.sweep", "schedule": 60.0},
    "recharge low credit": {"task": "payments.recharge", "schedule": 15.0},
    "review standings": {"task": "payments.review_standings", "schedule": crontab(minute=50)},
    "mirror usage to Stripe": {"task": "payments.mirror_usage", "schedule": crontab(minute=54)},
    "reconcile payments hourly": {
        "task": "payments.reconcile",
        "schedule": crontab(minute=58),
        "kwargs": {"kind": "hourly"},
    },
    "reconcile payments daily": {
        "task": "payments.reconcile",
        "schedule": crontab(hour=5, minute=30),
        "kwargs": {"kind": "daily"},
    },
}
