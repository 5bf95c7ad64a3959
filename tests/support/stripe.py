"""Fixtures of a Stripe for tests: the twin over HTTP, the twin without a socket, or Stripe's own test mode."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
import stripe

from apps.payments.stripe import client as client_module
from tests.twins.stripe.server import InProcess, serve
from tests.twins.stripe.twin import WEBHOOK_SECRET, Twin


@pytest.fixture
def twin() -> Twin:
    return Twin()


@pytest.fixture
def served_twin(twin: Twin, settings: Any) -> Iterator[Twin]:
    """The twin over HTTP on loopback."""
    with serve(twin) as url:
        settings.STRIPE_SECRET_KEY, settings.STRIPE_WEBHOOK_SECRET = "sk_test_twin", WEBHOOK_SECRET
        settings.STRIPE_API_BASE = url
        yield twin


@pytest.fixture
def near_twin(twin: Twin, settings: Any, monkeypatch: Any) -> Twin:
    """The twin without a socket, for tests that make thousands of calls."""
    settings.STRIPE_SECRET_KEY, settings.STRIPE_WEBHOOK_SECRET = "sk_test_twin", WEBHOOK_SECRET
    settings.STRIPE_TAX = True  # of nothing, unless a test sets `tax_percent`
    client = stripe.StripeClient("sk_test_twin", http_client=InProcess(twin), max_network_retries=2)
    monkeypatch.setattr(client_module, "_client_for", lambda *_: client)
    monkeypatch.setattr(InProcess, "_sleep_time_seconds", lambda *_: 0.0)
    return twin


@pytest.fixture(params=["twin", "stripe"])
def any_stripe(request: pytest.FixtureRequest, settings: Any) -> Iterator[stripe.StripeClient]:
    """The twin, and Stripe itself where STRIPE_TEST_KEY is set; yields a client for what people do there."""
    if request.param == "twin":
        request.getfixturevalue("served_twin")
    else:
        settings.STRIPE_SECRET_KEY = os.environ.get("STRIPE_TEST_KEY", "")
        settings.STRIPE_WEBHOOK_SECRET, settings.STRIPE_API_BASE = "whsec_unused", ""
        if not settings.STRIPE_SECRET_KEY.startswith("sk_test_"):
            pytest.skip("STRIPE_TEST_KEY is not set: Stripe's own test mode is not asked")
    yield stripe.StripeClient(
        settings.STRIPE_SECRET_KEY,
        base_addresses={"api": settings.STRIPE_API_BASE} if settings.STRIPE_API_BASE else {},
    )
