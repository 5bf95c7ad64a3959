"""Settings of the outbox: the task and the lane of each topic."""

from apps.core.messages.topics import Topic

# The organizations that take one turn together: ids -> ids of their share holders.
OUTBOX_SHARES = "apps.accounts.shares.list_sharing"
OUTBOX_SUSPENDED = "apps.accounts.suspension.list_suspended"
OUTBOX_WAKE = "apps.config.celery.wake_outbox"

# The most messages of a lane that are carried out at once: its workers have another lane too, for their other places.
OUTBOX_MOST_AT_ONCE = {"hub-large": 2}

# A mail server, a hub or Stripe that is down, or a customer's file of gigabytes, delays only its own lane. Small files
# and middle files have lanes (apps.datasets.intake.lanes) in which no large file can delay them. Urgent: a machine or
# money waits.
OUTBOX_TOPICS = {
    "adapter.checked": Topic("apps.finetuning.results.verdicts.record_certification_event"),
    "base_model.install": Topic("apps.catalog.tasks.install", lane="hub"),
    "base_model.lookup": Topic("apps.catalog.tasks.look_up", lane="hub"),
    "billing.alert": Topic("apps.billing.invoices.mail.send_alert", lane="mail"),
    "billing.invoice": Topic("apps.billing.invoices.mail.send_invoice", lane="mail"),
    "billing.low_balance": Topic("apps.billing.invoices.mail.send_low_balance", lane="mail"),
    "billing.report": Topic("apps.billing.invoices.mail.send_report", lane="mail"),
    "budget.exhausted": Topic("apps.finetuning.tasks.pause_over_budget", is_urgent=True),
    "checkpoint.named": Topic("apps.finetuning.tasks.serve_named_checkpoint", lane="data-middle"),
    "dataset.changes": Topic("apps.datasets.tasks.compare_rows", lane="data-middle", waits_while_suspended=True),
    "dataset.compare": Topic("apps.datasets.tasks.compare", lane="data-middle", waits_while_suspended=True),
    "dataset.count": Topic("apps.datasets.tasks.count", lane="data-middle", waits_while_suspended=True),
    "dataset.inspect": Topic("apps.datasets.tasks.inspect", lane="data-middle", waits_while_suspended=True),
    "dataset.validate": Topic("apps.datasets.tasks.validate", lane="data", waits_while_suspended=True),
    "dataset.validated": Topic("apps.finetuning.tasks.admit_jobs_of_file"),
    "deployment.created": Topic("apps.serving.operations.place_adapters"),
    "hub.push": Topic("apps.finetuning.results.hub_pushes.send", lane="hub-uploads"),
    "hub.push_large": Topic("apps.finetuning.results.hub_pushes.send", lane="hub-large"),
    "job.admit": Topic("apps.finetuning.jobs.admission.admit_when_ready"),
    "job.ended": Topic("apps.finetuning.notices.send", lane="mail"),
    "mail": Topic("apps.accounts.notices.mail.send", lane="mail"),
    "eval.answered": Topic("apps.serving.evals.progress.go_on", lane="data-small", waits_while_suspended=True),
    "eval.prepare": Topic("apps.serving.evals.progress.prepare", lane="data-small", waits_while_suspended=True),
    "event.created": Topic("apps.accounts.notices.deliveries.fan_out"),
    "objects.delete": Topic("apps.core.tasks.delete_objects", lane="data-small"),
    "organization.suspended": Topic("apps.finetuning.tasks.pause_suspended"),
    "payments.charge": Topic("apps.payments.autorecharge.charge", lane="payments"),
    "payments.decline": Topic("apps.payments.autorecharge.settle_decline", lane="payments"),
    "payments.drop": Topic("apps.payments.autorecharge.drop_unconfirmed", lane="payments"),
    "payments.event": Topic("apps.payments.webhooks.handle_or_record", lane="payments"),
    "payments.page": Topic("apps.payments.topups.make_page", lane="payments"),
    "payments.refund": Topic("apps.payments.refunds.send_refund", lane="payments"),
    "payments.suspended": Topic("apps.finetuning.tasks.pause_suspended", is_urgent=True),
    "payments.topup": Topic("apps.payments.topups.sync_or_log", lane="payments"),
    "run.ended": Topic("apps.finetuning.results.attempt_traces.send", lane="data-small"),
    "train.wake": Topic("apps.finetuning.tasks.ring_doorbell", is_urgent=True),
    "upload.closed": Topic("apps.datasets.intake.uploads.delete_parts", lane="data-small"),
    "webhook.deliver": Topic("apps.accounts.notices.deliveries.deliver", lane="webhooks"),
}
