"""What the twin does with customers, cards, payments, refunds and disputes; and what people do at Stripe."""

import datetime
from typing import Any

from apps.payments.stripe.objects import CardLeft
from tests.twins.stripe.twin import CARDS, DISPUTE_FEE_CENTS, Object, Refusal, Twin, answers


def is_true(value: Any) -> bool:
    return value == "true"


# --- Customers and cards ----------------------------------------------------------------------------------------------


@answers("POST /v1/customers")
def create_customer(twin: Twin, *, name: str = "", email: str = "", metadata: Any = None, **_: Any) -> Object:
    settings = {"default_payment_method": None}
    return twin.add(
        "cus", "customer", name=name, email=email, metadata=metadata or {}, invoice_settings=settings, deleted=False
    )


@answers("GET /v1/customers/{customer}")
def get_customer(twin: Twin, customer: str, **_: Any) -> Object:
    return twin.get(customer)


@answers("POST /v1/customers/{customer}")
def update_customer(twin: Twin, customer: str, *, invoice_settings: Any = None, **_: Any) -> Object:
    found = twin.get(customer)
    if invoice_settings:
        method = twin.get(invoice_settings["default_payment_method"])
        if method["customer"] != customer:
            raise Refusal(400, message="The customer does not have a payment method with this ID.")
        found["invoice_settings"]["default_payment_method"] = method["id"]
    twin.tell("customer.updated", found)
    return found


@answers("POST /v1/payment_methods/{payment_method}/attach")
def attach(twin: Twin, payment_method: str, *, customer: str = "", **_: Any) -> Object:
    return give_card(twin, customer, payment_method)


def give_card(twin: Twin, customer: str, card: str) -> Object:
    twin.get(customer)
    if card not in CARDS:
        raise Refusal(404, code="resource_missing", message=f"No such PaymentMethod: '{card}'")
    brand, last4, _ = CARDS[card]
    shown = {"brand": brand, "last4": last4, "exp_month": 12, "exp_year": 2030}
    return twin.add("pm", "payment_method", type="card", card=shown, customer=customer, test_card=card)


def left(method: Object) -> CardLeft:
    """Return what we read of a card that a customer entered."""
    at = datetime.datetime.fromtimestamp(method["created"], datetime.UTC)
    return CardLeft(payment_method_id=method["id"], left_at=at)


@answers("GET /v1/setup_intents/{intent}")
def get_setup_intent(twin: Twin, intent: str, **_: Any) -> Object:
    return twin.get(intent)


# --- Payments ---------------------------------------------------------------------------------------------------------


@answers("GET /v1/payment_intents/{intent}")
def get_payment_intent(twin: Twin, intent: str, **_: Any) -> Object:
    return twin.get(intent)


def make_payment(twin: Twin, customer: str, amount: int, metadata: Any) -> Object:
    return twin.add(
        "pi",
        "payment_intent",
        amount=amount,
        amount_received=0,
        currency="usd",
        customer=customer,
        metadata=dict(metadata or {}),
        status="requires_payment_method",
        payment_method=None,
        latest_charge=None,
        last_payment_error=None,
    )


def charge(twin: Twin, intent: Object, method: Object, *, off_session: bool) -> None:
    """Charge a card. Raises Refusal with Stripe's 402 when the bank says no."""
    reason = CARDS[method["test_card"]][2]
    if reason and (off_session or reason != "authentication_required"):
        needs_owner = reason == "authentication_required"
        error = {
            "type": "card_error",
            "code": reason if needs_owner else "card_declined",
            "decline_code": reason,
            "message": "Your card was declined.",
        }
        intent["last_payment_error"] = error
        twin.tell("payment_intent.payment_failed", intent)
        raise Refusal(402, **error)
    made = twin.add("ch", "charge", amount=intent["amount"], payment_intent=intent["id"], currency="usd")
    fee = intent["amount"] * 29 // 1000 + 30
    made["balance_transaction"] = twin.move_cash("charge", made["id"], intent["amount"], fee)["id"]
    intent |= {
        "status": "succeeded",
        "amount_received": intent["amount"],
        "payment_method": method["id"],
        "latest_charge": made["id"],
        "last_payment_error": None,
    }
    twin.tell("payment_intent.succeeded", intent)


