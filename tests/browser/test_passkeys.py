"""Passkeys, with the authenticator that Chromium plays: added after the password, then the second step of a sign-in."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
from allauth.mfa.models import Authenticator
from playwright.sync_api import Browser, Page, expect

from apps.accounts.models import User
from tests.factories.accounts import PASSWORD, make_organization, make_user
from tests.support.browser import wait_until

AUTHENTICATOR = {
    "protocol": "ctap2",
    "transport": "internal",
    "hasResidentKey": True,
    "hasUserVerification": True,
    "isUserVerified": True,
}


@pytest.fixture
def page(browser: Browser, server_url: str, web_application: Any, transactional_db: None) -> Iterator[Page]:
    """A page with an authenticator. A passkey belongs to a host name: an address such as 127.0.0.1 has none."""
    context = browser.new_context(base_url=server_url.replace("127.0.0.1", "localhost"))
    page = context.new_page()
    devices = context.new_cdp_session(page)
    devices.send("WebAuthn.enable")
    devices.send("WebAuthn.addVirtualAuthenticator", {"options": AUTHENTICATOR})
    yield page
    settle(page)
    context.close()
    wait_until(lambda: not web_application.under_way)


def settle(page: Page) -> None:
    """Let the page load to its end: what a navigation breaks off leaves an open file in the server."""
    page.wait_for_load_state("networkidle")


def sign_in(page: Page, user: User) -> None:
    page.goto("/accounts/login/", wait_until="networkidle")
    page.get_by_label("Email").fill(user.email)
    page.get_by_label("Password").fill(PASSWORD)
    page.get_by_role("button", name="Sign in").click()
    settle(page)


@pytest.mark.slow
def test_a_passkey_is_added_and_signs_in(page: Page) -> None:
    user = make_user("dana")
    make_organization("Dana Labs", owner=user)
    sign_in(page, user)
    page.goto("/accounts/second-factor/passkeys/add/", wait_until="networkidle")
    page.get_by_label("Password").fill(PASSWORD)
    page.get_by_role("button", name="Continue").click()
    expect(page.get_by_role("button", name="Add passkey")).to_be_visible()
    settle(page)

    page.get_by_role("button", name="Add passkey").click()
    expect(page.get_by_role("heading", name="Recovery codes", exact=True)).to_be_visible()
    settle(page)
    page.context.clear_cookies()
    sign_in(page, user)
    expect(page).to_have_url(re.compile("/accounts/second-factor/ask/$"))
    settle(page)
    page.get_by_role("button", name="Use a passkey").click()

    expect(page).to_have_url(re.compile(r"localhost:\d+/$"))
    used = Authenticator.objects.get(user=user, type=Authenticator.Type.WEBAUTHN)
    assert used.last_used_at is not None
