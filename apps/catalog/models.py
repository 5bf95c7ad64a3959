"""Base models, their licences, GPU types and prices."""

import re

import pgtrigger
from django.db import models
from django.db.models import F, Q
from django.db.models.functions import Now

from apps.core.database.policies import OWN_ORGANIZATION
from apps.core.database.tenancy import OrganizationModel
from apps.core.ids import IdField

# Licences without conditions on the use of the weights. A row with two licences is read as the stricter one.
_PERMISSIVE = re.compile(r"(?:apache|mit|bsd|isc|cc0)\b(?!.*(?:except|also applies|\band\b))", re.IGNORECASE)

_MEDIA_CONFIGS = {"image": "vision_config", "audio": "audio_config"}  # the key of the encoder's config in config.json


class BaseModel(models.Model):
    """A model that customers fine-tune: a hub repository at one commit, or a path on the workers."""

    id = IdField(prefix="bm")
    name = models.SlugField(max_length=80, unique=True, help_text="What customers put in `model`.")
    display_name = models.CharField(max_length=120)
    repo = models.CharField(max_length=160, blank=True)
    revision = models.CharField(max_length=64, blank=True, help_text="Commit, so that the weights cannot change.")
    path = models.CharField(max_length=400, blank=True)
    licence = models.CharField(max_length=80, blank=True)  # an SPDX identifier, or the name of the terms
    is_gated = models.BooleanField(default=False)
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
    install_requested_at = models.DateTimeField(null=True)
    install_error = models.CharField(max_length=500, blank=True, help_text="Why the hub's files were not taken.")
    newer_revision = models.CharField(max_length=64, blank=True, help_text="The hub's head, if it has moved on.")
    revision_checked_at = models.DateTimeField(null=True)
    added_by = models.CharField(max_length=64, default="system")
    created_at = models.DateTimeField(db_default=Now())
    retired_at = models.DateTimeField(null=True)

    tenancy_reason = "the catalogue is the same for all tenants"
    app_access = "read"

    def __str__(self) -> str:
        return self.display_name

    @property
    def served_name(self) -> str:
        """The engine's name for the model; customers never see or send it."""
        return f"b-{self.pk.removeprefix('bm_')}"

    @property
    def media(self) -> tuple[str, ...]:
        """The inputs beside text that its config declares: "image", "audio"."""
        return tuple(kind for kind, key in _MEDIA_CONFIGS.items() if self.config.get(key))

    @property
    def demands_acceptance(self) -> bool:
        """Whether an organization must accept the licence before it trains on this model."""
        return self.is_gated or bool(self.licence and not _PERMISSIVE.match(self.licence))

    @property
    def licence_url(self) -> str:
        """The address where the licence can be read."""
        return f"https://huggingface.co/{self.repo}" if self.repo else self.source_url


class HubToken(models.Model):
    """The token of a gated model's repository. In a separate table, because web and gateway may read only the model."""

    base_model = models.OneToOneField(BaseModel, on_delete=models.CASCADE, primary_key=True, related_name="hub_token")
    token_sealed = models.BinaryField()

    tenancy_reason = "the catalogue is the same for all tenants"
    app_access = "none"


class HubLookup(models.Model):
    """The hub's description of a repository. An operator requests it, and then decides whether to install the model."""

    id = IdField(prefix="hub")
    repo = models.CharField(max_length=200)
    revision = models.CharField(max_length=64, blank=True, help_text="Empty: the newest one.")
    token_sealed = models.BinaryField(null=True)
    requested_by = models.CharField(max_length=64)
    requested_at = models.DateTimeField(db_default=Now())
    answered_at = models.DateTimeField(null=True)
    repository = models.JSONField(null=True, help_text="apps.catalog.hub.HubRepository; null if the hub refused it.")
    model = models.JSONField(null=True, help_text="Name, config.json, parameters; null if it cannot be used.")
    refusal = models.CharField(max_length=500, blank=True, help_text="Why it cannot be installed.")
    base_model = models.ForeignKey(BaseModel, on_delete=models.SET_NULL, null=True, related_name="+")

    tenancy_reason = "the catalogue is the same for all tenants"
    app_access = "none"


class LicenceAcceptance(OrganizationModel):
    """An organization's acceptance of a base model's licence, as it was named then."""

    id = IdField(prefix="lic")
    base_model = models.ForeignKey(BaseModel, on_delete=models.PROTECT, related_name="+")
    licence = models.CharField(max_length=80, blank=True)
    accepted_by = models.CharField(max_length=64)
    accepted_at = models.DateTimeField()

    is_append_only = True

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["organization", "base_model", "licence"], name="licence_accepted_once")
        ]
        triggers = [
            pgtrigger.Protect(name="licence_append_only", operation=pgtrigger.Update | pgtrigger.Delete),
        ]


class GpuType(models.Model):
    """A GPU with its datasheet figures and their source."""

    key = models.SlugField(max_length=40, primary_key=True)
    name = models.CharField(max_length=80)
    memory_bytes = models.BigIntegerField(help_text="Usable, as the driver reports it.")
    specification = models.JSONField(default=dict)
    source_url = models.URLField(max_length=400, blank=True)

    tenancy_reason = "the catalogue is the same for all tenants"
    app_access = "read"

    def __str__(self) -> str:
        return self.name


