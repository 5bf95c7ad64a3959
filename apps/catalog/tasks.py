"""Outbox tasks of the catalogue."""

from apps.catalog.models import BaseModel
from apps.catalog.operations import install_from_hub


def install(*, base_model_id: str) -> None:
    """Read a listed model's files from the hub. Safe to repeat."""
    install_from_hub(base_model=BaseModel.objects.get(pk=base_model_id))
