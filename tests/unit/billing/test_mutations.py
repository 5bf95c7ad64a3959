"""The three mistakes the ledger was built against: each, made again in its source, must show."""

import inspect
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import ModuleType
from typing import Any

import pytest
from django.db import connection

from apps.accounts.models import Organization
from apps.billing import operations
from apps.billing.models import Hold
from apps.billing.operations import InsufficientBalance
from apps.billing.queries import get_spending
from apps.billing.usage import metering
from apps.billing.usage.metering import rate_usage, record_usage
from apps.catalog.operations import set_price
from apps.core.database.clock import db_now
from apps.core.money import rated
from tests.factories.money import place_hold
from tests.support.database import at_once
from tests.unit.billing.books import funded, usage_record

THREADS = 8


def mutate(monkeypatch: pytest.MonkeyPatch, module: ModuleType, function: Callable[..., Any], *edits: tuple[str, str]):
    """Put an edited copy of a function's source in its place; fails when there is nothing to edit."""
    source = textwrap.dedent(inspect.getsource(inspect.unwrap(function)))
    for before, after in edits:
        assert source.count(before) == 1, f"{function.__name__} has no {before!r} to mutate"
        source = source.replace(before, after)
    namespace = dict(vars(module))
    exec(source, namespace)
    monkeypatch.setattr(module, function.__name__, namespace[function.__name__])
    return namespace[function.__name__]


@contextmanager
def mutated_function(name: str, before: str, after: str) -> Iterator[None]:
    """Put an edited copy of a function of the database in its place for a while."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_get_functiondef(%s::regproc)", [name])
        (source,) = cursor.fetchone()
        assert source.count(before) == 1, f"{name} has no {before!r} to mutate"
        cursor.execute(source.replace(before, after).replace("%", "%%"), [])
        try:
            yield
        finally:
            cursor.execute(source.replace("%", "%%"), [])


def slowly(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wait after the answer until all threads have theirs, so that they interleave as much as possible."""
    all_have_it = threading.Barrier(THREADS)

    def slow(*arguments: Any, **named: Any) -> Any:
        answer = function(*arguments, **named)
        with suppress(threading.BrokenBarrierError):
            all_have_it.wait(timeout=10)
        return answer

    return slow


def assert_one_effect(organization: Organization) -> None:
    held = at_once(lambda _: operations.hold(
        organization=organization, purpose="job", source="ftjob-1", amount_nano=7, by="system", idempotency_key="h",
    ).pk, THREADS)  # fmt: skip
    assert {type(result) for result in held} == {str}, held
    assert Hold.objects.count() == 1


def assert_no_more_than_covered(organization: Organization) -> None:
    def one(number: int) -> int:
        try:
            return bool(place_hold(organization, 7, f"ftjob-{number}"))
        except InsufficientBalance:
            return 0

    results = at_once(one, THREADS)
    assert {type(result) for result in results} <= {int, bool}, results
    assert sum(results) == 2


def assert_charged_by_the_sum(organization: Organization) -> None:
    price = set_price(
        sku=f"inference:input:{organization.slug}", unit="tokens", price_nano=1, per=2, by="system", now=db_now()
    )
    for number in range(10):
        record_usage(records=[usage_record(organization, price.pk, 1, "", f"{organization.slug}_{number}")])
        rate_usage()
    assert get_spending(organization=organization).inference_nano == rated(quantity=10, price_nano=1, per=2)


def test_the_key_is_looked_up_under_the_lock(transactional_db: None, monkeypatch: pytest.MonkeyPatch) -> None:
    organization = funded(1000)
    monkeypatch.setattr(operations, "posted_before", slowly(operations.posted_before))
    unlocked = "wallet = account(organization=organization, kind=AccountKind.WALLET)"
    locked, decision = "wallet = lock_wallet(organization=organization)", "if wallet.balance_nano < amount_nano:"
    mutate(monkeypatch, operations, operations.hold, (locked, unlocked), (decision, f"{locked}\n    {decision}"))
    with pytest.raises(AssertionError):
        assert_one_effect(organization)


def test_every_movement_begins_with_the_lock_root(transactional_db: None, monkeypatch: pytest.MonkeyPatch) -> None:
    organization = funded(20)
    monkeypatch.setattr(operations, "lock_wallet", slowly(operations.lock_wallet))
    with mutated_function("ledger_lock_wallet", "FOR UPDATE", ""), pytest.raises(AssertionError):
        assert_no_more_than_covered(organization)


def test_what_is_charged_is_the_price_of_the_sum(db: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_charged_by_the_sum(funded(1000))

    mutate(
        monkeypatch, metering, metering._post_line,
        ("rated(quantity=line.quantity, price_nano=price.price_nano, per=price.per) - line.posted_nano",
         "rated(quantity=line.quantity - line.rated_quantity, price_nano=price.price_nano, per=price.per)"),
    )  # fmt: skip
    with pytest.raises(AssertionError):
        assert_charged_by_the_sum(funded(1000, "second"))
