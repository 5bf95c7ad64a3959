"""Bearer keys at the door of the API: what works, what does not, and what it is called."""

import datetime
from collections.abc import Callable

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from rest_framework.test import APIClient

from apps.accounts.login.api_keys import LIVE_PREFIX, new_secret
from apps.accounts.login.key_operations import IssuedKey, revoke_key
from apps.accounts.members.memberships import remove_member
from apps.accounts.models import Membership, Organization, User
from apps.core.database.clock import db_now
from tests.factories.accounts import make_key, make_member, make_member_token

ApiClient = Callable[[IssuedKey | str | None], APIClient]
ME = "/api/v1/me"


def test_a_key_speaks_for_its_organization(key: IssuedKey, organization: Organization, api_client: ApiClient) -> None:
    body = api_client(key).get(ME).json()

    assert body["organization"] == {"id": organization.pk, "name": "Acme", "slug": "acme", "regions": None}
    assert body["key"]["id"] == key.key.pk


@pytest.mark.parametrize(
    "header",
    [
        "",
        "Bearer",
        "Bearer ",
        "Basic YTpi",
        "Bearer sk-not-ours",
        "Bearer ann_live_short",
        pytest.param(f"Bearer {new_secret(LIVE_PREFIX)}", id="well formed and unknown"),
        "Bearer ann_live_\udcff",
        pytest.param("Bearer " + "x" * 5000, id="long"),
    ],
)
def test_anything_else_is_401_in_openais_shape(header: str, api_client: ApiClient) -> None:
    client = api_client(None)
    if header:
        client.credentials(HTTP_AUTHORIZATION=header)

    response = client.get(ME)

    assert response.status_code == 401
    error = response.json()["error"]
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", None, "invalid_api_key")
    assert response.headers["WWW-Authenticate"] == "Bearer"
    assert response.headers["x-request-id"]


def test_a_typing_error_is_told_without_a_query(key: IssuedKey, api_client: ApiClient) -> None:
    wrong = key.secret[:-1] + ("a" if key.secret[-1] != "a" else "b")

    with CaptureQueriesContext(connection) as queries:
        response = api_client(wrong).get(ME)

    assert response.status_code == 401
    assert len(queries) == 0


def test_an_error_never_repeats_a_key(key: IssuedKey, alice: User, api_client: ApiClient) -> None:
    revoke_key(organization=key.key.organization, key_id=key.key.pk, by=alice, now=db_now())

    response = api_client(key).get(ME)

    assert response.status_code == 401
    assert key.secret not in response.content.decode()


def test_an_expired_key_is_401(organization: Organization, alice: User, api_client: ApiClient) -> None:
    issued = make_key(organization, alice, expires_at=db_now() + datetime.timedelta(days=1))
    issued.key.expires_at = db_now() - datetime.timedelta(seconds=1)
    issued.key.save(update_fields=["expires_at"])

    assert api_client(issued).get(ME).status_code == 401


def test_the_keys_of_a_suspended_organization_are_401(key: IssuedKey, api_client: ApiClient) -> None:
    Organization.objects.update(suspended_at=db_now())

    assert api_client(key).get(ME).status_code == 401


def test_the_keys_of_somebody_who_was_removed_are_401(
    organization: Organization, alice: User, api_client: ApiClient
) -> None:
    bob = make_member(organization, "member")
    issued = make_key(organization, bob, scopes=frozenset({"view"}))
    membership = Membership.objects.get(user=bob)

    remove_member(organization=organization, membership_id=membership.pk, by=alice, now=db_now())

    assert api_client(issued).get(ME).status_code == 401


def test_a_key_loses_what_its_creators_role_loses(organization: Organization, api_client: ApiClient) -> None:
    bob = make_member(organization, "member")
    issued = make_key(organization, bob, scopes=frozenset({"view", "dataset.write"}))

    Membership.objects.filter(user=bob).update(role="viewer")

    assert api_client(issued).get(ME).json()["key"]["scopes"] == ["view"]


def test_a_key_without_the_scope_is_403_and_says_which(
    organization: Organization, alice: User, api_client: ApiClient
) -> None:
    issued = make_key(organization, alice, scopes=frozenset({"inference"}))

    response = api_client(issued).get(ME)

    assert response.status_code == 403
    assert response.json()["error"]["code"] == "insufficient_permissions"
    assert response.json()["error"]["required_scope"] == "view"


def test_a_members_token_may_infer_and_nothing_else(
    organization: Organization, alice: User, api_client: ApiClient
) -> None:
    issued = make_member_token(organization, alice)

    assert issued.secret.startswith("ann_web_")
    assert api_client(issued).get(ME).status_code == 403


def test_last_use_is_noted_once_a_minute(key: IssuedKey, api_client: ApiClient) -> None:
    client = api_client(key)
    client.get(ME)
    key.key.refresh_from_db()
    first = key.key.last_used_at

    client.get(ME)

    key.key.refresh_from_db()
    assert first is not None
    assert key.key.last_used_at == first


def test_a_session_is_no_key(alice: User, organization: Organization, api_client: ApiClient) -> None:
    client = api_client(None)
    client.force_login(alice)

    assert client.get(ME).status_code == 401


def test_a_key_in_the_address_is_no_key(key: IssuedKey, api_client: ApiClient) -> None:
    assert api_client(None).get(ME, {"api_key": key.secret}).status_code == 401
