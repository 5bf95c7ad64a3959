"""Budgets: an organization's own monthly limits, in total or for a label, a key, a member or a project."""

import pgtrigger
from django.db import models
from django.db.models import Q
from django.db.models.functions import Now
from django.utils.translation import gettext_noop

from apps.core.database.tenancy import OrganizationModel
from apps.core.ids import IdField


class BudgetScope(models.TextChoices):
    ORGANIZATION = "organization", gettext_noop("the whole organization")
    LABEL = "label", gettext_noop("a metadata label")
    KEY = "key", gettext_noop("an API key")
    MEMBER = "member", gettext_noop("a member")
    PROJECT = "project", gettext_noop("a project")


class BudgetMode(models.TextChoices):
    ALERT = "alert", gettext_noop("Alert only")
    BLOCK = "block", gettext_noop("Alert and block new usage")
    PAUSE = "pause", gettext_noop("Alert, block new usage and pause running jobs")


class Budget(OrganizationModel):
    """A limit for each calendar month (UTC). It is ended, not deleted: its alerts and months stay."""

    id = IdField(prefix="bud")
    scope = models.CharField(max_length=16, choices=BudgetScope)
    target = models.CharField(
        max_length=600, blank=True, help_text="name=value, or the id of the key, member or project."
    )
    limit_nano = models.BigIntegerField()
    mode = models.CharField(max_length=8, choices=BudgetMode)
    thresholds = models.JSONField(default=list, help_text="Percent of the limit at which to alert, each once a month.")
    created_by = models.CharField(max_length=64)
    created_at = models.DateTimeField(db_default=Now())
    ended_at = models.DateTimeField(null=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["organization", "scope", "target"], condition=Q(ended_at=None), name="budget_once"
            ),
            models.CheckConstraint(condition=Q(limit_nano__gt=0), name="budget_positive"),
        ]


class BudgetPeriod(OrganizationModel):
    """Spending under a budget in one month. The amount held is read from the open holds."""

    budget = models.ForeignKey(Budget, on_delete=models.PROTECT, related_name="periods")
    month = models.DateField()
    spent_nano = models.BigIntegerField(default=0)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["budget", "month"], name="budget_period_once")]


class BudgetAlert(OrganizationModel):
    """One threshold reached in one month. It is written once; the outbox message written with it mails it."""

    budget = models.ForeignKey(Budget, on_delete=models.PROTECT, related_name="alerts")
    month = models.DateField()
    threshold = models.PositiveSmallIntegerField()
    spent_nano = models.BigIntegerField()
    created_at = models.DateTimeField(db_default=Now())

    is_append_only = True

    class Meta:
        constraints = [models.UniqueConstraint(fields=["budget", "month", "threshold"], name="budget_alert_once")]
        triggers = [pgtrigger.Protect(name="budget_alert_append_only", operation=pgtrigger.Update | pgtrigger.Delete)]


class KeyLabel(OrganizationModel):
    """A label of an API key. Its requests are charged back to the label, as jobs are to their metadata."""

    key_id = models.CharField(max_length=40)
    name = models.CharField(max_length=64)
    value = models.CharField(max_length=512)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["organization", "key_id", "name"], name="key_label_once")]


class BillingProfile(OrganizationModel):
    """How an organization wants to be billed."""

    id = IdField(prefix="bill")
    legal_name = models.CharField(max_length=200, blank=True)
    address = models.TextField(max_length=1000, blank=True)
    is_daily_report_wanted = models.BooleanField(default=True)
    chargeback_label = models.CharField(max_length=64, default="team", help_text="Invoices are split by it.")
    low_balance_at = models.DateTimeField(null=True, help_text="When its members got notice of its low balance.")
    updated_at = models.DateTimeField(db_default=Now())

    class Meta:
        constraints = [models.UniqueConstraint(fields=["organization"], name="billing_profile_once")]
