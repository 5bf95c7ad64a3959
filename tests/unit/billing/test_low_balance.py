"""A low balance is noticed once, again only after it recovered, and not within a day."""

import datetime

import pytest
from django.core import mail

from apps.accounts.models import Notification, Organization, User
from apps.billing.books.low_balance import warn_low_balances
from apps.core.database.clock import db_now
from apps.core.messages import outbox
from tests.factories.money import USD, give_credit, spend

DAY = datetime.timedelta(days=1)


@pytest.fixture
def spender(organization: Organization) -> Organization:
    """Return an organization with 4 dollars left that spent 6 today."""
    give_credit(organization, 10 * USD)
    spend(organization, 6 * USD, "ftjob-1")
    return organization


def test_owners_and_admins_get_a_mail_and_a_notification(spender, alice: User, ann: User, bob: User):
    assert warn_low_balances(now=db_now()) == 1
    outbox.deliver_due(lane="mail")

    [message] = mail.outbox
    assert message.subject == "Your balance is low: $4.00" and sorted(message.to) == sorted([alice.email, ann.email])
    assert "spent $6.00 in the last 3 days" in message.body and "/credit" in message.body
    assert set(Notification.objects.values_list("user_id", "title")) == {
        (alice.pk, "Your balance is low: $4.00"),
        (ann.pk, "Your balance is low: $4.00"),
    }


def test_it_is_given_once_until_the_balance_recovers_and_a_day_has_passed(spender):
    now = db_now()
    assert [warn_low_balances(now=now), warn_low_balances(now=now + DAY)] == [1, 0]

    give_credit(spender, 100 * USD)
    assert warn_low_balances(now=now + DAY) == 0
    spend(spender, 60 * USD, "ftjob-2")

    assert [warn_low_balances(now=now + DAY), warn_low_balances(now=now + DAY)] == [1, 0]


def test_it_is_not_given_twice_within_a_day(spender):
    assert warn_low_balances(now=db_now()) == 1
    give_credit(spender, 100 * USD)
    warn_low_balances(now=db_now())
    spend(spender, 60 * USD, "ftjob-2")

    assert warn_low_balances(now=db_now()) == 0


def test_a_balance_that_lasts_or_is_not_used_is_not_low(organization, rival):
    give_credit(organization, 100 * USD)
    spend(organization, 6 * USD, "ftjob-1")

    assert warn_low_balances(now=db_now()) == 0  # the rival has nothing, and spends nothing


def test_a_person_turns_these_mails_off(spender, alice: User):
    User.objects.update(wants_balance_mail=False)
    warn_low_balances(now=db_now())
    outbox.deliver_due(lane="mail")

    assert mail.outbox == []
