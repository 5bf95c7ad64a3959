"""Second factors, and how recent a sign-in must be."""

import re
import time
from collections.abc import Callable
from io import StringIO
from typing import Any

import pytest
from allauth.mfa.models import Authenticator
from allauth.mfa.totp.internal.auth import format_hotp_value, hotp_value
from django.core.management import call_command
from django.test import Client

from apps.accounts.login import second_factor
from apps.accounts.models import ApiKey, Organization, User
from apps.core.models import AuditEntry
from tests.factories.accounts import PASSWORD

# allauth says that an app was added after commit.
pytestmark = pytest.mark.django_db(transaction=True)
ClientFor = Callable[[User | None], Client]
KEY_FORM = {"name": "nightly", "scopes": ["view"], "expires": "90"}


def code_of(secret: str, step: int = 0) -> str:
    return format_hotp_value(hotp_value(secret, int(time.time()) // 30 + step))


def confirm(browser: Client, path: str = "/accounts/second-factor/") -> None:
    browser.post(f"/accounts/reauthenticate/?next={path}", {"password": PASSWORD})


def add_app(browser: Client) -> tuple[str, str]:
    """Set up an authenticator app; return its secret and the page with the recovery codes."""
    confirm(browser)
    page = browser.get("/accounts/second-factor/app/add/").content.decode()
    secret = re.search(r">([A-Z2-7]{32})<", page)[1]
    added = browser.post("/accounts/second-factor/app/add/", {"code": code_of(secret)})
    return secret, browser.get(added.headers["Location"]).content.decode()


def sign_in(user: User) -> Client:
    browser = Client()
    answer = browser.post("/accounts/login/", {"login": user.email, "password": PASSWORD})
    assert answer.headers["Location"] == "/accounts/second-factor/ask/"
    assert browser.get("/keys").status_code == 302  # not signed in yet
    return browser


def make_old(browser: Client) -> None:
    """Let the session have begun an hour ago."""
    session = browser.session
    session["signed_in_at"] = time.time() - 3600
    session.pop("account_authentication_methods", None)
    session.save()


@pytest.mark.slow
def test_an_app_is_set_up_after_the_password_and_asked_for_at_sign_in(alice, organization, client_for):
    browser = client_for(alice)
    assert browser.get("/accounts/second-factor/app/add/").headers["Location"].startswith("/accounts/reauthenticate/")

    secret, codes = add_app(browser)
    visitor = sign_in(alice)
    wrong = visitor.post("/accounts/second-factor/ask/", {"code": "000000"})
    visitor.post("/accounts/second-factor/ask/", {"code": code_of(secret)})

    assert len(re.findall(r"\b\d{8}\b", codes)) == 10
    assert wrong.status_code == 200 and "That code is not right" in wrong.content.decode()
    assert visitor.get("/keys").status_code == 200
    assert secret not in str(Authenticator.objects.values_list("data", flat=True))
    actions = AuditEntry.objects.filter(organization=organization, action__startswith="person.").order_by("id")
    assert [entry.action for entry in actions] == [
        "person.second_factor_added", "person.second_factor_added", "person.second_factor_failed", "person.sign_in",
    ]  # fmt: skip
    assert actions.last().details == {"methods": ["password", "totp"]}


@pytest.mark.slow
def test_a_code_and_a_recovery_code_work_once(alice, organization, client_for):
    secret, codes = add_app(client_for(alice))
    recovery = re.search(r"\b\d{8}\b", codes)[0]

    for code in (code_of(secret), recovery):
        first, second = sign_in(alice), sign_in(alice)
        assert first.post("/accounts/second-factor/ask/", {"code": code}).status_code == 302
        assert second.post("/accounts/second-factor/ask/", {"code": code}).status_code == 200


def test_codes_work_after_the_secret_key_was_replaced_and_the_old_one_dropped(
    alice: User, organization: Organization, client_for: ClientFor, settings: Any
) -> None:
    secret, codes = add_app(client_for(alice))
    recovery = re.search(r"\b\d{8}\b", codes)[0]

    settings.SECRET_KEY, settings.SECRET_KEY_FALLBACKS = "new" * 20, [settings.SECRET_KEY]
    call_command("reseal", stdout=StringIO())
    settings.SECRET_KEY_FALLBACKS = []

    for code in (code_of(secret), recovery):
        assert sign_in(alice).post("/accounts/second-factor/ask/", {"code": code}).headers["Location"] == "/"


def test_a_removed_factor_is_audited_and_no_longer_asked_for(alice, organization, client_for):
    browser = client_for(alice)
    add_app(browser)

    browser.post("/accounts/second-factor/app/remove/")

    assert not Authenticator.objects.exists()  # recovery codes alone would be no second factor
    assert AuditEntry.objects.filter(action="person.second_factor_removed", organization=organization).count() == 2
    answer = Client().post("/accounts/login/", {"login": alice.email, "password": PASSWORD})
    assert answer.headers["Location"] == "/"


@pytest.mark.slow
def test_new_codes_do_not_fill_the_logs_of_a_persons_organizations(alice, bob, organization, client_for):
    browser = client_for(alice)
    add_app(browser)  # the app, and its recovery codes
    made = AuditEntry.objects.filter(
        action__in=("person.second_factor_added", "person.recovery_codes_made"), organization=organization
    )
    for count in range(made.count(), second_factor.MAX_MADE_AN_HOUR):
        assert browser.post("/accounts/second-factor/recovery-codes/new/").status_code == 302, count
    kept = Authenticator.objects.get(type="recovery_codes").data, made.count()

    refused = browser.post("/accounts/second-factor/recovery-codes/new/")

    assert refused.status_code == 429 and "within an hour" in refused.content.decode()
    assert refused.headers["Retry-After"]
    assert (Authenticator.objects.get(type="recovery_codes").data, made.count()) == kept
    add_app(client_for(bob))


def test_the_console_wants_a_second_factor_where_the_installation_does(olga, client_for, settings):
    settings.OPERATOR_MFA = True
    browser, elsewhere = client_for(olga), client_for(olga)

    assert browser.get("/staff/pools").headers["Location"] == "/accounts/second-factor/"
    secret, _ = add_app(browser)

    assert browser.get("/staff/pools").status_code == 200
    # A session from before the factor has not shown it.
    asked = elsewhere.get("/staff/pools").headers["Location"]
    assert asked == "/accounts/second-factor/confirm/?next=%2Fstaff%2Fpools"
    assert elsewhere.post(asked, {"code": code_of(secret)}).headers["Location"] == "/staff/pools"
    assert elsewhere.get("/staff/pools").status_code == 200


def test_an_organization_may_demand_a_second_factor(alice, bob, organization, client_for):
    owner, member = client_for(alice), client_for(bob)
    form = {"is_required": "on"}

    assert owner.post("/organization/second-factor", form).headers["Location"] == "/accounts/second-factor/"
    assert member.get("/members").status_code == 200
    add_app(owner)
    owner.post("/organization/second-factor", form)

    assert owner.get("/members").status_code == 200
    assert member.get("/members").headers["Location"] == "/accounts/second-factor/"
    add_app(member)
    assert member.get("/members").status_code == 200
    owner.post("/organization/second-factor", {})
    assert Organization.objects.get().requires_second_factor is False


@pytest.mark.parametrize("path", ["/keys", "/organization/second-factor"])
def test_a_sensitive_act_wants_a_recent_sign_in_and_goes_on_after_it(
    alice: User, organization: Organization, client_for: ClientFor, path: str
) -> None:
    browser = client_for(alice)
    make_old(browser)

    asked = browser.post(path, KEY_FORM)
    assert asked.headers["Location"].startswith("/accounts/reauthenticate/?next=")
    assert not ApiKey.objects.exists()
    assert browser.post(asked.headers["Location"], {"password": "wrong-password"}).status_code == 200
    assert not ApiKey.objects.exists()
    browser.post(asked.headers["Location"], {"password": PASSWORD})

    assert ApiKey.objects.count() == (1 if path == "/keys" else 0)
    assert browser.post(path, KEY_FORM | {"name": "second"}).status_code == 302


def test_reading_wants_no_recent_sign_in(alice, organization, client_for):
    browser = client_for(alice)
    make_old(browser)

    assert browser.get("/keys").status_code == 200


@pytest.mark.parametrize(
    ("who", "idle_seconds", "is_out"), [("olga", 1801, True), ("olga", 600, False), ("alice", 1801, False)]
)
def test_an_operator_who_was_away_is_signed_out(
    who: str, idle_seconds: int, is_out: bool, request: Any, client_for: ClientFor, settings: Any
) -> None:
    settings.OPERATOR_IDLE_SECONDS = 1800
    browser = client_for(request.getfixturevalue(who))
    browser.get("/organization/new")
    session = browser.session
    if "operator_seen_at" in session:
        session["operator_seen_at"] -= idle_seconds
        session.save()

    answer = browser.get("/organization/new")

    assert (answer.status_code == 302) is is_out
    assert AuditEntry.objects.filter(action="person.session_idle").exists() is is_out


@pytest.mark.parametrize(("method", "mark", "is_out"), [("get", "1", True), ("post", "1", True), ("get", None, False)])
def test_polls_of_an_open_page_keep_no_operator_signed_in(
    olga: Any, client_for: ClientFor, settings: Any, method: str, mark: str | None, is_out: bool
) -> None:
    settings.OPERATOR_IDLE_SECONDS = 1800
    browser = client_for(olga)
    browser.get("/staff/")
    headers = {"HX-Request": "true", "HX-Current-URL": "http://testserver/staff/jobs?q=x"}
    headers |= {"X-Poll": mark} if mark else {}
    for _ in range(2):  # a quarter of an hour before each answer, and after the last one
        session = browser.session
        session["operator_seen_at"] -= 1000
        session.save()
        answer = getattr(browser, method)("/staff/search?q=", headers=headers)

    back = "/accounts/login/?next=/staff/jobs%3Fq%3Dx"
    assert answer.status_code == 200 and answer.headers.get("HX-Redirect") == (back if is_out else None)
    if is_out:
        assert browser.get("/staff/search?q=", headers=headers).headers["HX-Redirect"] == back
        page = browser.get(back).content.decode()
        assert "You were signed out because you were away." in page and "nothing was sent" not in page
