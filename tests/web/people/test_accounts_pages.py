"""Members, invitations, keys and organizations, as a browser sees them."""

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from allauth.account.models import EmailAddress
from django.core import mail
from django.db import transaction
from django.test import Client

from apps.accounts.login.key_operations import IssuedKey
from apps.accounts.members.invitations import invitation_token, invite_member
from apps.accounts.models import ApiKey, Invitation, Membership, Organization, User
from apps.accounts.queries import KeyLimits, find_key, get_key_limits
from apps.billing.lots import open_lot
from apps.billing.models import LotKind
from apps.core.database.clock import db_now
from apps.core.messages.outbox import deliver_due
from tests.factories.accounts import make_member, make_organization, make_user, sign_up
from tests.support.pages import text

ClientFor = Callable[[User | None], Client]


@pytest.mark.slow
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


def test_a_refused_invitation_says_why_and_how_to_use_the_right_address(
    alice: User, organization: Organization, client_for: ClientFor
) -> None:
    invite_member(organization=organization, email="x@example.com", role="admin", by=alice, now=db_now())
    link = f"/invitations/accept/{invitation_token(Invitation.objects.get().pk)}"
    other = client_for(make_user("other"))

    refused, member = other.post(link), text(client_for(alice).post(link))
    left = other.post("/accounts/logout/", {"next": link})

    assert refused.status_code == 403
    assert "<h1>This invitation is for another address</h1>" in text(refused)
    assert "Sign out and use x@example.com" in text(refused) and f'name="next" value="{link}"' in text(refused)
    assert left.headers["Location"] == link and "Sign in" in text(other.get(link))
    assert "<h1>You are already a member</h1>" in member and "Sign out and use" not in member


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


def test_a_key_is_revoked_only_after_its_name_was_typed(key: IssuedKey, alice: User, client_for: ClientFor) -> None:
    browser = client_for(alice)
    address = f"/keys/revoke?key={key.key.pk}"

    assert f'href="{address}"' in browser.get("/keys").content.decode()
    assert "stop working at once. It was never used." in browser.get(address).content.decode()
    assert browser.post("/keys/revoke", {"key": key.key.pk, "confirm": "other"}).status_code == 422
    assert find_key(secret=key.secret) is not None
    assert browser.post("/keys/revoke", {"key": key.key.pk, "confirm": key.key.name}).headers["Location"] == "/keys"
    assert find_key(secret=key.secret) is None


def test_the_last_owner_reads_why_they_cannot_go(
    alice: User, organization: Organization, client_for: ClientFor
) -> None:
    browser, mine = client_for(alice), Membership.objects.get(user=alice).pk

    leaving = {"member": mine, "confirm": str(alice)}
    for path, data in ((f"/members/{mine}/role", {"role": "admin"}), ("/members/remove", leaving)):
        page = browser.post(path, data, follow=True)
        assert len(page.redirect_chain) == 1
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


def test_a_trackers_key_is_stored_shown_by_its_end_and_removed(client_for, bob, vera):
    browser = client_for(bob)

    browser.post("/organization/trackers", {"kind": "wandb", "key": "wandb-key-0123456789"})
    page = browser.get("/organization/trackers").content.decode()
    refused = browser.post("/organization/trackers", {"kind": "mlflow", "key": "0123456789", "url": "http://x.example"})

    assert "…6789" in page and "wandb-key" not in page and "Remove the key of" in page
    assert refused.status_code == 422 and "https address" in refused.content.decode()
    assert client_for(vera).post("/organization/trackers/wandb/remove").status_code == 403
    assert browser.post("/organization/trackers/wandb/remove").status_code == 302
    assert "No key yet" in browser.get("/organization/trackers").content.decode()


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
