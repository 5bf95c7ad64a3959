"""What a stranger or a hostile tenant may cost the others: refused late, and read no further than needed."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from apps.accounts.login.api_keys import LIVE_PREFIX, new_secret
from apps.core.http.fair_shares import LateRefusals
from tests.factories.serving import BASE_MODEL
from tests.support.gateway.processes import HI

pytestmark = pytest.mark.django_db

PATH = "/v1/chat/completions"


def test_wrong_keys_of_one_address_are_refused_late_and_those_of_others_are_not(gateway, world):
    http = gateway.http()

    def seconds_to_refuse(address: str) -> float:
        headers = {"authorization": f"Bearer {new_secret(LIVE_PREFIX)}", "x-forwarded-for": address}
        began = time.monotonic()
        answer = http.post(PATH, json={"model": BASE_MODEL, "messages": HI}, headers=headers)
        assert answer.status_code in (401, 429)
        return time.monotonic() - began

    with ThreadPoolExecutor(8) as lanes:
        took = list(lanes.map(seconds_to_refuse, ["192.0.2.1"] * (LateRefusals.PROMPT_PER_MINUTE + 8)))

    assert max(took) >= LateRefusals.HOLD_SECONDS
    assert seconds_to_refuse("192.0.2.2") < LateRefusals.HOLD_SECONDS
