"""Models of retraining plans, and of the retrainings that they led to."""

from django.db import models
from django.db.models import F, Q
from django.db.models.functions import Now

from apps.adapters.models import AdapterVersion
from apps.core.database.tenancy import OrganizationModel
from apps.core.database.transitions import choices_of, status_trigger
from apps.core.ids import IdField
from apps.finetuning.lifecycle import (
    RETRAINING_OPEN,
    RETRAINING_TRANSITIONS,
    Cadence,
    RetrainingStatus,
    RetrainingTrigger,
)
from apps.finetuning.models.jobs import FineTuningJob


class RetrainingPlan(OrganizationModel):
    """When a job is repeated on the newest version of a dataset, and when its model becomes production."""

    id = IdField(prefix="retplan")
    name = models.CharField(max_length=80)
    source_job = models.ForeignKey(FineTuningJob, on_delete=models.PROTECT, related_name="+")
    dataset = models.ForeignKey("datasets.Dataset", on_delete=models.PROTECT, related_name="+")
    held_out = models.ForeignKey("datasets.Dataset", on_delete=models.PROTECT, related_name="+")
    regression = models.ForeignKey("datasets.Dataset", on_delete=models.PROTECT, related_name="+", null=True)
    alias = models.ForeignKey("serving.Alias", on_delete=models.SET_NULL, related_name="+", null=True)
    testing_criteria = models.JSONField(help_text="Of the eval: a row is passed if its answer passes all of them.")
    evaluated = models.ForeignKey("evals.Eval", on_delete=models.SET_NULL, related_name="+", null=True)
    cadence = models.CharField(max_length=8, choices=[(one.value, one.value) for one in Cadence], blank=True)
    cadence_value = models.PositiveSmallIntegerField(null=True, help_text="Days, a day of the week, or of the month.")
    hour_utc = models.PositiveSmallIntegerField(default=0)
    min_new_rows = models.PositiveIntegerField(null=True, help_text="Begin when a version has so many more rows.")
    max_nano = models.BigIntegerField(help_text="The most that one retraining costs, with its comparisons.")
    min_gain_points = models.FloatField(help_text="Of the held-out rows, in percentage points.")
    max_loss_points = models.FloatField(null=True, help_text="Of the regression rows, in percentage points.")
    is_enabled = models.BooleanField(default=True)
    next_due_at = models.DateTimeField(null=True)
    seen_number = models.PositiveIntegerField(default=0, help_text="Of the version that growth is counted from.")
    seen_rows = models.BigIntegerField(default=0)
    acts_as = models.CharField(max_length=64, help_text="Who changed it last: retrainings act in that name.")
    created_by = models.CharField(max_length=64)
    created_at = models.DateTimeField(db_default=Now())

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["organization", "name"], name="retraining_plan_name_once"),
            models.CheckConstraint(
                condition=~Q(cadence="") | Q(min_new_rows__isnull=False), name="retraining_plan_has_trigger"
            ),
            models.CheckConstraint(
                condition=Q(cadence="", cadence_value=None, next_due_at=None)
                | ~Q(cadence="") & Q(cadence_value__isnull=False, next_due_at__isnull=False),
                name="retraining_plan_schedule",
            ),
            models.CheckConstraint(
                condition=Q(regression=None, max_loss_points=None)
                | Q(regression__isnull=False, max_loss_points__isnull=False),
                name="retraining_plan_regression",
            ),
            models.CheckConstraint(condition=Q(max_nano__gt=0), name="retraining_plan_price"),
        ]

    def __str__(self) -> str:
        return self.name


class Retraining(OrganizationModel):
    """One training of a plan, with the comparison and the decision that followed."""

    id = IdField(prefix="retrain")
    plan = models.ForeignKey(RetrainingPlan, on_delete=models.CASCADE, related_name="retrainings")
    trigger = models.CharField(max_length=8, choices=[(one.value, one.value) for one in RetrainingTrigger])
    trigger_key = models.CharField(max_length=100, help_text="What began it: nothing begins two.")
    status = models.CharField(
        max_length=10, choices=choices_of(RETRAINING_TRANSITIONS), default=RetrainingStatus.WAITING
    )
    training_file = models.ForeignKey("datasets.DatasetVersion", models.PROTECT, related_name="+", null=True)
    held_out_file = models.ForeignKey("datasets.DatasetVersion", models.PROTECT, related_name="+", null=True)
    regression_file = models.ForeignKey("datasets.DatasetVersion", models.PROTECT, related_name="+", null=True)
    job = models.ForeignKey(FineTuningJob, on_delete=models.PROTECT, related_name="+", null=True)
    production = models.ForeignKey(AdapterVersion, on_delete=models.PROTECT, related_name="+", null=True)
    new_run = models.ForeignKey("evals.EvalRun", on_delete=models.SET_NULL, related_name="+", null=True)
    production_run = models.ForeignKey("evals.EvalRun", on_delete=models.SET_NULL, related_name="+", null=True)
    max_nano = models.BigIntegerField(help_text="The plan's when it began.")
    comparison_nano = models.BigIntegerField(default=0, help_text="The most that its comparisons may cost so far.")
    held_out_result = models.JSONField(null=True, help_text="apps.contracts.evaluation.paired_shares.PairedShares")
    regression_result = models.JSONField(null=True)
    code = models.CharField(max_length=48, blank=True)
    reason = models.CharField(max_length=500, blank=True)
    attempts = models.PositiveSmallIntegerField(default=0, help_text="At its current step.")
    next_at = models.DateTimeField(db_default=Now(), help_text="When its step is tried or looked at again.")
    created_by = models.CharField(max_length=64)
    created_at = models.DateTimeField(db_default=Now())
    finished_at = models.DateTimeField(null=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["plan", "trigger_key"], name="retraining_once"),
            models.UniqueConstraint(
                fields=["plan"], condition=Q(status__in=RETRAINING_OPEN), name="retraining_one_open"
            ),
            models.CheckConstraint(
                condition=Q(status__in=RETRAINING_OPEN, finished_at=None)
                | ~Q(status__in=RETRAINING_OPEN) & Q(finished_at__isnull=False),
                name="retraining_finished",
            ),
            models.CheckConstraint(
                condition=Q(comparison_nano__lte=F("max_nano")), name="retraining_comparison_within_maximum"
            ),
        ]
        indexes = [
            models.Index(fields=["plan", "-created_at", "-id"], name="retraining_newest"),
            models.Index(fields=["next_at"], condition=Q(finished_at=None), name="retraining_open"),
        ]
        triggers = [status_trigger("retraining_status", RETRAINING_TRANSITIONS)]
