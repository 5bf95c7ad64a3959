"""Sign-up, sign-in, and the links that are mailed for them."""

import html
import re
import time
from collections.abc import Callable
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
from allauth.account.models import EmailAddress
from allauth.core.internal import ratelimit
from django.core import mail
from django.test import Client

from apps.accounts.login.key_operations import IssuedKey, issue_key
from apps.accounts.models import Membership, Organization, User
from apps.accounts.queries import find_key
from apps.config.settings import base
from apps.core.database.clock import db_now
from apps.core.messages.outbox import deliver_due
from apps.core.models import AuditEntry, OutboxMessage
from tests.factories.accounts import PASSWORD, make_key, make_organization, make_service_account, make_user, sign_up

ClientFor = Callable[[User | None], Client]


def test_sign_up_makes_a_person_who_owns_an_organization(db: None, client: Client) -> None:
    response = sign_up(client)

    assert response.headers["Location"] == "/accounts/confirm-email/"
    assert client.get("/members").status_code == 302  # not signed in before the address is confirmed
    membership = Membership.objects.get(user__email="dana@example.com")
    assert (membership.role, membership.organization.name) == ("owner", "Dana Labs")
    assert AuditEntry.objects.filter(action="organization.create", actor=membership.user_id).exists()


def test_sign_up_without_an_organizations_name_makes_one_after_the_person(db: None, client: Client) -> None:
    sign_up(client, organization="")

    assert Organization.objects.get().name == "Dana's organization"


@pytest.mark.parametrize("state", ["verified", "unverified", "closed"])
def test_sign_up_with_a_taken_address_reads_the_same_and_makes_nothing(db: None, state: str) -> None:
    def answers(email: str) -> list[tuple[int, str, str]]:
        client = Client()
        response = sign_up(client, email=email)
        page = client.get(response.headers.get("Location", "/accounts/signup/"))
        text = re.sub(r'csrf\w*"? value="\w+|X-CSRFToken": "\w+|req_\w+', "", page.content.decode())
        return [
            (response.status_code, response.headers.get("Location", "")),
            (page.status_code, text.replace(email.lower(), "")),
        ]

    taken = make_user("taken", is_verified=state != "unverified")
    User.objects.filter(pk=taken.pk).update(is_active=state != "closed")
    known, unknown = answers(taken.email.upper()), answers("free@example.com")

    assert known[0] == unknown[0] == (302, "/accounts/confirm-email/")
    assert known[1] == unknown[1]
    assert User.objects.filter(email=taken.email).count() == Organization.objects.count() == 1


def test_the_owner_of_a_taken_address_is_told(alice: User, client: Client) -> None:
    sign_up(client, email=alice.email)
    deliver_due()

    assert mail.outbox[0].to == [alice.email]
    assert "already has one" in mail.outbox[0].body and "/accounts/password/reset/" in mail.outbox[0].body


def test_sign_up_costs_the_same_for_a_taken_address(alice: User, client: Client, monkeypatch: Any) -> None:
    """The slow part is to hash the password."""
    hashed: list[str] = []
    monkeypatch.setattr("apps.accounts.login.forms.make_password", hashed.append)

    sign_up(client, email=alice.email)

    assert hashed == [PASSWORD]


def test_a_password_reset_does_the_same_for_an_unknown_address(alice: User, client: Client) -> None:
    answers = [
        client.post("/accounts/password/reset/", {"email": email}) for email in (alice.email, "free@example.com")
    ]
    deliver_due()

    assert {(answer.status_code, answer.headers["Location"]) for answer in answers} == {
        (302, "/accounts/password/reset/done/")
    }
    assert OutboxMessage.objects.count() == 2
    assert [message.to for message in mail.outbox] == [[alice.email]]


def test_sign_in_waits_for_a_confirmed_address(db: None, client: Client) -> None:
    user = make_user("new", is_verified=False)

    answer = client.post("/accounts/login/", {"login": user.email, "password": PASSWORD})

    assert answer.headers["Location"] == "/accounts/confirm-email/"
    assert client.get("/organization/new").status_code == 302


def test_login_and_logout(alice: User, organization: Organization, client: Client) -> None:
    client.post("/accounts/login/", {"login": alice.email, "password": PASSWORD})
    assert client.get("/members").status_code == 200

    client.post("/accounts/logout/")

    assert client.get("/members").status_code == 302


def test_a_wrong_password_and_an_unknown_address_read_the_same(alice: User, client: Client) -> None:
    def failure(login: str) -> str:
        page = client.post("/accounts/login/", {"login": login, "password": "wrong-password"}).content.decode()
        return re.findall(r'role="alert".*?</div>', page, re.DOTALL)[0]

    assert failure(alice.email) == failure("nobody@example.com")


def test_a_password_is_reset_by_a_mailed_link_that_works_once(alice: User, key: IssuedKey, client: Client) -> None:
    client.post("/accounts/password/reset/", {"email": alice.email})
    deliver_due()
    link = re.search(r"http://testserver(/\S+)", mail.outbox[0].body)[1]

    form = client.get(link, follow=True)
    new = "another-good-password"
    saved = client.post(form.redirect_chain[-1][0], {"password1": new, "password2": new})

    assert saved.status_code == 302
    alice.refresh_from_db()
    assert alice.check_password(new)
    assert find_key(secret=key.secret) is None
    assert "no longer works" in Client().get(link, follow=True).content.decode()


