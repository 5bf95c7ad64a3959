"""The periodic tasks. They are defined in code, so that a deploy changes them."""

from typing import Any

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
    "look for newer base models": {"task": "catalog.check_revisions", "schedule": 3_600.0},
    "delete expired datasets": {"task": "datasets.delete_expired", "schedule": 300.0},
    # Dropped when the next one is due: one task works as long as there are requests.
    "work on batches": {"task": "batches.work", "schedule": 5.0, "options": {"expires": 5}},
    "delete expired files of batches": {"task": "batches.delete_expired", "schedule": 300.0},
    "delete expired completions": {"task": "completions.delete_expired", "schedule": 3_600.0},
    "expire uploads": {"task": "datasets.expire_uploads", "schedule": 300.0},
    "sweep orphaned objects": {"task": "datasets.sweep_orphans", "schedule": 86_400.0},
    "sweep orphaned files of batches": {"task": "batches.sweep_orphans", "schedule": 86_400.0},
    "sweep orphaned adapters": {"task": "finetuning.sweep_orphans", "schedule": 86_400.0},
    "place adapters": {"task": "serving.place", "schedule": 5.0},
    "charge for adapters kept warm": {"task": "serving.charge_warm", "schedule": 60.0},
    "reconcile metering with the engines": {"task": "serving.reconcile_metering", "schedule": 3_600.0},
    "sweep old checkpoints": {"task": "finetuning.sweep_checkpoints", "schedule": 3_600.0},
    "sweep expired tokens": {"task": "accounts.sweep_expired_tokens", "schedule": 3_600.0},
    "prune notifications": {"task": "accounts.prune_notifications", "schedule": 3_600.0},
    "rate usage": {"task": "billing.rate_usage", "schedule": 5.0, "options": {"expires": 5}},
    "prune traffic": {"task": "billing.prune_traffic", "schedule": 3600.0},
    "give volume back": {"task": "billing.post_rebates", "schedule": 3600.0},
    "sample storage": {"task": "finetuning.sample_storage", "schedule": 900.0},
    "mail daily reports": {"task": "billing.mail_reports", "schedule": 1800.0},
    "warn of low balances": {"task": "billing.warn_low_balances", "schedule": 900.0},
    "close months": {"task": "billing.close_months", "schedule": 3600.0},
    "reconcile the books": {"task": "billing.reconcile", "schedule": 3600.0},
    "expire credit": {"task": "billing.expire_lots", "schedule": 300.0},
    "seal the ledger": {"task": "billing.seal_ledger", "schedule": 3600.0},
    "close expired holds": {"task": "billing.close_expired_holds", "schedule": 30.0},
}

# Only where Stripe is configured: elsewhere nothing reads their queue, which would grow without bound.
PAYMENTS_SCHEDULE: dict[str, dict[str, Any]] = {
    "sweep payments": {"task": "payments.sweep", "schedule": 60.0},
    "recharge low credit": {"task": "payments.recharge", "schedule": 15.0},
    "review standings": {"task": "payments.review_standings", "schedule": 3600.0},
    "mirror usage to Stripe": {"task": "payments.mirror_usage", "schedule": 3600.0},
    "reconcile payments hourly": {"task": "payments.reconcile", "schedule": 3600.0, "kwargs": {"kind": "hourly"}},
    "reconcile payments daily": {"task": "payments.reconcile", "schedule": 86_400.0, "kwargs": {"kind": "daily"}},
}
