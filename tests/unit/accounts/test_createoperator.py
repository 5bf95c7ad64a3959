"""The first operator comes from the command line."""

import io

import pytest
from django.core.management import CommandError, call_command

from apps.accounts.models import User
from apps.core.models import AuditEntry


def create(monkeypatch: pytest.MonkeyPatch, email: str, password: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(password + "\n"))
    call_command("createoperator", email, "--password-stdin", stdout=io.StringIO())


def test_an_operator_is_made_and_can_sign_in(db, client, monkeypatch):
    create(monkeypatch, "Olga@Example.com", "correct-horse-battery")

    user = User.objects.get(email="olga@example.com")
    assert (user.is_operator, user.check_password("correct-horse-battery")) == (True, True)
    assert AuditEntry.objects.filter(action="operator.created", target=user.pk).exists()


def test_a_person_who_exists_is_given_the_right(alice, monkeypatch):
    create(monkeypatch, alice.email, "")

    assert User.objects.get(pk=alice.pk).is_operator


def test_a_weak_password_is_refused(db, monkeypatch):
    with pytest.raises(CommandError, match="too short"):
        create(monkeypatch, "olga@example.com", "short")
    assert not User.objects.exists()
