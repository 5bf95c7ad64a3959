"""Stored completions."""

from django.db import models

from apps.core.database.tenancy import OrganizationModel
from apps.core.ids import IdField


class StoredCompletion(OrganizationModel):
    """A request and its answer, as the customer sent and received them. The gateway's recorder adds the row."""

    id = IdField(prefix="chatcmpl", separator="-")
    project = models.ForeignKey("accounts.Project", on_delete=models.PROTECT, related_name="+")
    key_id = models.CharField(max_length=64)
    request_id = models.CharField(max_length=64)
    model_name = models.CharField(max_length=200)
    metadata = models.JSONField(default=dict)
    # Text and not jsonb, which refuses the NUL characters that models and customers may write.
    request = models.TextField(help_text="JSON: the messages, tools and settings of the request.")
    answer = models.TextField(help_text="JSON: choices and usage.")
    bytes = models.PositiveIntegerField(help_text="Counts as storage.")
    created_at = models.DateTimeField(help_text="`created` of the answer.")
    # The empty row stays a while, so that a spool which a dead gateway left does not bring the completion back.
    deleted_at = models.DateTimeField(null=True, help_text="Hidden since then, and without its content.")

    class Meta:
        indexes = [
            models.Index(fields=["organization", "created_at", "id"], name="completion_in_order"),
            models.Index(fields=["organization", "model_name", "created_at", "id"], name="completion_of_model"),
            models.Index(fields=["organization"], include=["bytes"], name="completion_bytes"),
            models.Index(fields=["created_at"], name="completion_age"),
        ]
