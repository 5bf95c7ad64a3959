"""A rater killed at any moment under load charges everything once: each charge is one transaction, or none."""

import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import pytest
from django.db import connection

from apps.billing.models import LedgerTransaction, UsageSeries
from apps.billing.queries import get_balance, get_spending
from apps.billing.usage.metering import rate_usage, record_usage
from apps.billing.usage.slices import close_slice, lease_slice
from apps.catalog.operations import set_price
from apps.core.database.clock import db_now
from apps.core.money import rated
from tests.support.waiting import wait_until
from tests.unit.billing.books import assert_books_hold, funded, usage_record

ROOT = Path(__file__).resolve().parents[3]
USD = 1_000_000_000
LANES, PRICE_NANO, PER = 3, 333_333, 1000


def start_rater() -> subprocess.Popen[bytes]:
    parts = urlsplit(os.environ["DATABASE_URL"])
    environ = os.environ | {
        "DATABASE_URL": urlunsplit(parts._replace(path=f"/{connection.settings_dict['NAME']}")),
        "DJANGO_SETTINGS_MODULE": "apps.config.settings.dev",
    }
    return subprocess.Popen([sys.executable, "-m", "tests.integration.billing.rater"], cwd=ROOT, env=environ)


def wait_for_the_killed() -> None:
    """A server process learns that its client is dead when its statement ends, and holds its locks until then."""
    others = "datname = current_database() AND pid <> pg_backend_pid() AND state <> 'idle'"

    def have_ended() -> bool:
        cursor.execute(f"SELECT count(*) FROM pg_stat_activity WHERE {others}")
        return cursor.fetchone() == (0,)

    with connection.cursor() as cursor:
        wait_until(have_ended, "a killed rater's statement does not end")


@pytest.mark.slow
@pytest.mark.parametrize("kills", [2, pytest.param(40, marks=pytest.mark.chaos)])
def test_kill_9_of_the_rater_under_load_loses_and_doubles_nothing(transactional_db: None, kills: int) -> None:
    organization = funded(1000 * USD)
    price = set_price(sku="inference:input:m", unit="tokens", price_nano=PRICE_NANO, per=PER, by="u", now=db_now())
    tokens, is_over = [0] * LANES, threading.Event()

    def lane(number: int) -> None:
        chance = random.Random(number)
        leased = lease_slice(organization=organization, required_nano=USD, by=f"gateway:{number}").hold_id
        for turn in range(10**6):
            if is_over.is_set():
                break
            count = chance.randrange(5000)
            record_usage(records=[usage_record(organization, price.pk, count, leased, f"use_{number}_{turn}")])
            tokens[number] += count
        close_slice(hold_id=leased, by=f"gateway:{number}")
        connection.close()

    lanes = [threading.Thread(target=lane, args=(number,)) for number in range(LANES)]
    for each in lanes:
        each.start()
    chance, alive = random.Random(7), 0
    for _ in range(kills):
        charged = LedgerTransaction.objects.filter(kind="usage").count()
        rater = start_rater()
        deadline = time.monotonic() + 60
        while LedgerTransaction.objects.filter(kind="usage").count() == charged and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(chance.uniform(0, 0.3))
        alive += rater.poll() is None
        rater.kill()
        rater.wait()
    is_over.set()
    for each in lanes:
        each.join()
    wait_for_the_killed()
    rate_usage()

    due = rated(quantity=sum(tokens), price_nano=PRICE_NANO, per=PER)
    assert alive == kills
    assert sum(UsageSeries.objects.values_list("quantity", flat=True)) == sum(tokens)
    assert get_spending(organization=organization).inference_nano == due
    balance = get_balance(organization=organization)
    assert (balance.available_nano, balance.held_nano) == (1000 * USD - due, 0)
    assert_books_hold()
