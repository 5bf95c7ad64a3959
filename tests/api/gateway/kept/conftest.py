"""The workers of batches ask this gateway."""

import pytest


@pytest.fixture(autouse=True)
def _gateway_of_the_worker(gateway, settings):
    settings.GATEWAY_URL = f"unix://{gateway.socket}"
