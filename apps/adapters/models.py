"""Trained adapters and their versions."""

import pgtrigger
from django.contrib.postgres.fields import ArrayField
from django.db import models
from django.db.models import Q
from django.db.models.functions import Now
from django.utils.translation import gettext_noop

from apps.adapters.lifecycle import VERSION_TRANSITIONS, AdapterVersionStatus
from apps.core.database.tenancy import OrganizationModel
from apps.core.database.transitions import choices_of, status_trigger
from apps.core.ids import IdField


class Adapter(OrganizationModel):
    """A named line of adapter versions over one base model, in the project of the jobs that made them."""

    id = IdField(prefix="adp")
    project = models.ForeignKey("accounts.Project", on_delete=models.PROTECT, related_name="+")
    name = models.CharField(max_length=120)
    base_model = models.ForeignKey("catalog.BaseModel", on_delete=models.PROTECT, related_name="+")
    created_at = models.DateTimeField(db_default=Now())
    deleted_at = models.DateTimeField(null=True)


_SUM_EXPORTS = """
    NEW.export_bytes := coalesce((
        SELECT sum((export ->> 'bytes')::bigint) FROM jsonb_array_elements(NEW.exports) AS export
    ), 0);
    RETURN NEW;
"""


class AdapterVersion(OrganizationModel):
    """One set of weights, hashed and immutable. Its public name is never used again, even after deletion."""

    id = IdField(prefix="adpv")
    adapter = models.ForeignKey(Adapter, on_delete=models.PROTECT, related_name="versions")
    number = models.PositiveIntegerField(null=True, help_text="Null: a checkpoint, no version of its own.")
    model_name = models.CharField(max_length=200, unique=True, help_text="ft:<base>:<organization>:<suffix>:<id>")
    lora_name = models.CharField(max_length=28, unique=True, help_text="The engine's name: a- and 26 at random.")
    source = models.CharField(max_length=64, help_text="The run that made it.")
    object_prefix = models.CharField(max_length=300)
    manifest = models.JSONField()
    manifest_sha256 = models.CharField(max_length=64)
    bytes = models.BigIntegerField()
    rank = models.PositiveSmallIntegerField()
    target_modules = ArrayField(models.CharField(max_length=40))
    method = models.CharField(max_length=16)
    chat_template_sha256 = models.CharField(max_length=64)
    metrics = models.JSONField(default=dict)
    status = models.CharField(
        max_length=12, choices=choices_of(VERSION_TRANSITIONS), default=AdapterVersionStatus.CHECKING
    )
    status_reason = models.CharField(max_length=300, blank=True)
    certified_at = models.DateTimeField(null=True)
    parity = models.JSONField(default=dict, help_text="apps.contracts.parity.ParityResult, {} before any engine spoke")
    report = models.JSONField(default=dict, help_text="apps.contracts.evaluation.EvaluationReport, {} without one")
    exports = models.JSONField(default=list, help_text="Other forms: kind, object_prefix, manifest, bytes")
    export_bytes = models.BigIntegerField(default=0, help_text="Of all exports, kept by a trigger.")
    missing = models.JSONField(default=list, help_text="What was promised and could not be made: kind, cause")
    created_at = models.DateTimeField(db_default=Now())
    deleted_at = models.DateTimeField(null=True)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["adapter", "number"], name="adapter_version_once")]
        indexes = [
            models.Index(fields=["organization", "-created_at", "-id"], name="adapter_version_newest"),
            # An organization's bytes are summed often, from this index alone.
            models.Index(
                fields=["organization"],
                include=["bytes", "export_bytes"],
                condition=Q(deleted_at=None),
                name="adapter_version_kept",
            ),
        ]
        triggers = [
            status_trigger("adapter_version_status", VERSION_TRANSITIONS),
            pgtrigger.Trigger(
                name="adapter_version_export_bytes",
                when=pgtrigger.Before,
                operation=pgtrigger.Insert | pgtrigger.UpdateOf("exports"),
                func=_SUM_EXPORTS,
            ),
        ]

    @property
    def label(self) -> str:
        """Its distinguishing label among siblings: the version number, or the step of a checkpoint."""
        return (
            gettext_noop("version %(number)s") % {"number": self.number}
            if self.number
            else gettext_noop("step %(step)s") % {"step": self.metrics.get("step", "?")}
        )

    @property
    def certificate_state(self) -> str:
        """The state of its certificate as its owner sees it: a whole model has none."""
        return "no_certificate" if self.status == AdapterVersionStatus.FILES_ONLY else self.status

    @property
    def whole_model_name(self) -> str:
        """The engine's name for it as a whole model, as immutable as `lora_name`; customers never see or send it."""
        return f"b-{self.lora_name.removeprefix('a-')}"
