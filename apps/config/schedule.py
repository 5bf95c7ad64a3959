"""What happens by the clock. In code, so that a deploy changes it."""

SCHEDULE = {
    "deliver outbox": {"task": "core.deliver_outbox", "schedule": 5.0},
    "prune outbox": {"task": "core.prune_outbox", "schedule": 600.0},
    "reclaim expired leases": {"task": "finetuning.reclaim_expired_leases", "schedule": 15.0},
    "ring doorbells": {"task": "finetuning.ring_doorbells", "schedule": 15.0},
    "admit waiting jobs": {"task": "finetuning.admit_waiting", "schedule": 5.0},
    "learn from finished runs": {"task": "finetuning.learn_from_runs", "schedule": 300.0},
    "validate waiting datasets": {"task": "datasets.validate_waiting", "schedule": 15.0},
    "delete expired datasets": {"task": "datasets.delete_expired", "schedule": 300.0},
    "expire uploads": {"task": "datasets.expire_uploads", "schedule": 300.0},
    "sweep orphaned objects": {"task": "datasets.sweep_orphans", "schedule": 86_400.0},
    "rate usage": {"task": "billing.rate_usage", "schedule": 5.0},
    "expire credit": {"task": "billing.expire_lots", "schedule": 300.0},
    "seal the ledger": {"task": "billing.seal_ledger", "schedule": 3600.0},
    "close expired holds": {"task": "billing.close_expired_holds", "schedule": 30.0},
}
