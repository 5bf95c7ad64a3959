"""A revoked key leaves nothing behind, not even what it was making at that moment."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import pytest
from django.db import connection, transaction

from apps.accounts.login.key_operations import IssuedKey, issue_key, revoke_key, revoke_keys_of, rotate_key
from apps.accounts.models import Organization, User
from apps.accounts.queries import KeyIdentity, find_key
from apps.core.database.clock import db_now
from apps.core.errors import PermissionDenied
from tests.factories.accounts import make_key, make_service_account

Revoke = Callable[[Organization, User, IssuedKey], Any]


def identity_of(key: IssuedKey) -> KeyIdentity:
    found = find_key(secret=key.secret)
    assert found is not None
    return found


def make_with(identity: KeyIdentity, organization: Organization, by: User, *, account: str = "") -> IssuedKey:
    return issue_key(
        organization=organization, name="made", scopes=frozenset({"view"}), by=by, expires_at=None, now=db_now(),
        identity=identity, service_account_id=account,
    )  # fmt: skip


def revoke_one(organization: Organization, by: User, key: IssuedKey) -> None:
    revoke_key(organization=organization, key_id=key.key.pk, by=by, now=db_now())


def revoke_all(organization: Organization, by: User, key: IssuedKey) -> None:
    revoke_keys_of(user=by, now=db_now())


def test_a_request_that_began_before_its_key_was_revoked_makes_no_key(organization, alice) -> None:
    key, other = make_key(organization, alice), make_key(organization, alice)
    account, asking = make_service_account(organization, alice), identity_of(key)
    revoke_one(organization, alice, key)

    for account_id in ("", account.pk):
        with pytest.raises(PermissionDenied, match="revoked"):
            make_with(asking, organization, alice, account=account_id)
    with pytest.raises(PermissionDenied, match="revoked"):
        rotate_key(
            organization=organization, key_id=other.key.pk, overlap=timedelta(0), by=alice, now=db_now(),
            identity=asking,
        )  # fmt: skip
    assert find_key(secret=other.secret) is not None


@pytest.mark.parametrize("revoke", [revoke_one, revoke_all])
@pytest.mark.django_db(transaction=True)
def test_a_revocation_waits_for_the_key_that_is_being_made(organization, alice, revoke: Revoke) -> None:
    key = make_key(organization, alice)
    asking, pids = identity_of(key), SimpleQueue[int]()

    def revoke_in_thread() -> None:
        try:
            with transaction.atomic():
                pids.put(ask("SELECT pg_backend_pid()"))
                revoke(organization, alice, key)
        finally:
            connection.close()

    with ThreadPoolExecutor(1) as threads:
        with transaction.atomic():
            made = make_with(asking, organization, alice)
            revoked = threads.submit(revoke_in_thread)
            pid = pids.get(timeout=60)
            waits = "SELECT pg_backend_pid() = ANY(pg_blocking_pids(%s)) FROM pg_sleep(0.01)"
            assert any(revoked.done() or ask(waits, pid) for _ in range(3_000))
        revoked.result(timeout=60)

    assert find_key(secret=key.secret) is None and find_key(secret=made.secret) is None


def ask(statement: str, *arguments: object) -> Any:
    with connection.cursor() as cursor:
        cursor.execute(statement, arguments)
        return cursor.fetchone()[0]
