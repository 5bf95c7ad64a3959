"""A second opinion: the calls of the gateway that localstripe has too, asked of it. It is not ours, so it shares none
of our misreadings; it also lacks much (no prices, pages, portal, meters, balance transactions), and ignores our keys.

It is GPL and runs as a process of its own on loopback (it would bind every interface); nothing of it is imported.
"""

import os
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import stripe

from apps.core.ids import new_id
from apps.payments.stripe import gateway
from apps.payments.stripe.client import translated
from apps.payments.stripe.errors import CardDeclined, StripeRefused
from tests.services.ports import free_port, has_ipv6
from tests.support.waiting import wait_until
from tests.twins.http_server import Answer, Request, serve_http

pytestmark = pytest.mark.django_db
FOLDER = Path(__file__).resolve().parents[3] / ".anneal/localstripe"
LAUNCH = """
import runpy, socket
bind = socket.socket.bind
socket.socket.bind = lambda self, address: bind(self, ("::1", address[1]))
runpy.run_module("localstripe.server", run_name="__main__")
"""
SECRET = "whsec_localstripe"
VISA, DECLINED, ASKS_ITS_OWNER = "4242424242424242", "4000000000000341", "4000002760003184"


@pytest.fixture(scope="module")
def base_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if not FOLDER.exists():
        pytest.skip("localstripe is not installed: make setup-dev does it")
    if not has_ipv6():
        pytest.skip("this machine has no IPv6")
    port = free_port("::1")
    log = tmp_path_factory.mktemp("localstripe") / "log"
    environ = os.environ | {"PYTHONPATH": str(FOLDER)}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", LAUNCH, "--port", str(port), "--from-scratch"], env=environ, stdout=output,
            stderr=output, cwd=log.parent,
        )  # fmt: skip
    try:
        deadline = time.monotonic() + 60
        while not is_listening(port):
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        yield f"http://[::1]:{port}"
    finally:
        process.terminate()
        process.wait()


def is_listening(port: int) -> bool:
    with socket.socket(socket.AF_INET6) as probe:
        return probe.connect_ex(("::1", port)) == 0


@pytest.fixture
def client(base_url: str, settings: Any) -> stripe.StripeClient:
    settings.STRIPE_SECRET_KEY, settings.STRIPE_WEBHOOK_SECRET = "sk_test_local", SECRET
    settings.STRIPE_API_BASE = base_url
    return stripe.StripeClient("sk_test_local", base_addresses={"api": base_url})


def make_customer() -> str:
    return gateway.create_customer(organization_id=new_id("org"), name="Acme", email="acme@example.com")


def attach(client: stripe.StripeClient, customer: str, number: str) -> str:
    card: Any = {"number": number, "exp_month": 4, "exp_year": 2030, "cvc": "123"}
    made = client.v1.payment_methods.create({"type": "card", "card": card})
    return client.v1.payment_methods.attach(made.id, {"customer": customer}).id


def pay(client: stripe.StripeClient, customer: str, method: str, cents: int) -> stripe.PaymentIntent:
    return client.v1.payment_intents.create(
        {"customer": customer, "payment_method": method, "amount": cents, "currency": "usd", "confirm": True,
         "off_session": True}
    )  # fmt: skip


@pytest.mark.slow
def test_a_customer_and_the_card_that_is_charged(client: stripe.StripeClient) -> None:
    customer = make_customer()
    assert gateway.get_card(customer_id=customer) is None

    gateway.use_card(customer_id=customer, payment_method_id=attach(client, customer, VISA), key=new_id("key"))

    card = gateway.get_card(customer_id=customer)
    assert card is not None
    assert (card.brand, card.last4, card.exp_month, card.exp_year) == ("visa", "4242", 4, 2030)


def test_a_card_that_is_not_there_is_refused(client: stripe.StripeClient) -> None:
    with pytest.raises(StripeRefused):
        gateway.use_card(customer_id=make_customer(), payment_method_id="pm_nobody", key=new_id("key"))


def test_a_declined_charge_is_a_decline_with_its_reason(client: stripe.StripeClient) -> None:
    customer = make_customer()
    method = attach(client, customer, DECLINED)

    with pytest.raises(CardDeclined) as declined, translated():
        pay(client, customer, method, 1300)

    assert declined.value.reason == "card_declined"


def test_a_charge_that_its_owner_must_confirm_waits(client: stripe.StripeClient) -> None:
    customer = make_customer()

    assert pay(client, customer, attach(client, customer, ASKS_ITS_OWNER), 1300).status == "requires_action"


def test_a_refund_made_there_is_read_here(client: stripe.StripeClient) -> None:
    customer = make_customer()
    paid = pay(client, customer, attach(client, customer, VISA), 1300)
    made = client.v1.refunds.create({"payment_intent": paid.id, "amount": 300, "metadata": {"refund_id": "refund_1"}})

    found = gateway.get_refund(refund_id=made.id)

    assert (found.status, found.amount_cents, found.currency) == ("succeeded", 300, "usd")
    assert (found.payment_intent_id, dict(found.metadata)) == (paid.id, {"refund_id": "refund_1"})


def test_a_parameter_that_does_not_exist_is_refused(client: stripe.StripeClient) -> None:
    with pytest.raises(StripeRefused), translated():
        client.v1.customers.create({"nmae": "Acme"})  # type: ignore[typeddict-unknown-key]


def test_its_webhooks_pass_our_receiver(client: stripe.StripeClient, base_url: str) -> None:
    with inbox() as (url, received):
        configured = urllib.parse.urlencode({"url": url, "secret": SECRET}).encode()
        with urllib.request.urlopen(f"{base_url}/_config/webhooks/ours", configured):
            pass
        customer = make_customer()
        pay(client, customer, attach(client, customer, VISA), 1300)
        wait_until(lambda: any(b"payment_intent.succeeded" in body for body, _ in received))

    notices = [gateway.read_webhook(body=body, signature=signature) for body, signature in received]

    assert "payment_intent.succeeded" in {notice.type for notice in notices}


@contextmanager
def inbox() -> Iterator[tuple[str, list[tuple[bytes, str]]]]:
    """Receive webhooks on loopback; yields the address and the list of bodies with their signatures."""
    received: list[tuple[bytes, str]] = []

    def answer(request: Request) -> Answer:
        received.append((request.body, request.headers["Stripe-Signature"]))
        return Answer()

    with serve_http(answer) as url:
        yield f"{url}/", received
