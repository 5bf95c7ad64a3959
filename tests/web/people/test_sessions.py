"""A person sees where they are signed in, and signs out of other sessions."""

import datetime
import time

import pytest
from allauth.usersessions.models import UserSession
from django.conf import settings
from django.contrib.sessions.models import Session
from django.test import Client

from apps.accounts.login import sessions
from apps.accounts.queries import find_key
from apps.core.database.clock import db_now
from apps.core.models import AuditEntry
from apps.interfaces.web.account.sessions import describe_device, shorten_address
from tests.factories.accounts import PASSWORD
from tests.support.pages import text

FIREFOX = "Mozilla/5.0 (X11; Linux x86_64; rv:140.0) Gecko/20100101 Firefox/140.0"
SAFARI = "Mozilla/5.0 (iPhone; CPU iPhone OS 18_0 like Mac OS X) AppleWebKit/605.1.15 Version/18.0 Safari/604.1"


@pytest.fixture
def sign_in(alice, organization):
    def sign_in(user_agent: str = FIREFOX, user=alice) -> Client:
        client = Client(headers={"user-agent": user_agent})
        client.post("/accounts/login/", {"login": user.email, "password": PASSWORD})
        return client

    return sign_in


def test_every_session_is_listed_in_words_and_this_one_is_marked(sign_in):
    here, _ = sign_in(), sign_in(SAFARI)

    page = text(here.get("/account/sessions"))

    assert "Firefox on Linux" in page and "Safari on iPhone" in page and "127.0.0.0/24" in page
    assert page.count("This session") == 1
    assert "This session" in page.partition("Firefox on Linux")[2].partition("</tr>")[0]


@pytest.mark.slow
def test_one_session_or_all_others_are_ended(sign_in, bob):
    here, phone, tablet = sign_in(), sign_in(SAFARI), sign_in(SAFARI)
    of_bob = sign_in(user=bob)
    chosen = UserSession.objects.get(session_key=phone.session.session_key)

    here.post("/account/sessions", {"session": chosen.pk})
    assert [each.get("/account").status_code for each in (here, phone, tablet)] == [200, 302, 200]
    here.post("/account/sessions")

    assert [each.get("/account").status_code for each in (here, tablet, of_bob)] == [200, 302, 200]
    assert AuditEntry.objects.filter(action="person.sessions_ended", organization=None).count() == 2


def test_the_tokens_of_a_browser_end_with_its_session_and_with_the_password(sign_in):
    here, stolen = sign_in(), sign_in(SAFARI)
    new = "another-good-password"

    token = stolen.post("/playground/token").json()["token"]
    assert find_key(secret=token)
    here.post("/account/sessions")
    after_session, token = find_key(secret=token), here.post("/playground/token").json()["token"]
    here.post("/accounts/password/change/", {"oldpassword": PASSWORD, "password1": new, "password2": new})

    assert (after_session, find_key(secret=token)) == (None, None)


def test_the_tokens_of_a_browser_end_when_its_person_signs_out(sign_in):
    here = sign_in()
    token = here.post("/playground/token").json()["token"]

    here.post("/accounts/logout/")

    assert find_key(secret=token) is None


def test_a_session_of_another_person_is_not_ended(sign_in, bob):
    of_bob = sign_in(user=bob)
    theirs = UserSession.objects.get(session_key=of_bob.session.session_key)

    sign_in().post("/account/sessions", {"session": theirs.pk})

    assert of_bob.get("/account").status_code == 200


def test_a_new_password_leaves_this_session_alone_in_the_list(sign_in):
    here, _ = sign_in(), sign_in(SAFARI)
    new = "another-good-password"
    here.post("/accounts/password/change/", {"oldpassword": PASSWORD, "password1": new, "password2": new})

    page = text(here.get("/account/sessions"))

    assert "This session" in page and "Safari on iPhone" not in page


def test_a_person_has_a_limited_number_of_sessions(sign_in, monkeypatch):
    monkeypatch.setattr(sessions, "MAX_SESSIONS", 2)
    first = sign_in()
    token = first.post("/playground/token").json()["token"]
    others = [sign_in() for _ in range(3)]

    assert find_key(secret=token) is None
    assert first.get("/account").status_code == 302
    assert others[-1].get("/account").status_code == 200
    assert UserSession.objects.count() == 2


def test_last_seen_is_stored_again_after_some_minutes(sign_in):
    here = sign_in()
    long_ago = db_now() - datetime.timedelta(days=1)
    UserSession.objects.update(last_seen_at=long_ago)
    here.get("/account")
    assert UserSession.objects.get().last_seen_at == long_ago
    session = here.session
    session["last_seen_at"] = time.time() - 3600
    session.save()

    here.get("/account")

    assert abs((UserSession.objects.get().last_seen_at - db_now()).total_seconds()) < 60


@pytest.mark.django_db
@pytest.mark.parametrize("key", [r'"abcdefgh\000"', "a" * 4_000, "schlüssel"])
def test_a_cookie_that_holds_no_key_of_a_session_is_nobodys(client, key):
    cookie = f"{settings.SESSION_COOKIE_NAME}={key}"

    assert client.get("/datasets", headers={"cookie": cookie}).status_code == 302


def test_expired_sessions_are_swept(sign_in):
    gone, here = sign_in(), sign_in()
    Session.objects.filter(session_key=gone.session.session_key).update(expire_date="2026-01-01T00:00:00Z")

    sessions.sweep_sessions(now=db_now())

    assert [each.session_key for each in UserSession.objects.all()] == [here.session.session_key]
    assert Session.objects.count() == 1


@pytest.mark.parametrize(
    ("user_agent", "words"),
    [
        (FIREFOX, "Firefox on Linux"),
        (SAFARI, "Safari on iPhone"),
        ("Mozilla/5.0 (Windows NT 10.0) AppleWebKit/537.36 Chrome/140.0 Safari/537.36 Edg/140.0", "Edge on Windows"),
        ("Mozilla/5.0 (Linux; Android 15) AppleWebKit/537.36 Chrome/140.0 Mobile Safari/537.36", "Chrome on Android"),
        ("curl/8", "Unknown browser"),
    ],
)
def test_a_user_agent_is_told_in_words(user_agent, words):
    assert describe_device(user_agent) == words


@pytest.mark.parametrize(
    ("address", "network"), [("203.0.113.77", "203.0.113.0/24"), ("2001:db8:1:2::3", "2001:db8:1::/48")]
)
def test_an_address_is_shortened_to_its_network(address, network):
    assert shorten_address(address) == network


@pytest.mark.parametrize(
    ("sender", "back"),
    [
        ("http://testserver/members?q=x", "/members%3Fq%3Dx"),
        ("https://elsewhere.example/members", "/"),
        ("http://testserver//elsewhere.example/x", "/"),
        ("http://[::1", "/"),
        (None, "/"),
    ],
)
def test_a_form_sent_after_the_session_ended_leads_back_to_its_page(sign_in, sender, back):
    browser = sign_in()
    browser.logout()

    headers = {"Referer": sender} if sender else {}
    answer = browser.post("/members/invite", {"email": "new@example.com", "role": "member"}, headers=headers)

    assert answer.headers["Location"] == f"/accounts/login/?next={back}"
    assert "You were signed out, so nothing was sent." in text(browser.get(answer.headers["Location"]))


def test_the_address_of_a_form_says_that_it_has_no_page(sign_in):
    answer = sign_in().get("/members/invite")

    assert answer.status_code == 405 and answer.headers["Allow"] == "POST"
    assert "This address has no page" in text(answer)
