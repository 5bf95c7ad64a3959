"""Fixtures of a Stripe."""

from tests.support.stripe import any_stripe, near_twin, served_twin, twin  # noqa: F401 - fixtures
