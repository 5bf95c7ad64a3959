"""Stripe in memory: what it keeps, what it answers, what it tells by webhook, and how it fails.

Behaviour follows docs.stripe.com: idempotent requests (the first result is replayed, other parameters under the same
key are an error, a second request meanwhile is a conflict), test cards, invoices (draft, open, paid, void), disputes
(funds leave when one opens, and come back when it is won), a balance transaction for each movement. Every request
passes the contract first. It was written by the people who wrote the client, so it shares their misreadings: the same
suite runs against Stripe's own test mode when STRIPE_TEST_KEY is set.
"""

import copy
import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any
from urllib.parse import urlsplit

import stripe

from tests.twins.stripe import contract

Object = dict[str, Any]
Answer = tuple[int, dict[str, str], bytes]
WEBHOOK_SECRET = "whsec_twin"
DISPUTE_FEE_CENTS = 1500

# Stripe's own names for its test cards -> (brand, last four, what a charge without its owner does)
CARDS: dict[str, tuple[str, str, str]] = {
    "pm_card_visa": ("visa", "4242", ""),
    "pm_card_mastercard": ("mastercard", "4444", ""),
    "pm_card_chargeCustomerFail": ("visa", "0341", "generic_decline"),
    "pm_card_visa_chargeDeclinedInsufficientFunds": ("visa", "9995", "insufficient_funds"),
    "pm_card_visa_chargeDeclinedStolenCard": ("visa", "9979", "stolen_card"),
    "pm_card_authenticationRequired": ("visa", "3184", "authentication_required"),
    "pm_card_refundFail": ("visa", "5126", ""),
}


class Refusal(Exception):
    """An answer of Stripe's that is not a success."""

    def __init__(self, status: int, **error: Any) -> None:
        super().__init__(error.get("message", ""))
        self.status = status
        self.error = {"type": "invalid_request_error"} | error


class Dropped(Exception):
    """The connection broke; whether the request was carried out is what the fault decides."""


@dataclass
class Fault:
    """What goes wrong with the next `times` requests whose operation contains `match`.

    before: the connection breaks and nothing happened. after: it happened, and then the connection broke. An int is
    answered as a status without doing anything. A float is a delay in seconds, then all goes well.
    """

    what: str | int | float
    match: str = ""
    times: int = 1


@dataclass
class Kept:
    """The first result under an idempotency key."""

    request: str
    answer: Answer | None = None


