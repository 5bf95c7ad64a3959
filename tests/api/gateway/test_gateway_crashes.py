"""A gateway killed at any moment loses no request it answered, counts none twice and leaves no money behind."""

import asyncio
import random
import shutil
import signal
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import psycopg
import pytest
from django.db import connection

from apps.billing.models import Hold, TrafficHour, UsageConflict, UsageEvent, UsageSeries
from apps.billing.queries import get_balance, get_ledger_sum_nano, get_spending
from apps.billing.usage.metering import rate_usage
from apps.catalog.models import BaseModel
from apps.core.money import rated
from apps.interfaces.gateway.database import Database
from apps.interfaces.gateway.metering.shipper import recover_orphans
from tests.factories.serving import BASE_MODEL, INPUT_NANO, OUTPUT_NANO, PER, USD, Tenant, make_tenant
from tests.support.gateway.processes import GatewayProcess, running_gateway, usage_of, wait_for_usage, wait_until
from tests.twins.scripted_engine import Script

# A customer who connects to a gateway just killed is refused, and httpcore leaves the refused socket to be collected.
_REFUSED = pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
pytestmark = [pytest.mark.django_db, _REFUSED]
LANES = 6
KILLS = 2


@pytest.fixture(scope="module")
def spool(tmp_path_factory) -> Path:
    """Return the spool of these tests alone: the gateway of the other modules adopts nothing from it."""
    return tmp_path_factory.mktemp("crashes") / "spool"


@pytest.fixture(scope="module")
def victim(world, home, spool) -> Iterator[GatewayProcess]:
    with running_gateway(spool.parent, engines=home) as gateway:
        yield gateway


@pytest.fixture
def gateway(victim) -> GatewayProcess:
    """Return a running gateway; it starts again only if the test before ended it."""
    if not victim.is_running():
        victim.start()
    return victim


@pytest.fixture
def tenant(world) -> Tenant:
    return make_tenant("Northline", world.base_model)


class Load:
    """Customers who ask one question after the other, until their gateway is gone; remembers what was answered.

    A gateway whose recorder was killed says so in its last answers.
    """

    def __init__(self, gateway: GatewayProcess, tenant: Tenant) -> None:
        self.answered: list[str] = []
        self.is_over = False
        self._client = gateway.http(tenant.key)
        self._lanes = [threading.Thread(target=self._ask) for _ in range(LANES)]
        for lane in self._lanes:
            lane.start()

    def _ask(self) -> None:
        body = {"model": BASE_MODEL, "prompt": "crash", "max_tokens": 20}
        with suppress(httpx.TransportError):
            while not self.is_over:
                answer = self._client.post("/v1/completions", json=body)
                if answer.status_code == 503:
                    return
                assert answer.status_code == 200, answer.text
                self.answered.append(answer.json()["id"])

    def wait(self) -> None:
        for lane in self._lanes:
            lane.join()


def cost_of(tenant: Tenant) -> int:
    events = usage_of(tenant)
    return rated(quantity=sum(e.input_tokens for e in events), price_nano=INPUT_NANO, per=PER) + rated(
        quantity=sum(e.output_tokens for e in events), price_nano=OUTPUT_NANO, per=PER
    )


@pytest.mark.chaos
def test_answers_given_before_kill_9_are_charged_once_and_the_rest_costs_nothing(gateway, tenant, engine):
    engine.scripts["crash"] = Script(tokens=("x",) * 5, delay_seconds=0.002)
    answered: list[str] = []
    for _ in range(KILLS):
        load = Load(gateway, tenant)
        wait_until(lambda load=load: len(load.answered) > 40, "no answers")
        gateway.kill()
        load.wait()
        answered += load.answered
        gateway.start()

    wait_until(lambda: not [f for f in gateway.leftovers() if f.suffix == ".seg"], "the spool was not shipped")
    wait_until(lambda: {i.replace("cmpl-", "use_") for i in answered} <= ids(tenant), "an answer was not recorded")

    events = usage_of(tenant)
    finished = [event for event in events if event.finish == "stop"]
    lost = [event for event in events if event.finish == "lost"]
    assert len(answered) == len(set(answered)) <= len(finished) <= len(answered) + KILLS * LANES
    assert len(events) == len(finished) + len(lost) + len([e for e in events if e.finish == "aborted"])
    assert {event.input_tokens + event.output_tokens for event in lost} <= {0}
    rate_usage()
    assert get_spending(organization=tenant.organization).inference_nano == cost_of(tenant)
    wait_until(
        lambda: not Hold.objects.filter(organization=tenant.organization, status="open").exists(),
        "a dead gateway's slice was kept",
        seconds=50,
    )
    balance = get_balance(organization=tenant.organization)
    assert (balance.available_nano, balance.held_nano) == (10 * USD - cost_of(tenant), 0)
    assert get_ledger_sum_nano() == 0
    assert not UsageConflict.objects.exists()


