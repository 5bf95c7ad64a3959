"""Sign-up, sign-in, password reset, members, invitations, keys and organizations, as a browser sees them."""

import html
import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from allauth.account.models import EmailAddress
from django.core import mail
from django.db import transaction
from django.test import Client

from apps.accounts.invitations import invite_member
from apps.accounts.models import ApiKey, Invitation, Membership, Organization, User
from apps.accounts.operations import IssuedKey
from apps.accounts.queries import KeyLimits, find_key, get_key_limits
from apps.billing.lots import open_lot
from apps.billing.models import LotKind
from apps.core.database.clock import db_now
from apps.core.messages.outbox import deliver_due
from apps.core.models import AuditEntry, OutboxMessage
from tests.factories.accounts import PASSWORD, make_key, make_member, make_organization, make_user

ClientFor = Callable[[User | None], Client]


def sign_up(client: Client, **fields: str) -> object:
    form = {"email": "dana@example.com", "password1": PASSWORD, "name": "Dana", "organization": "Dana Labs"}
    return client.post("/accounts/signup/", form | fields)


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


def test_an_invitation_brings_a_new_person_in_as_member(
    alice: User, organization: Organization, client_for: ClientFor, client: Client
) -> None:
    client_for(alice).post("/members/invite", {"email": "New@Example.com", "role": "member"})
    deliver_due()
    link = re.search(r"http://testserver(/invitations/\S+)", mail.outbox[0].body)[1]

    assert "Join Acme" in client.get(link).content.decode()
    form = client.get("/accounts/signup/").content.decode()
    assert "new@example.com" in form and 'name="organization"' not in form
    sign_up(client, email="new@example.com")  # opening the link has shown that the address is theirs
    joined = client.post(link)

    assert joined.status_code == 302
    assert not Organization.objects.exclude(pk=organization.pk).exists()
    membership = Membership.objects.get(user__email="new@example.com")
    assert (membership.organization, membership.role) == (organization, "member")
    assert client.get("/members").context["organization"] == organization


def test_an_invitation_works_once(alice: User, organization: Organization, client_for: ClientFor) -> None:
    invite_member(organization=organization, email="x@example.com", role="viewer", by=alice, now=db_now())
    deliver_due()
    link = re.search(r"http://testserver(/invitations/\S+)", mail.outbox[0].body)[1]
    client_for(make_user("first")).post(link)

    second = client_for(make_user("second")).post(link)

    assert second.status_code == 400
    assert "used, withdrawn or has expired" in second.content.decode()
    assert Membership.objects.filter(organization=organization).count() == 2


def test_an_invitation_to_another_address_confirms_nothing(
    alice: User, organization: Organization, client: Client
) -> None:
    invite_member(organization=organization, email="x@example.com", role="viewer", by=alice, now=db_now())
    deliver_due()
    client.get(re.search(r"http://testserver(/invitations/\S+)", mail.outbox[0].body)[1])

    response = sign_up(client, email="y@example.com")

    assert response.headers["Location"] == "/accounts/confirm-email/"
    assert [(each.email, each.verified) for each in EmailAddress.objects.filter(user__email="y@example.com")] == [
        ("y@example.com", False)
    ]


def test_an_unknown_invitation_is_not_found(client: Client, db: None) -> None:
    assert client.get("/invitations/accept/0123").status_code == 404


def test_a_withdrawn_invitation_is_closed_and_its_mail_is_not_sent(
    alice: User, organization: Organization, client_for: ClientFor
) -> None:
    browser = client_for(alice)
    browser.post("/members/invite", {"email": "x@example.com", "role": "viewer"})
    invitation = Invitation.objects.get()

    browser.post(f"/invitations/{invitation.pk}/revoke")
    deliver_due()

    assert mail.outbox == []


def test_a_bad_invitation_comes_back_with_its_error(
    alice: User, organization: Organization, bob: User, client_for: ClientFor
) -> None:
    response = client_for(alice).post("/members/invite", {"email": bob.email, "role": "viewer"})

    assert response.status_code == 422
    assert "already a member" in response.content.decode()


