"""The first operator comes from the command line."""

import io

import pytest
from django.core.management import CommandError, call_command

from apps.accounts.login.addresses import has_verified_address
from apps.accounts.models import User
from apps.accounts.queries import find_key
from apps.core.models import AuditEntry
from tests.factories.accounts import make_key, make_organization, make_user


def create(monkeypatch: pytest.MonkeyPatch, email: str, password: str, *options: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(password + "\n"))
    call_command("createoperator", email, "--password-stdin", *options, stdout=io.StringIO())


def test_an_operator_is_made_and_can_sign_in(db, client, monkeypatch):
    create(monkeypatch, "Olga@Example.com", "correct-horse-battery")

    user = User.objects.get(email="olga@example.com")
    assert (user.is_operator, user.check_password("correct-horse-battery")) == (True, True)
    assert has_verified_address(user=user, email="olga@example.com")
    assert AuditEntry.objects.filter(action="operator.created", target=user.pk).exists()


def test_a_person_who_exists_is_given_the_right(alice, monkeypatch):
    create(monkeypatch, alice.email, "")

    assert User.objects.get(pk=alice.pk).is_operator


@pytest.mark.parametrize("what", ["unverified", "closed"])
def test_an_account_that_anyone_could_have_made_is_not_given_the_right(db, monkeypatch, what):
    squatter = make_user("ops", is_verified=what != "unverified")
    User.objects.filter(pk=squatter.pk).update(is_active=what != "closed")

    with pytest.raises(CommandError, match="never verified" if what == "unverified" else "closed"):
        create(monkeypatch, squatter.email.upper(), "")

    assert not User.objects.get(pk=squatter.pk).is_operator


@pytest.mark.slow
def test_taking_an_account_over_locks_out_its_creator(db, monkeypatch, client):
    squatter = make_user("ops", is_verified=False)
    key = make_key(make_organization("Squat", owner=squatter), squatter)
    client.force_login(squatter)

    create(monkeypatch, squatter.email, "correct-horse-staple", "--new-password")

    taken = User.objects.get(pk=squatter.pk)
    assert (taken.is_operator, taken.check_password("correct-horse-staple")) == (True, True)
    assert has_verified_address(user=taken, email=taken.email)
    assert find_key(secret=key.secret) is None
    assert client.get("/organization/new").status_code == 302  # signed out


def test_a_weak_password_is_refused(db, monkeypatch):
    with pytest.raises(CommandError, match="too short"):
        create(monkeypatch, "olga@example.com", "short")
    assert not User.objects.exists()
