"""Settings of the database roles: what each may do."""

# What each narrower role may do, by app label or model: a word of apps/core/database/policies.py, or privileges. The
# grants of anneal_app and anneal_sys follow from the models.
ROLE_GRANTS: dict[str, dict[str, str]] = {
    "anneal_internal": {
        "finetuning": "write",
        "finetuning.hubpushtoken": "none",
        "finetuning.capacitytoken": "none",
        "serving": "write",
        "adapters": "write",
        "billing": "write",
        "core": "write",
        "core.idempotentanswer": "none",
        "datasets": "read",
        "catalog": "read",
        "catalog.hublookup": "none",
        "accounts.organization": "read",
        "accounts.region": "read",
        "accounts.membership": "read",
        "accounts.project": "read",
        "accounts.notification": "extend",
        "accounts.organizationevent": "extend",
        # A run's judge is called with a short-lived key of the job's creator. The next key gets the rest of its limit.
        "accounts.apikey": "SELECT, INSERT, UPDATE (spend_limit_nano)",
        "batches.batch": "SELECT (status, created_at, retry_at)",  # how long batches wait for a worker
    },
    "anneal_gateway": {
        "accounts.apikey": "write",
        "accounts.organization": "read",
        "accounts.region": "read",
        "accounts.membership": "read",
        "accounts.project": "read",  # the names of those with a budget, and which are private
        "accounts.projectmember": "read",
        "accounts.notification": "extend",
        "accounts.organizationevent": "extend",
        "adapters": "read",
        "serving": "read",
        "serving.deployment": "write",  # requests for an adapter are noted, so that replicas keep it
        "serving.placement": "write",  # and a cold adapter is placed at once
        "serving.replica": "write",
        "serving.replicafleet": "write",  # and requests for a base model, so that its fleet starts a replica
        "catalog": "read",
        "catalog.hubtoken": "none",
        "catalog.hublookup": "none",
        "billing": "write",
        "core.outboxmessage": "add",
        "finetuning.quota": "read",
        "finetuning.allowance": "read",  # of requests and tokens per minute
        "finetuning.checkpoint": "read",  # a name that matches no version may be a checkpoint's
        "finetuning.finetuningjob": "read",
        "completions": "INSERT, SELECT (organization_id, bytes, deleted_at)",
        # What an organization stores, before a completion joins it: sizes alone, and never content.
        "datasets.datasetversion": "SELECT (id, organization_id, status, bytes, rows_bytes, rows)",
        "datasets.versioninspection": "SELECT (version_id)",
        "datasets.upload": "SELECT (id, organization_id, status, bytes, signed_until)",
        "datasets.uploadpart": "SELECT (upload_id, bytes)",
        "batches.batchfile": "SELECT (organization_id, bytes, deleted_at)",
        "evals": "SELECT (organization_id, bytes)",
    },
}
# Global tables of other packages that the web role must write.
APP_ROLE_GRANTS = {
    "sessions.session": "write",
    "account.emailaddress": "write",
    "account.emailconfirmation": "write",
    "mfa.authenticator": "write",
    "usersessions.usersession": "write",
}
