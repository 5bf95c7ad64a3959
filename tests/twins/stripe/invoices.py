"""What the twin does with invoices, and what people do on an invoice's page."""

from typing import Any

from tests.twins.stripe.money import charge, give_card, is_true, listed, make_payment, tax_on, within
from tests.twins.stripe.twin import Object, Refusal, Twin, answers


@answers("POST /v1/invoices")
def create_invoice(twin: Twin, *, customer: str, automatic_tax: Any = None, **params: Any) -> Object:
    twin.get(customer)
    return twin.add(
        "in",
        "invoice",
        customer=customer,
        status="draft",
        number=None,
        currency=params.get("currency", "usd"),
        metadata=params.get("metadata") or {},
        collection_method=params.get("collection_method", "charge_automatically"),
        description=params.get("description"),
        lines={"object": "list", "data": [], "has_more": False},
        taxed=automatic_tax,
        subtotal=0,
        total=0,
        total_taxes=[],
        amount_due=0,
        amount_paid=0,
        attempt_count=0,
        hosted_invoice_url=None,
        invoice_pdf=None,
        intent=None,
    )


@answers("POST /v1/invoices/{invoice}/add_lines")
def add_lines(twin: Twin, invoice: str, *, lines: list[Any], **_: Any) -> Object:
    found = _in_state(twin, invoice, "draft")
    for line in lines:
        made = {"id": twin._id("il"), "object": "line_item", **line, "amount": int(line["amount"])}
        found["lines"]["data"].append(made)
    found["subtotal"] = sum(line["amount"] for line in found["lines"]["data"])
    tax = tax_on(twin, found["subtotal"], found["taxed"])
    found["total_taxes"] = [{"amount": tax}] if tax else []
    found["total"] = found["amount_due"] = found["subtotal"] + tax
    return found


@answers("POST /v1/invoices/{invoice}/finalize")
def finalize(twin: Twin, invoice: str, **params: Any) -> Object:
    found = _in_state(twin, invoice, "draft")
    found |= {
        "status": "open",
        "number": f"ANN-{found['id'][-4:]}",
        "hosted_invoice_url": f"https://invoice.stripe.com/i/{found['id']}",
        "invoice_pdf": f"https://pay.stripe.com/invoice/{found['id']}/pdf",
        "intent": make_payment(twin, found["customer"], found["total"], {})["id"],
    }
    twin.tell("invoice.finalized", found)
    return _shown(_paid(twin, found) if found["total"] == 0 else found, params)


@answers("POST /v1/invoices/{invoice}/pay")
def pay(twin: Twin, invoice: str, *, off_session: str = "false", **params: Any) -> Object:
    found = _in_state(twin, invoice, "open")
    default = twin.get(found["customer"])["invoice_settings"]["default_payment_method"]
    if default is None:
        raise Refusal(400, code="invoice_payment_intent_requires_action", message="There is no default payment method.")
    found["attempt_count"] += 1
    try:
        charge(twin, twin.get(found["intent"]), twin.get(default), off_session=is_true(off_session))
    except Refusal as refusal:
        needs_owner = refusal.error["code"] == "authentication_required"
        twin.tell("invoice.payment_action_required" if needs_owner else "invoice.payment_failed", found)
        raise
    return _shown(_paid(twin, found), params)


def pay_hosted_invoice(twin: Twin, invoice: str, card: str = "pm_card_visa") -> None:
    """Do as the person at the invoice's own page does."""
    found = _in_state(twin, invoice, "open")
    charge(twin, twin.get(found["intent"]), give_card(twin, found["customer"], card), off_session=False)
    _paid(twin, found)


def _paid(twin: Twin, found: Object) -> Object:
    found |= {"status": "paid", "amount_paid": found["total"]}
    twin.tell("invoice.paid", found)
    return found


@answers("POST /v1/invoices/{invoice}/void")
def void(twin: Twin, invoice: str, **params: Any) -> Object:
    found = _in_state(twin, invoice, "open")
    found["status"] = "void"
    twin.get(found["intent"])["status"] = "canceled"
    twin.tell("invoice.voided", found)
    return _shown(found, params)


@answers("DELETE /v1/invoices/{invoice}")
def delete_invoice(twin: Twin, invoice: str, **_: Any) -> Object:
    """Only a draft: https://docs.stripe.com/api/invoices/delete."""
    _in_state(twin, invoice, "draft")
    del twin.objects[invoice]
    return {"id": invoice, "object": "invoice", "deleted": True}


@answers("GET /v1/invoices/{invoice}")
def get_invoice(twin: Twin, invoice: str, **params: Any) -> Object:
    return _shown(twin.get(invoice), params)


@answers("GET /v1/invoices")
def list_invoices(twin: Twin, *, customer: str = "", status: str = "", created: Any = None, **params: Any) -> Object:
    rows = [each for each in within(twin.of_kind("invoice"), created) if customer in ("", each["customer"])]
    return listed([each for each in rows if status in ("", each["status"])], params, "/v1/invoices")


def _in_state(twin: Twin, invoice: str, *states: str) -> Object:
    found = twin.get(invoice)
    if found["status"] not in states:
        raise Refusal(400, message=f"This invoice is {found['status']}.")
    return found


def _shown(found: Object, params: Any) -> Object:
    """Return the invoice as Stripe shows it: its payments only when they are asked for."""
    if "payments" not in params.get("expand", []) or not found["intent"]:
        return found
    payment = {"payment": {"type": "payment_intent", "payment_intent": found["intent"]}}
    return found | {"payments": {"object": "list", "data": [payment], "has_more": False}}
