"""Batches, their requests, and the files that they read and write."""

from django.db import models
from django.db.models import Q
from django.db.models.functions import Now

from apps.batches.lifecycle import ACTIVE, BATCH_TRANSITIONS, BatchStatus, RequestStatus
from apps.core.database.tenancy import OrganizationModel
from apps.core.database.transitions import choices_of, status_trigger
from apps.core.ids import IdField


class BatchFile(OrganizationModel):
    """The input, the answers or the errors of a batch. Unlike a dataset version, its rows are not training data."""

    id = IdField(prefix="file", separator="-")
    project = models.ForeignKey("accounts.Project", on_delete=models.PROTECT, related_name="+")
    purpose = models.CharField(max_length=24)
    filename = models.CharField(max_length=255)
    object_key = models.CharField(max_length=300)
    bytes = models.BigIntegerField()
    created_by = models.CharField(max_length=64)
    created_at = models.DateTimeField(db_default=Now())
    expires_at = models.DateTimeField(null=True)
    deleted_at = models.DateTimeField(null=True)

    class Meta:
        indexes = [
            models.Index(
                fields=["organization", "-created_at", "-id"], condition=Q(deleted_at=None), name="batch_file_newest"
            )
        ]

    def __str__(self) -> str:
        return self.filename


class Batch(OrganizationModel):
    """Requests of one file that are answered together, in the name of the key that created the batch."""

    id = IdField(prefix="batch")
    project = models.ForeignKey("accounts.Project", on_delete=models.PROTECT, related_name="+")
    status = models.CharField(max_length=12, choices=choices_of(BATCH_TRANSITIONS), default=BatchStatus.VALIDATING)
    endpoint = models.CharField(max_length=40)
    input_file = models.ForeignKey(BatchFile, on_delete=models.PROTECT, related_name="batches")
    output_file = models.ForeignKey(BatchFile, on_delete=models.PROTECT, null=True, related_name="+")
    error_file = models.ForeignKey(BatchFile, on_delete=models.PROTECT, null=True, related_name="+")
    output_expires_after_seconds = models.PositiveIntegerField(null=True)
    metadata = models.JSONField(null=True)
    model_name = models.CharField(max_length=200, default="", help_text="The model of the first request.")
    errors = models.JSONField(default=list, help_text="Why it failed: line, code, message, param.")
    stop = models.JSONField(null=True, help_text="Why no more requests are sent: code, message.")
    total = models.PositiveIntegerField(default=0)
    completed = models.PositiveIntegerField(default=0)
    failed = models.PositiveIntegerField(default=0)
    input_tokens = models.BigIntegerField(default=0)
    cached_tokens = models.BigIntegerField(default=0)
    output_tokens = models.BigIntegerField(default=0)
    result_bytes = models.BigIntegerField(db_default=0, default=0, help_text="Size of the recorded answers.")
    faults = models.PositiveSmallIntegerField(
        db_default=0, default=0, help_text="Errors of ours since the last answer."
    )
    retry_at = models.DateTimeField(null=True, help_text="Left out until then, after an error of ours.")
    eval_run = models.CharField(
        max_length=40, db_default="", default="", help_text="The run of an eval that asks; empty for a customer's own."
    )
    created_by = models.CharField(max_length=64)
    created_at = models.DateTimeField(db_default=Now())
    expires_at = models.DateTimeField()
    in_progress_at = models.DateTimeField(null=True)
    finalizing_at = models.DateTimeField(null=True)
    cancelling_at = models.DateTimeField(null=True)
    completed_at = models.DateTimeField(null=True)
    failed_at = models.DateTimeField(null=True)
    expired_at = models.DateTimeField(null=True)
    cancelled_at = models.DateTimeField(null=True)

    class Meta:
        indexes = [
            models.Index(fields=["organization", "-created_at", "-id"], name="batch_newest"),
            # The worker looks for these after each answer, among all batches that ever were.
            models.Index(
                fields=["organization", "created_at"],
                condition=Q(status__in=[str(each) for each in ACTIVE]),
                name="batch_active",
            ),
        ]
        triggers = [status_trigger("batch_status", BATCH_TRANSITIONS)]


class BatchRequest(OrganizationModel):
    """One line of a batch, until the batch ends. Its body stays in the input file."""

    id = IdField(prefix="batch_req")
    batch = models.ForeignKey(Batch, on_delete=models.CASCADE, related_name="requests")
    line = models.PositiveIntegerField()
    custom_id = models.CharField(max_length=256)
    offset = models.BigIntegerField(help_text="Where the line begins in the input file, in bytes.")
    bytes = models.PositiveIntegerField()
    status = models.CharField(
        max_length=12, choices=[(one.value, one.value) for one in RequestStatus], default=RequestStatus.PENDING
    )
    failures = models.PositiveSmallIntegerField(default=0, help_text="Answers of 5xx so far.")
    result = models.TextField(default="", help_text="Its line of the output or error file.")

    class Meta:
        constraints = [models.UniqueConstraint(fields=["batch", "line"], name="batch_request_once")]
        indexes = [
            models.Index(
                fields=["batch", "line"], condition=Q(status=RequestStatus.PENDING), name="batch_request_pending"
            )
        ]