# --- Hosted pages -----------------------------------------------------------------------------------------------------


@answers("POST /v1/checkout/sessions")
def create_checkout(twin: Twin, *, mode: str, customer: str, line_items: Any = (), **params: Any) -> Object:
    twin.get(customer)
    subtotal = sum(int(line["price_data"]["unit_amount"]) * int(line["quantity"]) for line in line_items)
    tax = tax_on(twin, subtotal, params.get("automatic_tax"))
    made = twin.add(
        "cs",
        "checkout.session",
        mode=mode,
        customer=customer,
        status="open",
        payment_status="unpaid" if mode == "payment" else "no_payment_required",
        client_reference_id=params.get("client_reference_id"),
        metadata=params.get("metadata") or {},
        amount_subtotal=subtotal or None,
        amount_total=subtotal + tax or None,
        total_details={"amount_tax": tax, "amount_discount": 0, "amount_shipping": 0},
        currency="usd",
        payment_intent=None,
        setup_intent=None,
        success_url=params.get("success_url"),
        intent_metadata=params.get("payment_intent_data", {}).get("metadata", {}),
    )
    made["url"] = f"https://checkout.stripe.com/c/pay/{made['id']}"
    return made


@answers("GET /v1/checkout/sessions/{session}")
def get_checkout(twin: Twin, session: str, **_: Any) -> Object:
    return twin.get(session)


def pay_checkout(twin: Twin, session: str, card: str = "pm_card_visa", *, is_paid_later: bool = False) -> Object:
    """Do as the person at the page does; with `is_paid_later` by bank transfer, settled by `settle_checkout`."""
    found = twin.get(session)
    assert found["status"] == "open", found["status"]
    method = give_card(twin, found["customer"], card)
    if found["mode"] == "setup":
        intent = twin.add("seti", "setup_intent", payment_method=method["id"], status="succeeded")
        found |= {"status": "complete", "setup_intent": intent["id"], "url": None}
        twin.tell("checkout.session.completed", found)
        return found
    payment = make_payment(twin, found["customer"], found["amount_total"], found["intent_metadata"])
    payment["payment_method"] = method["id"]
    found |= {"payment_intent": payment["id"]}
    if is_paid_later:
        payment["status"] = "processing"
    else:
        charge(twin, payment, method, off_session=False)
        found["payment_status"] = "paid"
    found |= {"status": "complete", "url": None}
    twin.tell("checkout.session.completed", found)
    return found


def settle_checkout(twin: Twin, session: str, *, is_paid: bool) -> None:
    found = twin.get(session)
    payment = twin.get(found["payment_intent"])
    if is_paid:
        charge(twin, payment, twin.get(payment["payment_method"]), off_session=False)
        found["payment_status"] = "paid"
        twin.tell("checkout.session.async_payment_succeeded", found)
    else:
        payment["status"] = "requires_payment_method"
        payment["last_payment_error"] = {"code": "payment_intent_payment_attempt_failed", "type": "card_error"}
        twin.tell("checkout.session.async_payment_failed", found)


def expire_checkout(twin: Twin, session: str) -> None:
    found = twin.get(session)
    found |= {"status": "expired", "url": None}
    twin.tell("checkout.session.expired", found)


@answers("POST /v1/billing_portal/configurations")
def create_portal_configuration(twin: Twin, **params: Any) -> Object:
    return twin.add("bpc", "billing_portal.configuration", features=params["features"])


@answers("POST /v1/billing_portal/sessions")
def create_portal(twin: Twin, *, customer: str = "", **params: Any) -> Object:
    twin.get(customer)
    made = twin.add("bps", "billing_portal.session", customer=customer, return_url=params.get("return_url"))
    made["url"] = f"https://billing.stripe.com/p/session/{made['id']}"
    return made


def tax_on(twin: Twin, subtotal: int, automatic_tax: Any) -> int:
    return subtotal * twin.tax_percent // 100 if automatic_tax and is_true(automatic_tax["enabled"]) else 0


# --- Money back -------------------------------------------------------------------------------------------------------