@pytest.mark.chaos
def test_kill_9_at_random_moments_loses_nothing_and_counts_nothing_twice(gateway, tenant, engine):
    """Two gateways, each answering, shipping and adopting what the other left; of either, the process that answers or
    the one that writes and ships is killed under load."""
    seed = random.randrange(2**32)
    chance = random.Random(seed)
    engine.scripts["crash"] = Script(tokens=("x",) * 5, delay_seconds=0.002)
    other = GatewayProcess(gateway.home, name="other", engines=gateway.engines)
    other.start()
    gateways, answered = (gateway, other), []
    try:
        for _ in range(30):
            loads = [Load(one, tenant) for one in gateways]
            time.sleep(chance.uniform(0.02, 1.5))
            victim = chance.randrange(2)
            chance.choice((gateways[victim].kill, gateways[victim].kill_recorder))()
            loads[1 - victim].is_over = True
            for load in loads:
                load.wait()
                answered += load.answered
            gateways[victim].start()
        asked = {i.replace("cmpl-", "use_") for i in answered}
        wait_until(lambda: asked <= ids(tenant), f"an answer was lost; seed {seed}", seconds=60)
        wait_until(lambda: not [f for f in gateway.leftovers() if f.suffix == ".seg"], "not shipped", seconds=60)
    finally:
        other.close_clients()
        other.kill()

    events = usage_of(tenant)
    assert len(answered) == len(set(answered)) > 0
    assert {e.input_tokens + e.output_tokens for e in events if e.finish == "lost"} <= {0}
    for price, used in (("input", "input_tokens"), ("output", "output_tokens")):
        series = UsageSeries.objects.filter(organization=tenant.organization, sku__startswith=f"inference:{price}:")
        summed = sum(line.quantity for line in series)
        assert summed == sum(getattr(event, used) for event in events), f"seed {seed}"
    assert not UsageConflict.objects.exists()


def ids(tenant: Tenant) -> set[str]:
    return set(UsageEvent.objects.filter(organization=tenant.organization).values_list("pk", flat=True))


@pytest.mark.slow
def test_a_request_in_progress_at_kill_9_is_counted_as_lost(gateway, tenant, engine):
    engine.scripts["slow"] = Script(tokens=("x",) * 200, delay_seconds=0.05)
    body = {"model": BASE_MODEL, "prompt": "slow", "stream": True}
    with gateway.http(tenant.key).stream("POST", "/v1/completions", json=body) as stream:
        lines = stream.iter_lines()  # kept: a dropped iterator closes the connection, which is an abort
        next(lines)
        owner = tenant.organization.pk.encode()
        wait_until(lambda: any(owner in found for found in gateway.leftovers().values()), "its beginning is unwritten")
        gateway.kill()

    gateway.start()

    (event,) = wait_for_usage(tenant, 1)
    assert (event.finish, event.input_tokens, event.output_tokens, event.input_price) == ("lost", 0, 0, None)


@pytest.mark.slow
def test_shipping_what_was_shipped_before_adds_nothing(gateway, tenant, engine, spool, tmp_path):
    engine.scripts["crash"] = Script(tokens=("x",) * 5, delay_seconds=0.002)
    load = Load(gateway, tenant)
    wait_until(lambda: len(load.answered) > 20, "no answers")
    gateway.kill()
    load.wait()
    kept = tmp_path / "kept"
    shutil.copytree(spool, kept)
    database = Database()

    asyncio.run(recover_orphans(database, spool))
    first = {event.pk: event.body_sha256 for event in usage_of(tenant)}
    asyncio.run(recover_orphans(database, kept))
    database.close()

    assert {event.pk: event.body_sha256 for event in usage_of(tenant)} == first
    assert {i.replace("cmpl-", "use_") for i in load.answered} <= set(first)
    assert list(spool.iterdir()) == list(kept.iterdir()) == []
    assert not UsageConflict.objects.exists()


