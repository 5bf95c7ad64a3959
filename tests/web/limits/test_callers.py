"""Who sends a request: told from its headers, once a minute from the database."""

import asyncio
from typing import Any

import pytest
from django.conf import settings
from django.db import OperationalError

from apps.accounts.login.api_keys import LIVE_PREFIX, new_secret
from apps.accounts.shares import give_own_share
from apps.core.errors import Unavailable
from apps.interfaces.web.edge import callers
from apps.interfaces.web.shell.access import SESSION_ORGANIZATION
from tests.factories.accounts import make_organization

pytestmark = pytest.mark.django_db(transaction=True)


def find(**headers: str) -> Any:
    scope = {"headers": [(name.encode(), value.encode()) for name, value in headers.items()]}
    return asyncio.run(callers.find(callers.credential_of(scope)))


def cookie(browser: Any) -> str:
    return f"{settings.SESSION_COOKIE_NAME}={browser.cookies[settings.SESSION_COOKIE_NAME].value}"


def test_a_key_speaks_for_its_creator_and_organization(key, organization, alice) -> None:
    give_own_share(organization=organization)
    found = find(authorization=f"bearer  {key.secret} ")

    assert (found.person, found.organization) == (f"person {alice.pk}", f"organization {organization.pk}")
    assert find(authorization=f"Bearer {new_secret(LIVE_PREFIX)}") is find(authorization="Bearer x") is find() is None


def test_a_session_counts_for_the_organization_it_shows(alice, organization, client_for) -> None:
    second = make_organization("Second", owner=alice)
    for each in (organization, second):
        give_own_share(organization=each)
    browser = client_for(alice)
    first = find(cookie=cookie(browser))
    session = browser.session
    session[SESSION_ORGANIZATION] = second.pk
    session.save()
    callers._known.clear()
    switched = find(cookie=cookie(browser))
    session[SESSION_ORGANIZATION] = "org_of_others"
    session.save()
    callers._known.clear()

    assert first.organization == f"organization {organization.pk}" == find(cookie=cookie(browser)).organization
    assert switched == first._replace(organization=f"organization {second.pk}")
    assert find(cookie=cookie(client_for(None)) if client_for(None).cookies else "sessionid=none") is None


def test_organizations_without_a_share_of_their_own_count_as_their_founder(key, organization, alice, client_for):
    found = [find(authorization=f"Bearer {key.secret}"), find(cookie=cookie(client_for(alice)))]

    assert {caller.organization for caller in found} == {f"organization {alice.pk}"}


def test_the_answer_is_kept_for_a_minute(key, django_assert_num_queries) -> None:
    credential = (key.secret, "")
    assert callers.recall(credential) is None
    found = find(authorization=f"Bearer {key.secret}")

    assert callers.recall(credential) == found
    assert key.secret not in repr(callers._known)


def test_a_session_signed_with_an_earlier_secret_key_goes_on(alice, client_for, settings) -> None:
    browser = client_for(alice)
    settings.SECRET_KEY, settings.SECRET_KEY_FALLBACKS = "new" * 20, [settings.SECRET_KEY]

    found = find(cookie=cookie(browser))

    assert found.person == f"person {alice.pk}"
    for fallbacks in (settings.SECRET_KEY_FALLBACKS, []):  # the first answer is signed with the new key
        settings.SECRET_KEY_FALLBACKS = fallbacks
        assert browser.get("/account").status_code == 200


def test_a_database_that_does_not_answer_is_named(key, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(**_: object) -> None:
        raise OperationalError("the connection was closed")

    monkeypatch.setattr(callers, "find_key", away)

    with pytest.raises(Unavailable) as refusal:
        find(authorization=f"Bearer {key.secret}")

    assert refusal.value.data["retry_after_seconds"] == 5
