"""Celery tasks of billing: each makes one call into the domain."""

import datetime
import logging

from celery import shared_task

from apps.billing import credits
from apps.billing.books import low_balance, reconciliation, seals
from apps.billing.invoices import mail, statements
from apps.billing.usage import metering, slices, storage, traffic
from apps.core.database.clock import db_now

logger = logging.getLogger(__name__)
_VERIFIED = datetime.timedelta(days=35)  # older days are not hashed again, only their links are checked


@shared_task(name="billing.rate_usage")
def rate_usage(**_: object) -> None:
    metering.rate_usage()


@shared_task(name="billing.prune_traffic")
def prune_traffic(**_: object) -> None:
    traffic.prune_traffic(now=db_now())


@shared_task(name="billing.close_expired_holds")
def close_expired_holds(**_: object) -> None:
    slices.close_expired_holds()


@shared_task(name="billing.post_rebates")
def post_rebates(**_: object) -> None:
    storage.post_rebates(now=db_now())


@shared_task(name="billing.mail_reports")
def mail_reports(**_: object) -> None:
    mail.publish_reports(now=db_now())


@shared_task(name="billing.warn_low_balances")
def warn_low_balances(**_: object) -> None:
    low_balance.warn_low_balances(now=db_now())


@shared_task(name="billing.close_months")
def close_months(**_: object) -> None:
    statements.close_months(now=db_now())


@shared_task(name="billing.reconcile")
def reconcile(**_: object) -> None:
    reconciliation.reconcile(now=db_now())


@shared_task(name="billing.expire_lots")
def expire_lots(**_: object) -> None:
    credits.expire_lots()


@shared_task(name="billing.seal_ledger")
def seal_ledger(**_: object) -> None:
    """Seal the finished days. When a day was sealed, verify the recent seals."""
    now = db_now()
    if seals.seal_days(now=now):
        for broken in seals.verify_seals(since=now.date() - _VERIFIED):
            logger.critical("the ledger of %s is not what was sealed: %s", broken.day, broken)
