"""Celery's way into the domain: each task makes one call."""

from typing import Any

from celery import shared_task

from apps.billing import slices, usage


@shared_task(name="billing.rate_usage")
def rate_usage(**_: Any) -> None:
    usage.rate_usage()


@shared_task(name="billing.close_expired_holds")
def close_expired_holds(**_: Any) -> None:
    slices.close_expired_holds()
