"""Evals, their runs, and the items of runs."""

from django.db import models
from django.db.models.functions import Now

from apps.batches.models import Batch
from apps.core.database.tenancy import OrganizationModel
from apps.core.database.transitions import choices_of, status_trigger
from apps.core.ids import IdField
from apps.serving.evals.lifecycle import RUN_TRANSITIONS, EvalPhase, EvalRunStatus, ItemStatus


class Eval(OrganizationModel):
    """The criteria that grade answers, and the data of the answers."""

    id = IdField(prefix="eval")
    project = models.ForeignKey("accounts.Project", on_delete=models.PROTECT, related_name="+")
    name = models.CharField(max_length=200)
    metadata = models.JSONField(default=dict)
    data_source_config = models.JSONField()
    testing_criteria = models.JSONField()
    bytes = models.PositiveIntegerField(db_default=0, default=0, help_text="Counts as storage.")
    created_by = models.CharField(max_length=64)
    created_at = models.DateTimeField(db_default=Now())
    updated_at = models.DateTimeField(db_default=Now())

    class Meta:
        indexes = [
            models.Index(fields=["organization", "-created_at", "-id"], name="eval_newest"),
            models.Index(fields=["organization", "-updated_at", "-id"], name="eval_updated"),
        ]

    def __str__(self) -> str:
        return self.name


class EvalRun(OrganizationModel):
    """One grading of a model's answers, or of answers that are already in the data."""

    id = IdField(prefix="evalrun")
    evaluated = models.ForeignKey(Eval, on_delete=models.CASCADE, related_name="runs")
    name = models.CharField(max_length=200)
    metadata = models.JSONField(default=dict)
    data_source = models.JSONField()
    testing_criteria = models.JSONField(help_text="Those of the eval when the run was made.")
    model_name = models.CharField(max_length=200, default="")
    status = models.CharField(max_length=12, choices=choices_of(RUN_TRANSITIONS), default=EvalRunStatus.QUEUED)
    phase = models.CharField(max_length=12, choices=[(one.value, one.value) for one in EvalPhase], default="")
    attempts = models.PositiveSmallIntegerField(db_default=0, default=0, help_text="At its current step.")
    batch = models.ForeignKey(Batch, on_delete=models.PROTECT, null=True, related_name="+")
    error = models.JSONField(null=True, help_text="Why it failed: code, message.")
    cost_limit_nano = models.BigIntegerField(null=True, help_text="Not begun if it may cost more.")
    highest_cost_nano = models.BigIntegerField(null=True, help_text="The most that it can cost.")
    total = models.PositiveIntegerField(default=0)
    passed = models.PositiveIntegerField(default=0)
    failed = models.PositiveIntegerField(default=0)
    errored = models.PositiveIntegerField(default=0)
    criteria_results = models.JSONField(default=list)
    usage = models.JSONField(default=list, help_text="Tokens and calls by model.")
    bytes = models.PositiveIntegerField(db_default=0, default=0, help_text="Counts as storage.")
    created_by = models.CharField(max_length=64)
    created_at = models.DateTimeField(db_default=Now())
    finished_at = models.DateTimeField(null=True)

    class Meta:
        indexes = [models.Index(fields=["evaluated", "-created_at", "-id"], name="eval_run_newest")]
        triggers = [status_trigger("eval_run_status", RUN_TRANSITIONS)]

    def __str__(self) -> str:
        return self.name


class EvalItem(OrganizationModel):
    """One item of a run, with its answer and grades."""

    id = IdField(prefix="outputitem")
    run = models.ForeignKey(EvalRun, on_delete=models.CASCADE, related_name="items")
    number = models.PositiveIntegerField()
    # Text and not jsonb, which refuses the NUL characters that models and customers may write.
    source = models.TextField(help_text="JSON: the item, and its sample if it came with one.")
    answers = models.TextField(default="{}", help_text="JSON: what models answered, by purpose.")
    results = models.TextField(default="[]", help_text="JSON: a result for each criterion.")
    status = models.CharField(
        max_length=8, choices=[(one.value, one.value) for one in ItemStatus], default=ItemStatus.PENDING
    )
    bytes = models.PositiveIntegerField(help_text="Counts as storage.")
    created_at = models.DateTimeField(db_default=Now())

    class Meta:
        constraints = [models.UniqueConstraint(fields=["run", "number"], name="eval_item_once")]
        indexes = [models.Index(fields=["organization"], include=["bytes"], name="eval_item_bytes")]
