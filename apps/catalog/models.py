"""What can be trained, on what, and for how much."""

import pgtrigger
from django.db import models
from django.db.models import F, Q
from django.db.models.functions import Now

from apps.core.ids import IdField


class BaseModel(models.Model):
    """A model customers fine-tune: a hub repository at one commit, or a path on the workers."""

    id = IdField(prefix="bm")
    name = models.SlugField(max_length=80, unique=True, help_text="What customers put in `model`.")
    display_name = models.CharField(max_length=120)
    repo = models.CharField(max_length=160, blank=True)
    revision = models.CharField(max_length=64, blank=True, help_text="Commit, so that the weights cannot change.")
    path = models.CharField(max_length=400, blank=True)
    licence = models.CharField(max_length=80, blank=True)
    is_gated = models.BooleanField(default=False)
    hub_token_sealed = models.BinaryField(null=True)
    config = models.JSONField(default=dict, help_text="The model's own config.json, or the seeded dimensions.")
    parameter_count = models.BigIntegerField()
    context_length = models.PositiveIntegerField()
    chat_template = models.TextField(blank=True)
    chat_template_sha256 = models.CharField(max_length=64, blank=True)
    tokenizer_key = models.CharField(max_length=200, blank=True, help_text="Object key of tokenizer.json.")
    special_tokens = models.JSONField(
        default=dict, help_text="bos_token, eos_token, pad_token as the template sees them."
    )
    files_sha256 = models.JSONField(default=dict)
    default_recipe = models.JSONField(
        default=dict, help_text="Hyperparameters that suit this model when none are given."
    )
    source_url = models.URLField(max_length=400, blank=True)
    is_installed = models.BooleanField(default=False, help_text="Weights, tokenizer and template are at hand.")
    added_by = models.CharField(max_length=64, default="system")
    created_at = models.DateTimeField(db_default=Now())
    retired_at = models.DateTimeField(null=True)

    tenancy_reason = "the catalogue is the same for all tenants"
    app_access = "read"

    def __str__(self) -> str:
        return self.display_name

    @property
    def served_name(self) -> str:
        """The engine's name for it; customers never see or send it."""
        return f"b-{self.pk.removeprefix('bm_')}"


class GpuType(models.Model):
    """A GPU with its datasheet figures and where they were read."""

    key = models.SlugField(max_length=40, primary_key=True)
    name = models.CharField(max_length=80)
    memory_bytes = models.BigIntegerField(help_text="Usable, as the driver reports it.")
    specification = models.JSONField(default=dict)
    source_url = models.URLField(max_length=400, blank=True)

    tenancy_reason = "the catalogue is the same for all tenants"
    app_access = "read"

    def __str__(self) -> str:
        return self.name


class PriceRule(models.Model):
    """What one SKU costs from one moment to the next. Never edited: a new price closes the old rule."""

    id = IdField(prefix="price")
    sku = models.CharField(
        max_length=120, help_text="training:<pool>, inference:input:<model>, inference:output:<model>, warm:<model>"
    )
    unit = models.CharField(
        max_length=16,
        choices=[("gpu_ms", "GPU milliseconds"), ("tokens", "tokens"), ("warm_ms", "milliseconds kept warm")],
    )
    price_nano = models.BigIntegerField()
    per = models.BigIntegerField(help_text="Units that price buys, e.g. 3600000 GPU milliseconds.")
    effective_from = models.DateTimeField(db_default=Now())
    effective_to = models.DateTimeField(null=True)
    created_by = models.CharField(max_length=64)

    tenancy_reason = "prices are the same for all tenants"
    app_access = "read"

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["sku"], condition=Q(effective_to=None), name="price_one_active"),
            models.CheckConstraint(condition=Q(price_nano__gte=0, per__gt=0), name="price_positive"),
            models.CheckConstraint(
                condition=Q(effective_to=None) | Q(effective_to__gt=F("effective_from")), name="price_period"
            ),
        ]
        triggers = [
            pgtrigger.Protect(name="price_no_delete", operation=pgtrigger.Delete),
            pgtrigger.ReadOnly(name="price_frozen", fields=["sku", "unit", "price_nano", "per", "effective_from"]),
        ]
