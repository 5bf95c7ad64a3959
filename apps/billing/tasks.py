"""Celery's way into the domain: each task makes one call."""

import logging
from typing import Any

from celery import shared_task

from apps.billing import credits, seals, slices, usage
from apps.core.clock import db_now

logger = logging.getLogger(__name__)


@shared_task(name="billing.rate_usage")
def rate_usage(**_: Any) -> None:
    usage.rate_usage()


@shared_task(name="billing.close_expired_holds")
def close_expired_holds(**_: Any) -> None:
    slices.close_expired_holds()


@shared_task(name="billing.expire_lots")
def expire_lots(**_: Any) -> None:
    credits.expire_lots()


@shared_task(name="billing.seal_ledger")
def seal_ledger(**_: Any) -> None:
    """Seal the days that are over; once a day is sealed, look whether all of them still hold."""
    if seals.seal_days(now=db_now()):
        for broken in seals.verify_seals():
            logger.critical("the ledger of %s is not what was sealed: %s", broken.day, broken)
