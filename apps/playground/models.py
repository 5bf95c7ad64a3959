"""Conversations and presets of the playground. Only the web process may read them."""

from django.db import models
from django.db.models.functions import Now

from apps.core.database.structs import StructField
from apps.core.database.tenancy import OrganizationModel
from apps.core.ids import IdField
from apps.playground.transcripts import PlaySettings, Transcript


class SavedConversation(OrganizationModel):
    """A conversation that only its member sees. It ends with the membership."""

    id = IdField(prefix="conv")
    membership = models.ForeignKey("accounts.Membership", on_delete=models.CASCADE, related_name="+")
    title = models.CharField(max_length=80)
    transcript: "models.Field[Transcript, Transcript]" = StructField(Transcript)
    updated_at = models.DateTimeField(db_default=Now())

    class Meta:
        indexes = [models.Index(fields=["membership", "-updated_at", "-id"], name="conversation_newest")]


class Preset(OrganizationModel):
    """Named settings of the playground."""

    id = IdField(prefix="preset")
    membership = models.ForeignKey(
        "accounts.Membership",
        on_delete=models.CASCADE,
        null=True,
        related_name="+",
        help_text="Whose it is; null: shared with the organization.",
    )
    name = models.CharField(max_length=60)
    settings: "models.Field[PlaySettings, PlaySettings]" = StructField(PlaySettings)
    created_by = models.CharField(max_length=64)
    updated_at = models.DateTimeField(db_default=Now())

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["organization", "membership", "name"], name="preset_name_once", nulls_distinct=False
            )
        ]
