"""The client of the stripe package: its settings, idempotency keys, and its errors as ours."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import stripe
from django.conf import settings
from django.db import connection
from django.utils.translation import gettext

from apps.payments.stripe.errors import CardDeclined, StripeRefused, StripeUnavailable

stripe.enable_telemetry = False  # it would write a file into the home directory

API_VERSION = "2026-10-28.endive"  # the package's own; a test compares them, so neither changes alone
_TIMEOUT_SECONDS = (3, 15)  # to connect, to answer; the package's default of 80 would block a worker that long
_RETRIES = 2


class InsideTransaction(Exception):
    """A call to Stripe would have kept a database transaction and its locks waiting for the network."""


def services() -> stripe.V1Services:
    """Return Stripe's services. Raises InsideTransaction."""
    # A test case's outer transaction does not count; Django marks it for `durable` too.
    if not all(getattr(block, "_from_testcase", False) for block in connection.atomic_blocks):
        raise InsideTransaction
    return _client_for(settings.STRIPE_SECRET_KEY, settings.STRIPE_API_BASE).v1


@cache
def _client_for(secret_key: str, api_base: str) -> stripe.StripeClient:
    """Return the one client, with its connection pool, of this process."""
    return stripe.StripeClient(
        secret_key,
        stripe_version=API_VERSION,
        max_network_retries=_RETRIES,
        http_client=stripe.RequestsClient(timeout=_TIMEOUT_SECONDS),
        base_addresses={"api": api_base} if api_base else {},
    )


@contextmanager
def translated() -> Iterator[None]:
    """Raise the package's errors as CardDeclined, StripeUnavailable or StripeRefused."""
    try:
        yield
    except stripe.CardError as error:
        reason = getattr(error.error, "decline_code", None) or error.code or "card_declined"
        raise CardDeclined(error.user_message or gettext("The card was declined."), reason=reason) from error
    except (stripe.RateLimitError, stripe.APIConnectionError) as error:
        raise StripeUnavailable(gettext("Stripe is not answering at the moment.")) from error
    except stripe.StripeError as error:
        if error.http_status is None or error.http_status >= 500 or error.http_status in (409, 429):
            raise StripeUnavailable(gettext("Stripe is not answering at the moment.")) from error
        text = gettext("Stripe refused the request: %(code)s.") % {"code": error.code}
        raise StripeRefused(error.user_message or text) from error


def keyed(key: str) -> stripe.RequestOptions:
    """Return the options of a call that happens once under this key."""
    return {"idempotency_key": key}
