"""Celery's and the outbox's way into the catalogue."""

from typing import Any

from celery import shared_task

from apps.catalog.models import BaseModel
from apps.catalog.operations import install_from_hub


def request_install(*, key: str, payload: dict[str, Any]) -> None:
    """Outbox handler of `base_model.install`."""
    install.delay(payload["base_model_id"])


@shared_task(name="catalog.install", ignore_result=True)
def install(base_model_id: str) -> None:
    """Read a listed model's files from the hub; harmless when repeated."""
    install_from_hub(base_model=BaseModel.objects.get(pk=base_model_id))