_NO_OVERLAP = """
    IF EXISTS (
        SELECT 1 FROM catalog_pricerule other
         WHERE other.id <> NEW.id AND other.sku = NEW.sku
           AND other.organization_id IS NOT DISTINCT FROM NEW.organization_id
           AND other.effective_from < coalesce(NEW.effective_to, 'infinity')
           AND NEW.effective_from < coalesce(other.effective_to, 'infinity')
    ) THEN
        RAISE EXCEPTION 'two prices of % at one time', NEW.sku USING ERRCODE = '23P01';
    END IF;
    RETURN NEW;
"""


class PriceRule(models.Model):
    """The price of one SKU from one moment to the next, for all customers or one.

    Rules are never edited: a new price closes the old rule, and every charge keeps its rule.
    """

    id = IdField(prefix="price")
    sku = models.CharField(
        max_length=120,
        help_text="training:<pool>, inference:input:<model>, inference:output:<model>, both also with :batch, "
        "warm:<model>, storage:bytes, conversion:bytes",
    )
    organization = models.ForeignKey(
        "accounts.Organization", on_delete=models.PROTECT, null=True, related_name="+", help_text="Null: everybody."
    )
    unit = models.CharField(
        max_length=16,
        choices=[
            ("gpu_ms", "GPU milliseconds"),
            ("tokens", "tokens"),
            ("warm_ms", "milliseconds kept warm"),
            ("byte_hours", "byte-hours"),
            ("bytes", "bytes"),
        ],
    )
    price_nano = models.BigIntegerField()
    per = models.BigIntegerField(help_text="Units that price buys, e.g. 3600000 GPU milliseconds.")
    tiers = models.JSONField(
        default=list,
        help_text="[{from_units, price_nano}], ascending: what units beyond so many a calendar month cost instead.",
    )
    effective_from = models.DateTimeField(db_default=Now())
    effective_to = models.DateTimeField(null=True)
    created_by = models.CharField(max_length=64)
    approved_by = models.CharField(max_length=64, null=True, help_text="The second operator of a gift.")

    tenant_condition = f"organization_id IS NULL OR {OWN_ORGANIZATION}"
    app_access = "read"

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["sku", "organization"],
                condition=Q(effective_to=None),
                name="price_one_active",
                nulls_distinct=False,
            ),
            models.CheckConstraint(condition=Q(price_nano__gte=0, per__gt=0), name="price_positive"),
            models.CheckConstraint(
                condition=Q(organization=None) | Q(approved_by__isnull=False) & ~Q(approved_by=F("created_by")),
                name="price_own_by_two",
            ),
            models.CheckConstraint(
                condition=Q(effective_to=None) | Q(effective_to__gt=F("effective_from")), name="price_period"
            ),
        ]
        triggers = [
            pgtrigger.Protect(name="price_no_delete", operation=pgtrigger.Delete),
            # New rules only: one that was set before may still be closed.
            pgtrigger.Protect(
                name="price_free_by_two",
                operation=pgtrigger.Insert,
                condition=pgtrigger.Q(new__price_nano=0, new__organization__isnull=True)
                & (
                    pgtrigger.Q(new__approved_by__isnull=True)
                    | pgtrigger.Q(new__approved_by=pgtrigger.F("new__created_by"))
                ),
            ),
            pgtrigger.ReadOnly(
                name="price_frozen",
                fields=[
                    "sku",
                    "organization",
                    "unit",
                    "price_nano",
                    "per",
                    "tiers",
                    "effective_from",
                    "created_by",
                    "approved_by",
                ],
            ),
            pgtrigger.Trigger(
                name="price_no_overlap",
                when=pgtrigger.Before,
                operation=pgtrigger.Insert | pgtrigger.UpdateOf("effective_to"),
                func=_NO_OVERLAP,
            ),
        ]


class PriceRequest(models.Model):
    """A price that one operator requested and another must decide: for one customer, or a gift to everybody."""

    id = IdField(prefix="priceask")
    organization = models.ForeignKey(
        "accounts.Organization", on_delete=models.PROTECT, null=True, related_name="+", help_text="Null: everybody."
    )
    sku = models.CharField(max_length=120)
    price_nano = models.BigIntegerField()
    per = models.BigIntegerField()
    tiers = models.JSONField(default=list)
    effective_from = models.DateTimeField(null=True, help_text="Null, or past when it is approved: at once.")
    requested_by = models.CharField(max_length=64)
    requested_at = models.DateTimeField(db_default=Now())
    decided_by = models.CharField(max_length=64, null=True)
    decided_at = models.DateTimeField(null=True)
    rule = models.OneToOneField(PriceRule, on_delete=models.PROTECT, null=True, help_text="Null: open, or rejected.")

    tenant_condition = OWN_ORGANIZATION

    class Meta:
        triggers = [
            pgtrigger.Protect(name="price_request_no_delete", operation=pgtrigger.Delete),
            pgtrigger.ReadOnly(
                name="price_request_frozen",
                fields=["organization", "sku", "price_nano", "per", "tiers", "effective_from", "requested_by"],
            ),
        ]
