"""Work for many organizations, each in a separate transaction: one failure does not hold up the others."""

import datetime
import logging
from collections.abc import Callable, Iterable
from typing import TypeVar

from celery.exceptions import SoftTimeLimitExceeded

from apps.billing.models import LedgerCheck

logger = logging.getLogger(__name__)

_SAID_AGAIN_AFTER = datetime.timedelta(hours=1)
_KEPT = 20
Row = TypeVar("Row")


def for_each(rows: Iterable[Row], work: Callable[[Row], int], *, name: str, now: datetime.datetime) -> int:
    """Call `work` for each row and return the sum of its results.

    A row is the organization's id, a tuple that starts with it, or an object with that key. A failure is logged as
    critical and listed under the ledger checks as `name` until a run has none. The next run repeats it, so `work` must
    be one transaction, or several of which each is whole.
    """
    total = 0
    failed: list[list[str]] = []
    for row in list(rows):
        try:
            total += work(row)
        except SoftTimeLimitExceeded:  # the task must end; the next run repeats the rest
            raise
        except Exception as error:
            of = str(row[0] if isinstance(row, tuple) else getattr(row, "pk", row))
            logger.critical("%s: %s failed and is tried again: %s", name, of, error, exc_info=True)
            failed.append([of, type(error).__name__, str(error)[:200]])
    _record(name, failed, now)
    return total


def _record(name: str, failed: list[list[str]], now: datetime.datetime) -> None:
    """Record the failures for operators when they changed, and once an hour while they last."""
    newest = LedgerCheck.objects.filter(name=name).order_by("-checked_at", "-id").first()
    before = newest.differences if newest else []
    is_said = newest is not None and newest.checked_at > now - _SAID_AGAIN_AFTER
    if failed[:_KEPT] == before and (is_said or not failed):
        return
    LedgerCheck.objects.create(name=name, difference_count=len(failed), differences=failed[:_KEPT])
