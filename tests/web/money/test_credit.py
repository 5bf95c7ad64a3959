"""The credit page: what a customer without credit does, and what the operator sees of it."""

import pytest

from apps.billing.models import CreditRequest
from apps.billing.queries import get_balance
from apps.core.ids import new_id
from tests.support.pages import text


def test_a_member_asks_an_operator_grants_and_the_member_reads_the_answer(organization, bob, olga, client_for):
    member, operator = client_for(bob), client_for(olga)
    assert "No requests yet" in text(member.get("/credit"))

    sent = member.post("/credit", {"amount_usd": "2.50", "note": "To try the sample"}, follow=True)
    assert "has your request" in text(sent) and "Request sent" in text(sent)
    books = text(operator.get("/staff/books"))
    assert all(word in books for word in ("To try the sample", bob.email, "$2.50"))
    form = text(operator.get(f"/staff/organizations/{organization.pk}/adjust"))
    assert 'value="2.5"' in form and "To try the sample" in form
    operator.post(
        f"/staff/organizations/{organization.pk}/adjust",
        {"amount_usd": "2.50", "reason": "Have fun", "once": new_id("adj")},
    )

    page = text(member.get("/credit"))
    assert "Granted" in page and "Have fun" in page
    assert get_balance(organization=organization).available_nano == 2_500_000_000


def test_an_operator_declines_with_a_reason(organization, alice, olga, client_for):
    client_for(alice).post("/credit", {"amount_usd": "5"})
    request = CreditRequest.objects.get()

    client_for(olga).post(f"/staff/credit-requests/{request.pk}/decline", {"reason": "Ask your team first"})

    page = text(client_for(alice).get("/credit"))
    assert "Declined" in page and "Ask your team first" in page and "Request credit" in page
    assert "Ask your team first" in text(client_for(alice).get("/"))


@pytest.mark.parametrize("amount", ["", "0", "-3", "x", "1000000", "1.234"])
def test_a_wrong_amount_is_said_at_its_field(organization, alice, client_for, amount):
    response = client_for(alice).post("/credit", {"amount_usd": amount})

    assert response.status_code == 422
    assert 'id="id_amount_usd_error"' in text(response)
    assert not CreditRequest.objects.exists()


def test_a_viewer_reads_and_cannot_ask(organization, vera, client_for):
    client = client_for(vera)

    assert "Your role can't request credit" in text(client.get("/credit"))
    assert client.post("/credit", {"amount_usd": "5"}).status_code == 403


def test_the_missing_amount_is_filled_in(organization, alice, client_for):
    assert 'value="0.07"' in text(client_for(alice).get("/credit?amount=0.07"))