@dataclass
class Twin:
    """Attributes are for tests to read and change. `asked` holds the names of the operations in order,
    `complaints` what the contract said of those it refused."""

    api_version: str = stripe.api_version
    tax_percent: int = 0
    objects: dict[str, Object] = field(default_factory=dict)
    events: list[Object] = field(default_factory=list)
    cash: list[Object] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)
    now: Callable[[], float] = time.time
    _kept: dict[str, Kept] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=lambda: count(1))
    _lock: threading.RLock = field(default_factory=threading.RLock)

    # --- requests -----------------------------------------------------------------------------------------------------

    def handle(self, method: str, url: str, headers: Mapping[str, str], body: str = "") -> Answer:
        """Answer one request. Raises Dropped."""
        parts = urlsplit(url)
        operation = contract.find(method, parts.path)
        fault = self._fault(f"{method} {parts.path}")
        if fault == "before":
            raise Dropped
        if isinstance(fault, float):
            time.sleep(fault)
        elif isinstance(fault, int):
            return _error(Refusal(fault, type="api_error", message="fault"))
        key = {name.lower(): value for name, value in headers.items()}.get("idempotency-key", "")
        try:
            if operation is None:
                raise Refusal(404, message=f"Unrecognized request URL ({method}: {parts.path})")
            with self._once(key, f"{method} {url} {body}") as kept:
                kept.answer = kept.answer or self._answer(operation, method, parts, body)
                answer = kept.answer
        except Refusal as refusal:
            return _error(refusal)
        if fault == "after":
            raise Dropped
        return answer

    def _fault(self, name: str) -> str | int | float | None:
        with self._lock:
            fault = next((each for each in self.faults if each.times > 0 and each.match in name), None)
            if fault is None:
                return None
            fault.times -= 1
            return fault.what

    @contextmanager
    def _once(self, key: str, request: str) -> Iterator[Kept]:
        if not key:
            yield Kept(request)
            return
        if not self._lock.acquire(timeout=5):
            raise Refusal(409, type="idempotency_error", message="another request with this key is in progress")
        try:
            kept = self._kept.setdefault(key, Kept(request))
            if kept.request != request:
                raise Refusal(400, type="idempotency_error", message=f"{key} was used with other parameters")
            yield kept
        finally:
            self._lock.release()

    def _answer(self, operation: contract.Operation, method: str, parts: Any, body: str) -> Answer:
        params = contract.decode(body if method == "POST" else parts.query)
        with self._lock:
            self.asked.append(operation.name)
            try:
                if complaints := contract.check(operation, params):
                    first = complaints[0]
                    self.complaints.append(f"{operation.name}: {first}")
                    raise Refusal(400, code=first.code, param=first.param, message=f"{first.code}: {first.param}")
                handler = _HANDLERS.get(operation.name)
                if handler is None:
                    raise Refusal(501, message=f"the twin does not do {operation.name}")
                ids = re.findall(r"/v1/(?:checkout/|billing_portal/|billing/)?\w+/([^/]+)", parts.path)
                result = handler(self, *ids[: operation.name.count("{")], **params)
                shown = copy.deepcopy(result)
                for path in params.get("expand", []):
                    rows = shown["data"] if path.startswith("data.") else [shown]
                    for row in rows:
                        self._expand(row, path.removeprefix("data.").split("."))
            except Refusal as refusal:
                return _error(refusal)
        return 200, {"Request-Id": self._id("req")}, json.dumps(shown).encode()

    def _expand(self, row: Object, path: list[str]) -> None:
        *outer, last = path
        for name in outer:
            row = row[name]
        if isinstance(row.get(last), str) and row[last] in self.objects:
            row[last] = copy.deepcopy(self.objects[row[last]])

    # --- objects ------------------------------------------------------------------------------------------------------

    def _id(self, prefix: str) -> str:
        return f"{prefix}_{next(self._numbers):08d}"

    def add(self, prefix: str, kind: str, **fields: Any) -> Object:
        made = {"id": self._id(prefix), "object": kind, "created": int(self.now()), "livemode": False, **fields}
        self.objects[made["id"]] = made
        return made

    def get(self, identifier: str) -> Object:
        found = self.objects.get(identifier)
        if found is None:
            raise Refusal(404, code="resource_missing", message=f"No such object: '{identifier}'")
        return found

    def of_kind(self, kind: str) -> list[Object]:
        return [each for each in self.objects.values() if each["object"] == kind]

    def tell(self, kind: str, about: Object) -> Object:
        event = {
            "id": self._id("evt"),
            "object": "event",
            "type": kind,
            "api_version": self.api_version,
            "created": int(self.now()),
            "livemode": False,
            "pending_webhooks": 1,
            "request": None,
            "data": {"object": copy.deepcopy(about)},
        }
        self.events.append(event)
        return event

    def move_cash(self, kind: str, source: str, amount: int, fee: int = 0) -> Object:
        movement = {
            "id": self._id("txn"),
            "object": "balance_transaction",
            "type": kind,
            "source": source,
            "amount": amount,
            "fee": fee,
            "net": amount - fee,
            "currency": "usd",
            "created": int(self.now()),
            "status": "pending",
        }
        self.cash.append(movement)
        return movement


def signed(event: Object, *, secret: str = WEBHOOK_SECRET, at: int | None = None) -> tuple[bytes, str]:
    """Return the body of a webhook and its Stripe-Signature header."""
    body = json.dumps(event)
    return body.encode(), stripe.WebhookSignature.generate_signature_header(body, secret, at)


def _error(refusal: Refusal) -> Answer:
    return refusal.status, {}, json.dumps({"error": refusal.error}).encode()


Handler = Callable[..., Object]
_HANDLERS: dict[str, Handler] = {}


def answers(operation: str) -> Callable[[Handler], Handler]:
    """Register what answers an operation. Raises KeyError when the package has no such operation."""
    if operation not in {each.name for each in contract.operations()}:
        raise KeyError(operation)

    def register(handler: Handler) -> Handler:
        _HANDLERS[operation] = handler
        return handler

    return register
