"""The welcome credit: once per person, for a confirmed address, in the first organization that the person founded."""

import re

import pytest
from django.core import mail
from django.test import Client

from apps.accounts.models import Organization
from apps.billing.books.welcome import grant_welcome_credit
from apps.billing.queries import get_balance, get_ledger_sum_nano
from apps.core.messages import outbox
from apps.finetuning.usage.quotas import get_quota
from tests.factories.accounts import make_organization, make_user, sign_up

USD = 1_000_000_000

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def _five_dollars(settings) -> None:
    settings.WELCOME_CREDIT_NANO = 5 * USD


def balance(organization: Organization) -> int:
    return get_balance(organization=organization).available_nano


@pytest.mark.slow
def test_it_comes_with_the_confirmation_of_the_address(db: None, client: Client) -> None:
    sign_up(client)
    founded = Organization.objects.get(name="Dana Labs")
    assert balance(founded) == 0
    outbox.deliver_due()
    link = re.search(r"http://testserver(/accounts/confirm-email/\S+)", mail.outbox[0].body)
    assert link is not None

    client.post(link[1])
    client.post(link[1])

    assert (balance(founded), get_ledger_sum_nano()) == (5 * USD, 0)
    assert "You have $5.00" in client.get("/").content.decode()


def test_a_person_gets_it_once_and_in_their_first_organization(client_for) -> None:
    dana = make_user("dana")
    client = client_for(dana)

    for name in ("First", "Second"):
        client.post("/organization/new", {"name": name})

    balances = {each.name: balance(each) for each in Organization.objects.filter(founded_by=dana)}
    assert balances == {"First": 5 * USD, "Second": 0}


def test_a_changed_amount_adds_nothing_to_what_was_granted(settings) -> None:
    dana = make_user("dana")
    founded = make_organization("First", owner=dana)
    grant_welcome_credit(user=dana)
    settings.WELCOME_CREDIT_NANO = 9 * USD

    grant_welcome_credit(user=dana)

    assert balance(founded) == 5 * USD


def test_without_the_setting_or_a_confirmed_address_nothing_is_granted(settings) -> None:
    late = make_user("late", is_verified=False)
    founded = make_organization("Late", owner=late)
    grant_welcome_credit(user=late)
    settings.WELCOME_CREDIT_NANO = 0
    dana = make_user("dana")
    other = make_organization("Other", owner=dana)
    grant_welcome_credit(user=dana)

    assert (balance(founded), balance(other)) == (0, 0)


def test_it_does_not_lift_the_limits_of_those_who_never_paid(settings) -> None:
    dana = make_user("dana")
    founded = make_organization("First", owner=dana)

    grant_welcome_credit(user=dana)

    assert balance(founded) == 5 * USD
    assert get_quota(organization=founded).storage_bytes == settings.UNPAID_LIMITS["storage_bytes"]
