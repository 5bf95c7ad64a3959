"""Models of estimates beside actual figures, and of what was learned from them."""

import pgtrigger
from django.db import models
from django.db.models.functions import Now

from apps.core.database.tenancy import OrganizationModel
from apps.core.ids import IdField
from apps.finetuning.lifecycle import CalibrationOutcome
from apps.finetuning.models.pools import GpuPool
from apps.finetuning.models.runs import Run


class CalibrationPoint(OrganizationModel):
    """A finished run's actual figures beside the estimate that its customer was shown.

    Each factor is the correction in the estimate: the estimate divided by it is the physics' own figure.
    """

    run = models.OneToOneField(Run, on_delete=models.CASCADE, related_name="calibration")
    pool = models.ForeignKey(GpuPool, on_delete=models.CASCADE, related_name="+")
    outcome = models.CharField(
        max_length=16,
        choices=[(CalibrationOutcome.SUCCEEDED, "Succeeded"), (CalibrationOutcome.OUT_OF_MEMORY, "Out of memory")],
    )
    family = models.CharField(max_length=48, help_text="model_type of the base model's config.json")
    method = models.CharField(max_length=16)
    attempts = models.PositiveIntegerField(help_text="Of the job; times, tokens and cost are sums over them.")
    physics = models.CharField(max_length=16, help_text="apps.estimates.calibration.PHYSICS of the estimate")
    version = models.PositiveIntegerField(default=0, help_text="Calibration of the pool in the estimate; 0: none.")
    time_factor = models.FloatField(default=1.0)
    memory_factor = models.FloatField(default=1.0)
    beside_factor = models.FloatField(default=1.0, db_default=1.0)
    estimated_seconds = models.FloatField(null=True, help_text="Training time alone, as billed.")
    estimated_seconds_p10 = models.FloatField(null=True)
    estimated_seconds_p90 = models.FloatField(null=True)
    actual_seconds = models.FloatField(null=True)
    wall_seconds = models.FloatField(null=True, help_text="From the first claim to the end, with everything unbilled.")
    estimated_beside_seconds = models.FloatField(null=True, help_text="Of the run, from claim to end, beside training.")
    estimated_tokens_per_second = models.FloatField(null=True)
    actual_tokens_per_second = models.FloatField(null=True)
    estimated_peak_bytes = models.BigIntegerField(null=True)
    estimated_peak_bytes_p10 = models.BigIntegerField(null=True)
    estimated_peak_bytes_p90 = models.BigIntegerField(null=True)
    actual_peak_bytes = models.BigIntegerField(null=True, help_text="Reserved by torch on a GPU, resident on a CPU.")
    estimated_cost_nano = models.BigIntegerField(null=True)
    estimated_cost_nano_p10 = models.BigIntegerField(null=True)
    estimated_cost_nano_p90 = models.BigIntegerField(null=True)
    actual_cost_nano = models.BigIntegerField(null=True)
    created_at = models.DateTimeField(db_default=Now())

    class Meta:
        indexes = [models.Index(fields=["pool", "-id"], name="calibration_point_newest")]


class CalibrationVersion(models.Model):
    """The calibration fitted on a pool's finished runs at one time, with its inputs. Versions are never deleted."""

    id = IdField(prefix="cal")
    pool = models.ForeignKey(GpuPool, on_delete=models.PROTECT, related_name="calibrations")
    number = models.PositiveIntegerField(help_text="Counts a pool's versions from 1.")
    calibration = models.JSONField(help_text="apps.estimates.calibration.Calibration")
    fitted_on = models.JSONField(help_text="apps.finetuning.pools.calibrations.FittedOn")
    last_point = models.BigIntegerField(help_text="The newest CalibrationPoint that was there.")
    created_at = models.DateTimeField(db_default=Now())

    tenancy_reason = "medians over a shared pool's runs; names no organization and no run"
    app_access = "read"
    is_append_only = True

    class Meta:
        constraints = [models.UniqueConstraint(fields=["pool", "number"], name="calibration_number_once")]
        triggers = [pgtrigger.Protect(name="calibration_append_only", operation=pgtrigger.Update | pgtrigger.Delete)]


class PoolAccuracy(models.Model):
    """A pool's figures on the public page; absent while it has too few runs to protect each organization."""

    pool = models.OneToOneField(GpuPool, on_delete=models.CASCADE, primary_key=True, related_name="accuracy")
    report = models.JSONField(help_text="apps.finetuning.pools.accuracy.AccuracyReport")
    updated_at = models.DateTimeField(db_default=Now())

    tenancy_reason = "figures over several organizations' runs, above the floor of apps.finetuning.pools.accuracy"
    app_access = "read"