def test_a_member_without_the_right_sees_no_form_and_is_refused(bob: User, client_for: ClientFor) -> None:
    browser = client_for(bob)

    assert "Send invitation" not in browser.get("/members").content.decode()
    assert browser.post("/members/invite", {"email": "x@example.com", "role": "viewer"}).status_code == 403


def test_a_key_is_shown_once(alice: User, organization: Organization, client_for: ClientFor) -> None:
    browser = client_for(alice)
    form = {"name": "nightly", "scopes": ["view", "inference"], "expires": "90"}

    created = browser.post("/keys", form)
    in_session = json.dumps(dict(browser.session))
    shown = browser.get(created.headers["Location"]).content.decode()
    secret = re.search(r"ann_live_\w{36}", shown)[0]

    assert created.headers["Location"] == "/keys"  # to reload what follows makes no second key
    assert find_key(secret=secret).scopes == {"view", "inference"}
    assert secret not in browser.get("/keys").content.decode()
    assert ApiKey.objects.get().hmac != secret
    assert secret not in in_session


def test_a_key_is_revoked_after_a_question(key: IssuedKey, alice: User, client_for: ClientFor) -> None:
    page = client_for(alice).get("/keys").content.decode()

    assert f'data-open="revoke-{key.key.pk}"' in page
    assert re.search(rf'<dialog[^>]*id="revoke-{key.key.pk}".*?action="/keys/{key.key.pk}/revoke"', page, re.DOTALL)


def test_the_last_owner_reads_why_they_cannot_go(
    alice: User, organization: Organization, client_for: ClientFor
) -> None:
    browser, mine = client_for(alice), Membership.objects.get(user=alice).pk

    for path, data in ((f"/members/{mine}/role", {"role": "admin"}), (f"/members/{mine}/remove", {})):
        page = browser.post(path, data, follow=True)
        assert page.redirect_chain == [("/members", 302)]
        assert "give another member that role first" in page.content.decode()


def test_a_customer_at_the_console_reads_whose_it_is(
    alice: User, organization: Organization, client_for: ClientFor
) -> None:
    page = client_for(alice).get("/staff/pools")

    assert page.status_code == 403
    assert "for the operators of this installation" in page.content.decode()


def test_a_key_may_have_limits_of_its_own(alice: User, organization: Organization, client_for: ClientFor) -> None:
    form = {"name": "nightly", "scopes": ["inference"], "expires": "90", "tokens_per_minute": "500"}

    client_for(alice).post("/keys", form)
    refused = client_for(alice).post("/keys", form | {"concurrent_requests": "0"})

    assert get_key_limits(key_id=ApiKey.objects.get().pk) == KeyLimits(tokens_per_minute=500)
    assert refused.status_code == 422


def test_a_revoked_key_stops_working(key: IssuedKey, alice: User, client_for: ClientFor) -> None:
    client_for(alice).post(f"/keys/{key.key.pk}/revoke")

    assert find_key(secret=key.secret) is None


def test_a_person_switches_between_organizations_of_their_own_only(
    alice: User, organization: Organization, rival: Organization, client_for: ClientFor
) -> None:
    second = make_organization("Second", owner=alice)
    browser = client_for(alice)

    assert browser.post("/organization/switch", {"organization": second.pk}).status_code == 302
    assert browser.get("/organization").context["organization"] == second
    assert browser.post("/organization/switch", {"organization": rival.pk}).status_code == 404


def test_somebody_without_an_organization_is_led_to_create_one(db: None, client_for: ClientFor) -> None:
    browser = client_for(make_user("loner"))

    assert browser.get("/members").headers["Location"] == "/organization/new"
    browser.post("/organization/new", {"name": "Mine"})

    assert browser.get("/members").context["organization"].name == "Mine"