@pytest.mark.parametrize(("asked", "works"), [({}, True), ({"revoke_keys": "on"}, False)])
def test_a_new_password_revokes_keys_in_every_organization_if_asked(
    alice: User, bob: User, key: IssuedKey, client_for: ClientFor, asked: dict[str, str], works: bool
) -> None:
    elsewhere = make_key(make_organization("Second", owner=alice), alice)
    of_bob = make_key(Organization.objects.get(name="Acme"), bob, scopes=frozenset({"view"}))
    form = {"oldpassword": PASSWORD, "password1": "another-good-password", "password2": "another-good-password"}

    assert client_for(alice).post("/accounts/password/change/", form | asked).status_code == 302

    assert [bool(find_key(secret=each.secret)) for each in (key, elsewhere, of_bob)] == [works, works, True]
    entry = AuditEntry.objects.get(action="person.password_changed", organization=key.key.organization)
    assert entry.details == {"keys_revoked": 0 if works else 2}


def test_a_new_password_ends_keys_of_service_accounts_with_which_an_intruder_could_return(
    alice: User, key: IssuedKey, client_for: ClientFor
) -> None:
    organization, now = key.key.organization, db_now()
    account = make_service_account(organization, alice, role="admin")
    managing, calling = (
        issue_key(
            organization=organization, name=scope, scopes=frozenset({scope}), by=alice, expires_at=None, now=now,
            service_account_id=account.pk,
        )
        for scope in ("member.manage", "inference")
    )  # fmt: skip
    form = {"oldpassword": PASSWORD, "password1": "another-good-password", "password2": "another-good-password"}

    client_for(alice).post("/accounts/password/change/", form | {"revoke_keys": "on"})

    assert [bool(find_key(secret=each.secret)) for each in (key, managing, calling)] == [False, False, True]


def test_an_address_is_confirmed_by_a_link_that_lies_in_no_table(db: None, client: Client) -> None:
    sign_up(client)
    payload = OutboxMessage.objects.get(topic="mail").payload
    assert set(payload) == {"kind", "address_id"}

    deliver_due()
    link = re.search(r"http://testserver(/accounts/confirm-email/\S+)", mail.outbox[0].body)[1]
    client.post(link)

    assert EmailAddress.objects.get(email="dana@example.com").verified
    assert client.get("/members").status_code == 200  # in the browser that signed up, the link signs in


def test_the_outbox_holds_no_reset_token(alice: User, client: Client) -> None:
    client.post("/accounts/password/reset/", {"email": alice.email})

    assert set(OutboxMessage.objects.get().payload) == {"kind", "user_id", "email"}


@pytest.mark.parametrize(
    "url",
    [
        "login/",
        "signup/",
        "password/reset/",
        "password/reset/done/",
        "password/reset/key/done/",
        "inactive/",
        "confirm-email/",
        "confirm-email/nope/",
    ],
)
def test_the_sign_in_pages_render(url: str, client: Client, db: None) -> None:
    assert client.get(f"/accounts/{url}").status_code == 200


def test_sign_ins_are_audited_for_the_organizations_of_the_person(
    alice: User, organization: Organization, rival: Organization, client: Client
) -> None:
    for password in ("wrong-password", PASSWORD):
        client.post("/accounts/login/", {"login": alice.email, "password": password}, HTTP_USER_AGENT="Lynx\x07/2.9")
    client.post("/accounts/logout/")
    client.post("/accounts/login/", {"login": "nobody@example.com", "password": "wrong-password"})

    def of(place: Organization | None) -> list[tuple[str, str]]:
        rows = AuditEntry.objects.filter(organization=place, action__startswith="person.").order_by("id")
        return [(entry.action, entry.target) for entry in rows]

    mine = [("person.sign_in_failed", alice.pk), ("person.sign_in", alice.pk), ("person.sign_out", alice.pk)]
    assert of(organization) == mine
    assert of(None) == [*mine, ("person.sign_in_failed", "anonymous")]
    assert of(rival) == []
    entry = AuditEntry.objects.filter(organization=organization, action="person.sign_in").get()
    assert (entry.ip, entry.user_agent, entry.actor) == ("127.0.0.1", "Lynx/2.9", alice.pk)
    assert not AuditEntry.objects.filter(details__icontains="nobody@example.com").exists()


def test_sign_ups_of_one_address_are_limited(db: None, settings: Any) -> None:
    settings.ACCOUNT_RATE_LIMITS = {"signup": "2/h/ip"}

    answers = [sign_up(Client(), email=f"{number}@example.com") for number in range(3)]

    assert [answer.status_code for answer in answers] == [302, 302, 429]
    assert "Wait a few minutes and try again." in answers[-1].content.decode()
    assert User.objects.count() == 2


def test_an_address_gets_three_mails_an_hour_from_resets_and_three_from_sign_ups(
    alice: User, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.ACCOUNT_RATE_LIMITS = base.ACCOUNT_RATE_LIMITS
    clock = count(0, 200)  # seconds: more than the pause between two mails of a kind
    monkeypatch.setattr(ratelimit, "time", SimpleNamespace(time=lambda: next(clock), monotonic=time.monotonic))
    email = alice.email

    resets = [Client().post("/accounts/password/reset/", {"email": email}).status_code for _ in range(4)]
    for _ in range(5):
        sign_up(Client(), email=email)
    deliver_due()

    assert resets == [302, 302, 302, 429]
    assert [message.to for message in mail.outbox] == [[email]] * 6


def test_an_operator_without_an_organization_lands_on_the_console(olga: User, client: Client) -> None:
    answer = client.post("/accounts/login/", {"login": olga.email, "password": PASSWORD})

    assert client.get(answer.headers["Location"]).headers["Location"] == "/staff/"


def test_the_sign_in_page_says_what_was_wrong(alice: User, client: Client) -> None:
    form = client.get("/accounts/login/").content.decode()
    wrong = client.post("/accounts/login/", {"login": alice.email, "password": "wrong-password"}).content.decode()

    assert form.count("Forgot your password?") == 1 and "autofocus" in form
    assert "don't match" in html.unescape(wrong) and "1 field" not in wrong