@answers("POST /v1/refunds")
def create_refund(twin: Twin, *, payment_intent: str, amount: str, metadata: Any = None, **_: Any) -> Object:
    intent = twin.get(payment_intent)
    refunds = (each for each in twin.of_kind("refund") if each["payment_intent"] == payment_intent)
    before = sum(each["amount"] for each in refunds if each["status"] != "failed")
    if int(amount) > intent["amount_received"] - before:
        raise Refusal(400, code="charge_already_refunded", message="Refund amount is greater than unrefunded amount.")
    made = twin.add(
        "re",
        "refund",
        amount=int(amount),
        currency="usd",
        payment_intent=payment_intent,
        metadata=metadata or {},
        status="succeeded",
        failure_reason=None,
    )
    twin.move_cash("refund", made["id"], -int(amount))
    twin.tell("refund.created", made)
    return made


@answers("GET /v1/refunds")
def list_refunds(twin: Twin, *, payment_intent: str = "", **params: Any) -> Object:
    rows = [each for each in twin.of_kind("refund") if payment_intent in ("", each["payment_intent"])]
    return listed(rows, params, "/v1/refunds")


@answers("GET /v1/refunds/{refund}")
def get_refund(twin: Twin, refund: str, **_: Any) -> Object:
    return twin.get(refund)


def fail_refund(twin: Twin, refund: str) -> None:
    """The bank sends the money of a refund back, days after it went out."""
    found = twin.get(refund)
    found |= {"status": "failed", "failure_reason": "expired_or_canceled_card"}
    twin.move_cash("refund_failure", refund, found["amount"])
    twin.tell("refund.failed", found)


def open_dispute(twin: Twin, payment_intent: str, amount: int | None = None) -> Object:
    intent = twin.get(payment_intent)
    taken = amount or intent["amount"]
    made = twin.add(
        "dp",
        "dispute",
        amount=taken,
        currency="usd",
        payment_intent=payment_intent,
        charge=intent["latest_charge"],
        reason="fraudulent",
        status="needs_response",
        balance_transactions=[],
    )
    made["balance_transactions"].append(twin.move_cash("adjustment", made["id"], -taken, DISPUTE_FEE_CENTS))
    twin.tell("charge.dispute.created", made)
    twin.tell("charge.dispute.funds_withdrawn", made)
    return made


def close_dispute(twin: Twin, dispute: str, *, is_won: bool) -> None:
    found = twin.get(dispute)
    found["status"] = "won" if is_won else "lost"
    if is_won:
        found["balance_transactions"].append(twin.move_cash("adjustment", dispute, found["amount"]))
        twin.tell("charge.dispute.funds_reinstated", found)
    twin.tell("charge.dispute.closed", found)


@answers("GET /v1/disputes/{dispute}")
def get_dispute(twin: Twin, dispute: str, **_: Any) -> Object:
    return twin.get(dispute)


# --- What happened ----------------------------------------------------------------------------------------------------


@answers("GET /v1/events")
def list_events(twin: Twin, *, created: Any = None, **params: Any) -> Object:
    return listed(within(twin.events, created), params, "/v1/events")


@answers("GET /v1/balance_transactions")
def list_cash(twin: Twin, *, created: Any = None, **params: Any) -> Object:
    return listed(within(twin.cash, created), params, "/v1/balance_transactions")


def within(rows: list[Object], created: Any) -> list[Object]:
    bounds = created or {}
    first, end = int(bounds.get("gte", 0)), int(bounds.get("lt", 2**62))
    return [row for row in rows if first <= row["created"] < end]


def listed(rows: list[Object], params: Any, url: str) -> Object:
    """Return one page of a list, newest first."""
    ordered = rows[::-1]
    if after := params.get("starting_after"):
        ordered = ordered[[row["id"] for row in ordered].index(after) + 1 :]
    limit = int(params.get("limit", 10))
    return {"object": "list", "url": url, "data": ordered[:limit], "has_more": len(ordered) > limit}


@answers("POST /v1/billing/meter_events")
def create_meter_event(twin: Twin, *, identifier: str = "", **params: Any) -> Object:
    known = {each["identifier"] for each in twin.of_kind("billing.meter_event")}
    if identifier in known:
        raise Refusal(400, message=f"An event already exists with identifier {identifier}.")
    return twin.add("mtre", "billing.meter_event", identifier=identifier, **params)