def test_an_owner_renames_the_organization_and_its_slug_stays(
    alice: User, organization: Organization, client_for: ClientFor
) -> None:
    client_for(alice).post("/organization", {"name": "Acme  Two"})

    organization.refresh_from_db()
    assert (organization.name, organization.slug) == ("Acme Two", "acme")


def test_a_suspended_organization_is_closed(organization: Organization, alice: User, client_for: ClientFor) -> None:
    organization.suspended_at = db_now()
    organization.save(update_fields=["suspended_at"])

    assert client_for(alice).get("/members").status_code == 403


def test_the_theme_is_kept_in_a_cookie(client: Client) -> None:
    response = client.post("/theme", {"theme": "dark"}, headers={"referer": "http://evil.example/x"})

    assert response.headers["Location"] == "/"
    assert client.cookies["theme"].value == "dark"
    assert client.post("/theme", {"theme": "blink"}).status_code == 400


@pytest.mark.parametrize("role", ["viewer", "member", "admin", "owner"])
@pytest.mark.parametrize(
    "url", ["/members", "/keys", "/organization", "/organization/new", "/accounts/password/change/"]
)
def test_every_role_can_read_every_account_page(
    role: str, url: str, organization: Organization, client_for: ClientFor
) -> None:
    assert client_for(make_member(organization, role)).get(url).status_code == 200


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


def test_a_trackers_key_is_stored_shown_by_its_end_and_removed(client_for, bob, vera):
    browser = client_for(bob)

    browser.post("/organization/trackers", {"kind": "wandb", "key": "wandb-key-0123456789"})
    page = browser.get("/organization/trackers").content.decode()
    refused = browser.post("/organization/trackers", {"kind": "mlflow", "key": "0123456789", "url": "http://x.example"})

    assert "…6789" in page and "wandb-key" not in page
    assert refused.status_code == 422 and "https address" in refused.content.decode()
    assert client_for(vera).post("/organization/trackers/wandb/remove").status_code == 403
    assert browser.post("/organization/trackers/wandb/remove").status_code == 302
    assert "No key yet" in browser.get("/organization/trackers").content.decode()


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


def test_a_person_who_never_paid_creates_a_few_organizations(
    alice: User, bob: User, client_for: ClientFor, settings: Any
) -> None:
    settings.MAX_UNPAID_ORGANIZATIONS = 2
    browser = client_for(alice)  # the founder of Acme

    assert browser.post("/organization/new", {"name": "Second"}).status_code == 302
    refused = browser.post("/organization/new", {"name": "Third"})
    # To leave one, or to be a member of others, changes nothing.
    assert refused.status_code == 422 and "Pay into one of them" in refused.content.decode()
    assert client_for(bob).post("/organization/new", {"name": "Bob's"}).status_code == 302
    with transaction.atomic():
        open_lot(
            organization_id=Organization.objects.get(name="Second").pk, kind=LotKind.PAID, amount_nano=1_000_000_000
        )

    assert browser.post("/organization/new", {"name": "Third"}).status_code == 302


def test_sign_ups_of_one_address_are_limited(db: None, settings: Any) -> None:
    settings.ACCOUNT_RATE_LIMITS = {"signup": "2/h/ip"}

    answers = [sign_up(Client(), email=f"{number}@example.com").status_code for number in range(3)]

    assert answers == [302, 302, 429]
    assert User.objects.count() == 2


def test_an_operator_without_an_organization_lands_on_the_console(olga: User, client: Client) -> None:
    answer = client.post("/accounts/login/", {"login": olga.email, "password": PASSWORD})

    assert client.get(answer.headers["Location"]).headers["Location"] == "/staff/organizations"


def test_the_sign_in_page_says_what_was_wrong(alice: User, client: Client) -> None:
    form = client.get("/accounts/login/").content.decode()
    wrong = client.post("/accounts/login/", {"login": alice.email, "password": "wrong-password"}).content.decode()

    assert form.count("Forgot your password?") == 1 and "autofocus" in form
    assert "don't match" in html.unescape(wrong) and "1 field" not in wrong