@contextmanager
def database_away() -> Iterator[None]:
    """Cut only the gateway off its database, and no other process on this server."""
    name = connection.settings_dict["NAME"]
    host, port = connection.settings_dict["HOST"], connection.settings_dict["PORT"]
    with psycopg.connect(host=host, port=port, user="postgres", dbname="postgres", autocommit=True) as superuser:
        superuser.execute(f'REVOKE CONNECT ON DATABASE "{name}" FROM PUBLIC, anneal_gateway')
        superuser.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'anneal_gateway' AND datname = %s",
            [name],
        )
        try:
            yield
        finally:
            superuser.execute(f'GRANT CONNECT ON DATABASE "{name}" TO PUBLIC, anneal_gateway')


@pytest.mark.chaos
def test_known_customers_are_served_and_metered_while_the_database_is_away(gateway, tenant):
    body = {"model": BASE_MODEL, "prompt": "Hi", "max_tokens": 5}
    http = gateway.http(tenant.key)
    http.post("/v1/completions", json=body).raise_for_status()

    statuses = []

    def ask_while(is_so: Callable[[], bool]) -> None:
        while is_so():
            statuses.append(http.post("/v1/completions", json=body).status_code)
            time.sleep(0.1)

    with database_away():
        deadline = time.monotonic() + 6  # beyond what keys and routes are remembered for otherwise
        ask_while(lambda: time.monotonic() < deadline)
        stranger = gateway.http(make_tenant("Stranger", BaseModel.objects.get(name=BASE_MODEL)).key)
        refused = stranger.post("/v1/completions", json=body)

    def welcome() -> None:
        wait_until(lambda: stranger.post("/v1/completions", json=body).is_success, "strangers stay out", seconds=60)

    with ThreadPoolExecutor() as beside:
        welcomed = beside.submit(welcome)
        ask_while(lambda: not welcomed.done())
    welcomed.result()
    assert (refused.status_code, "retry-after" in refused.headers) == (503, True)
    assert set(statuses) == {200}
    wait_until(lambda: len(usage_of(tenant)) == len(statuses) + 1, "requests were lost", seconds=30)


@pytest.mark.slow
def test_refused_requests_are_counted_by_class_and_recorded_when_the_gateway_stops(gateway, tenant):
    http = gateway.http(tenant.key)
    body = {"model": BASE_MODEL, "prompt": "Hi", "max_tokens": 5}

    for change in ({}, {"model": "ft:tiny:nobody:x:1"}, {"model": "ft:tiny:nobody:y:1"}, {"nonsense": 1}):
        http.post("/v1/completions", json=body | change)
    http.post("/v1/embeddings", json={"model": BASE_MODEL, "input": "Hi"})
    gateway.terminate()
    gateway.wait()

    hours = list(TrafficHour.objects.filter(organization=tenant.organization))
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for hour in hours:  # two of a model, if the hour ended meanwhile
        counts = {name: getattr(hour, name) for name in ("requests", "not_found", "invalid")}
        found[hour.model_name].update(counts | {"answered": sum(hour.latency_counts)})
    assert found == {
        "": {"requests": 3, "not_found": 2, "invalid": 1, "answered": 0},
        BASE_MODEL: {"requests": 2, "not_found": 0, "invalid": 1, "answered": 1},
    }
    assert {hour.key_id for hour in hours} == {tenant.key.key.pk}


@pytest.mark.slow
def test_a_gateway_told_to_stop_finishes_its_streams_takes_no_new_ones_and_leaves_nothing_behind(
    gateway, tenant, engine, spool
):
    engine.scripts["long"] = Script(tokens=("x",) * 40, delay_seconds=0.05)
    body = {"model": BASE_MODEL, "prompt": "long", "max_tokens": 50, "stream": True}
    wait_until(lambda: len(list(spool.iterdir())) == 1, "what dead gateways left was not taken up")

    with gateway.http(tenant.key).stream("POST", "/v1/completions", json=body) as stream:
        lines = stream.iter_lines()
        next(lines)
        gateway.terminate()
        wait_until(lambda: not gateway.is_listening(), "new requests are taken")
        rest = [line for line in lines if line]
    ended = time.monotonic()

    assert rest[-1] == "data: [DONE]"
    assert gateway.wait() in (0, -signal.SIGTERM)
    assert time.monotonic() - ended < 30  # a stop that waits for a client would never end
    assert [(event.finish, event.output_tokens) for event in usage_of(tenant)] == [("stop", 40)]
    assert list(spool.iterdir()) == []
    assert not Hold.objects.filter(organization=tenant.organization, status="open").exists()
