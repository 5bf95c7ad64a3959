"""Celery and outbox tasks of the catalogue."""

from celery import shared_task

from apps.catalog import hub_lookups
from apps.catalog.models import BaseModel, HubLookup
from apps.catalog.operations import install_from_hub
from apps.core.database.clock import db_now


def install(*, base_model_id: str) -> None:
    """Read a listed model's files from the hub. Safe to repeat."""
    install_from_hub(base_model=BaseModel.objects.get(pk=base_model_id))


def look_up(*, lookup_id: str) -> None:
    """Read the hub's description of a repository. Safe to repeat."""
    if lookup := HubLookup.objects.filter(pk=lookup_id).first():
        hub_lookups.look_up(lookup=lookup, now=db_now())


@shared_task(name="catalog.check_revisions", ignore_result=True)
def check_revisions(**_: object) -> None:
    """Look for newer commits of installed models."""
    hub_lookups.check_revisions(now=db_now())
