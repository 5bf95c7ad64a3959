"""A request for credit is answered once: by the next credit that an operator gives, or by a refusal with a reason."""

import datetime

import pytest

from apps.accounts.models import Notification, Organization, User
from apps.billing.books.adjustments import approve_adjustment, request_adjustment
from apps.billing.books.credit_requests import MAX_A_DAY, decline_request, list_requests, request_credit
from apps.billing.models import CreditRequest
from apps.core.database.clock import db_now
from apps.core.errors import InvalidState, InvalidValue, QuotaExceeded
from apps.core.models import OutboxMessage
from tests.factories.accounts import make_member, make_organization, make_service_account, make_user

USD = 1_000_000_000


def ask(organization: Organization, by: User, usd: float = 5) -> CreditRequest:
    return request_credit(organization=organization, amount_nano=int(usd * USD), note="a first job", by=by)


def mails() -> list[dict[str, str]]:
    return list(OutboxMessage.objects.filter(topic="mail").order_by("pk").values_list("payload", flat=True))


def test_operators_get_a_mail_with_who_asks_and_how_much(organization, alice):
    ask(organization, alice, 2.5)

    [mail] = mails()
    assert mail["kind"] == "operators" and "$2.50" in mail["subject"]
    assert all(word in mail["body"] for word in (organization.name, alice.email, "a first job", "/staff/books"))


def test_one_request_is_open_at_a_time_and_three_are_sent_a_day(organization, alice, rival, charlie):
    ask(organization, alice)
    with pytest.raises(InvalidState):
        ask(organization, alice)
    ask(rival, charlie)  # another organization's request does not count

    for _ in range(MAX_A_DAY - 1):
        decline_request(request_id=list_requests(organization=organization)[0].pk, reason="no", by="o", now=db_now())
        ask(organization, alice)
    decline_request(request_id=list_requests(organization=organization)[0].pk, reason="no", by="o", now=db_now())
    with pytest.raises(QuotaExceeded):
        ask(organization, alice)
    CreditRequest.objects.update(requested_at=db_now() - datetime.timedelta(hours=25))
    ask(organization, alice)


def test_operators_get_a_limited_number_of_mails_an_hour_and_miss_no_request(monkeypatch):
    monkeypatch.setattr("apps.billing.books.credit_requests.MAX_MAILS_AN_HOUR", 2)
    for number in range(4):
        person = make_user(f"person{number}")
        ask(make_organization(f"Organization {number}", owner=person), person)

    assert len(mails()) == 2
    assert CreditRequest.objects.filter(status="open").count() == 4


@pytest.mark.parametrize("usd", [0, -1, 100_001])
def test_an_amount_is_positive_and_limited(organization, alice, usd):
    with pytest.raises(InvalidValue):
        ask(organization, alice, usd)


def test_credit_that_an_operator_gives_answers_it(organization, alice):
    asked = ask(organization, alice)

    request_adjustment(organization=organization, amount_nano=3 * USD, reason="Welcome", by="user_olga", now=db_now())

    asked.refresh_from_db()
    assert (asked.status, asked.granted_nano, asked.answer, asked.decided_by) == (
        "granted",
        3 * USD,
        "Welcome",
        "user_olga",
    )
    answer = mails()[-1]
    assert (answer["kind"], answer["user_id"]) == ("person", alice.pk) and "$3.00" in answer["subject"]


def test_the_owners_read_the_answer_to_a_service_account(organization, alice, bob):
    owners = {alice.pk, make_member(organization, "owner").pk}
    asked = ask(organization, make_service_account(organization, alice).user)

    decline_request(request_id=asked.pk, reason="Write to us first.", by="user_olga", now=db_now())

    assert {mail["user_id"] for mail in mails() if mail["kind"] == "person"} == owners
    told = Notification.objects.filter(kind="credit").values_list("user_id", flat=True)
    assert set(told) == owners


def test_large_credit_answers_it_only_when_a_second_operator_approves(organization, alice):
    asked = ask(organization, alice, 500)
    wanted = request_adjustment(
        organization=organization, amount_nano=500 * USD, reason="Pilot", by="user_olga", now=db_now()
    )
    asked.refresh_from_db()
    assert asked.status == "open"

    approve_adjustment(adjustment_id=wanted.pk, by="user_otto", now=db_now())

    asked.refresh_from_db()
    assert (asked.status, asked.decided_by) == ("granted", "user_otto")


def test_a_refusal_needs_a_reason_and_is_final(organization, alice):
    asked = ask(organization, alice)
    with pytest.raises(InvalidValue):
        decline_request(request_id=asked.pk, reason=" ", by="user_olga", now=db_now())

    decline_request(request_id=asked.pk, reason="Write to us first.", by="user_olga", now=db_now())

    with pytest.raises(InvalidState):
        decline_request(request_id=asked.pk, reason="again", by="user_olga", now=db_now())
    request_adjustment(organization=organization, amount_nano=USD, reason="later", by="user_olga", now=db_now())
    asked.refresh_from_db()
    assert (asked.status, asked.answer) == ("declined", "Write to us first.")
    assert "Write to us first." in mails()[-1]["body"]
