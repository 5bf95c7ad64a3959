"""Entry points for Celery and the outbox into the catalogue."""

from typing import Any

from celery import shared_task

from apps.catalog.models import BaseModel
from apps.catalog.operations import install_from_hub


def request_install(*, key: str, payload: dict[str, Any]) -> None:
    """Start the installation; outbox handler of `base_model.install`."""
    install.delay(payload["base_model_id"])


@shared_task(name="catalog.install", ignore_result=True)
def install(base_model_id: str) -> None:
    """Read a listed model's files from the hub. Safe to repeat."""
    install_from_hub(base_model=BaseModel.objects.get(pk=base_model_id))
