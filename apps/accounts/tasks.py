"""Celery tasks of the accounts; each makes one call."""

from celery import shared_task

from apps.accounts.login.browser_tokens import sweep_expired_tokens
from apps.accounts.login.sessions import sweep_sessions
from apps.accounts.notices.notifications import prune
from apps.core.database.clock import db_now


@shared_task(name="accounts.sweep_expired_tokens", ignore_result=True)
def sweep_tokens(**_: object) -> None:
    sweep_expired_tokens(now=db_now())
    sweep_sessions(now=db_now())


@shared_task(name="accounts.prune_notifications", ignore_result=True)
def prune_notices(**_: object) -> None:
    prune(now=db_now())
