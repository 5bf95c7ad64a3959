"""Every address × who asks × method × whose id: no caller reads, changes or even detects another tenant's objects.

The world is built once; each request is undone. What to try on an address stands in `urls`.
"""

import html
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from django.conf import settings
from django.db import transaction
from django.http import HttpRequest, HttpResponse
from django.test import Client
from django.urls import URLPattern, URLResolver, get_resolver

from apps.accounts.roles import ROLES, has_permission
from apps.accounts.roles import Permission as P  # noqa: N817 - one line per address
from apps.interfaces.api.openai import webhook_endpoints
from apps.interfaces.api.views import ApiView
from tests.guards.makers.tenants import Tenant, World, narrow_secret, rows_of, undone
from tests.guards.urls import URLS
from tests.guards.urls.asking import (
    SESSIONS,
    VIEWING,
    address,
    ask,
    assert_no_leak,
    body,
    browser,
    client_of,
    comparable,
    id_of,
    sign_in,
    tables_of,
    view_acme,
)
from tests.guards.urls.kinds import Url
from tests.guards.world import MAKERS, SHARED, build_world

pytestmark = pytest.mark.django_db  # inside the world's transaction: each test is a savepoint of it
Rows = dict[str, dict[str, str]]
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")
PAGES = sorted(name for name, url in URLS.items() if url.kind == "page")
APIS = sorted(name for name, url in URLS.items() if url.kind == "api")
STAFF = sorted(name for name, url in URLS.items() if url.kind == "staff")
PEOPLE = sorted(name for name, url in URLS.items() if url.kind == "person")
OPEN = sorted(name for name, url in URLS.items() if url.kind in ("public", "signed"))
WITH_IDS = sorted(name for name in PAGES + APIS if set(URLS[name].ids.values()) & set(MAKERS))
# Each is recorded, so an operator who views has none.
DOWNLOADS = ("web:dataset_download", "web:adapter_download", "web:batch_download", "web:checkpoint_download")
WITH_REFS = sorted(name for name, url in URLS.items() if url.refs)


@pytest.fixture(scope="module")
def world(django_db_setup: None, django_db_blocker: Any) -> Iterator[World]:
    with django_db_blocker.unblock(), transaction.atomic():
        built = build_world()
        sign_in(built.operator, built.loner, *built.acme.people.values(), *built.rival.people.values())
        view_acme(built)
        yield built
        transaction.set_rollback(True)
        SESSIONS.clear()


@pytest.fixture(scope="module")
def rows(world: World) -> Rows:
    """Every row of each tenant by the tenant's canary: each test ends with the same rows."""
    with undone():
        return {tenant.canary: rows_of(tenant) for tenant in (world.acme, world.rival)}


@pytest.fixture(autouse=True)
def _sign_ins_stay_recent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everyone signs in once, however long all tests take: test_recent_sign_in.py tests the limit itself."""
    monkeypatch.setattr(settings, "ACCOUNT_REAUTHENTICATION_TIMEOUT", 24 * 3600)


@pytest.fixture(autouse=True)
def _payments_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Stripe's secret the billing pages are not there at all: tests/web/money/test_billing.py."""
    monkeypatch.setattr(settings, "STRIPE_WEBHOOK_SECRET", "whsec_guard")


@pytest.fixture(autouse=True)
def _nobody_delivers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test of a webhook waits for its answer, which nothing here would record."""
    monkeypatch.setattr(webhook_endpoints, "_TEST_SECONDS", 0.0)


@pytest.fixture(params=["both walls", pytest.param("scoping alone", marks=pytest.mark.slow)])
def walls(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With `scoping alone` requests run as the owner of the tables, for whom every tenant's rows are visible."""
    if request.param == "scoping alone":
        monkeypatch.setattr("apps.core.database.tenancy.APP_ROLE", "anneal_owner")
    return request.param


@pytest.fixture
def bare_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Show refusals without the shell around them, which is the same for every address of a role."""
    monkeypatch.setattr("apps.core.http.asgi.error_page", _bare_page)


def _bare_page(request: HttpRequest, status: int, *, message: str = "") -> HttpResponse:
    return HttpResponse(f"{status} {message} {request.id}", status=status)


# --- the list itself --------------------------------------------------------------------------------------------------


def named_views() -> Iterator[tuple[str, Any]]:
    yield from _walk(get_resolver(settings.ROOT_URLCONF), "")


def _walk(resolver: URLResolver, namespace: str) -> Iterator[tuple[str, Any]]:
    for entry in resolver.url_patterns:
        if isinstance(entry, URLResolver):
            inner = f"{namespace}{entry.namespace}:" if entry.namespace else namespace
            yield from _walk(entry, inner)
        elif isinstance(entry, URLPattern):
            yield f"{namespace}{entry.name}", entry.callback


def test_every_url_has_a_line_and_every_line_a_url() -> None:
    names = {name for name, _ in named_views()}

    assert names - set(URLS) == set(), "add a line to tests/guards/urls"
    assert set(URLS) - names == set(), "these lines have no URL any more"
    assert all(not name.endswith("None") for name in names), "a URL needs a name"


def test_every_exception_says_why() -> None:
    assert all(url.reason for url in URLS.values() if url.kind in ("public", "signed"))
    assert all(reason for url in URLS.values() for reason in url.refuses.values())


def test_every_id_is_of_a_known_kind() -> None:
    kinds = {kind for url in URLS.values() for kind in (*url.ids.values(), *url.refs.values())}

    assert kinds <= set(MAKERS) | set(SHARED)


@pytest.mark.parametrize(("name", "view"), sorted(named_views(), key=lambda each: each[0]))
def test_every_view_carries_the_mark_of_its_audience(name: str, view: Any) -> None:
    kind = URLS[name].kind
    if kind == "api":
        assert issubclass(view.view_class if hasattr(view, "view_class") else view.cls, ApiView)
    elif name.startswith(("web:", "staff:")):
        expected = {"page": "organization", "staff": "operator"}.get(kind, kind)
        assert view.access.audience == expected


# --- pages ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PAGES + PEOPLE + STAFF)
def test_a_page_sends_nobody_to_sign_in(name: str, world: World) -> None:
    with undone():
        for method in METHODS:
            response = ask(browser(None), method, address(name, world.acme), body(URLS[name], world.acme))
            assert response.status_code in (302, 405), method
            assert response.status_code == 405 or response.headers["Location"].startswith("/accounts/login/")
            assert_no_leak(response, world.acme)


@pytest.mark.usefixtures("bare_refusals")
@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize("role", ROLES)
def test_a_page_opens_for_the_roles_it_names_and_no_other(name: str, role: str, world: World) -> None:
    url = URLS[name]
    for method, permission in url.methods.items():
        with undone():
            response = ask(browser(world.acme.people[role]), method, address(name, world.acme), body(url, world.acme))
        assert permission is not None
        if has_permission(role, permission) and role not in url.refuses:
            is_understood = response.status_code < 400 or response.status_code in (400, 422, 429)
            assert is_understood, (method, response.text[-2000:])
            for table in tables_of(response) if method == "GET" else ():
                with undone():
                    file = ask(browser(world.acme.people[role]), "GET", address(name, world.acme), {"csv": table})
                assert file.headers["Content-Type"].startswith("text/csv"), table
                assert_no_leak(file, world.rival)
        else:
            assert response.status_code == 403, method


@pytest.mark.parametrize("name", PAGES)
def test_a_page_answers_only_the_methods_it_names(name: str, world: World) -> None:
    for method in set(METHODS) - set(URLS[name].methods):
        with undone():
            response = ask(browser(world.acme.owner), method, address(name, world.acme), {})
        assert response.status_code == 405, method


@pytest.mark.parametrize("name", PAGES)
def test_an_api_key_opens_no_page(name: str, world: World) -> None:
    with undone():
        for method in URLS[name].methods:
            response = ask(browser(None), method, address(name, world.acme), {}, world.acme.secret)
            assert response.status_code == 302, method


@pytest.mark.parametrize("name", PAGES)
def test_a_page_shows_an_operator_without_membership_nothing(name: str, world: World) -> None:
    for method in URLS[name].methods:
        with undone():
            response = ask(browser(world.operator), method, address(name, world.acme), body(URLS[name], world.acme))
        assert (response.status_code, response.headers["Location"]) == (302, "/staff/"), method


@pytest.mark.usefixtures("bare_refusals")
@pytest.mark.parametrize("name", STAFF)
def test_the_console_opens_for_operators_and_no_other(name: str, world: World) -> None:
    url = URLS[name]
    for method in METHODS:
        with undone():
            refused = ask(browser(world.acme.owner), method, address(name, world.acme), body(url, world.acme))
        with undone():
            opened = ask(browser(world.operator), method, address(name, world.acme), body(url, world.acme))
        assert refused.status_code == (403 if method in url.methods else 405), method
        if method in url.methods:
            assert opened.status_code < 400 or opened.status_code in (400, 422), (method, opened.text[-2000:])
        for table in tables_of(opened) if method == "GET" else ():
            with undone():
                file = ask(browser(world.operator), "GET", address(name, world.acme), {"csv": table})
            assert file.headers["Content-Type"].startswith("text/csv"), table


@pytest.mark.parametrize("name", PEOPLE)
@pytest.mark.parametrize("who", ["owner", "loner"])
def test_a_page_for_anybody_works_without_an_organization(name: str, who: str, world: World) -> None:
    user = world.acme.owner if who == "owner" else world.loner
    for method in METHODS:
        with undone():
            response = ask(browser(user), method, address(name, world.acme), body(URLS[name], world.acme))
        assert_no_leak(response, world.rival)
        if method not in URLS[name].methods:
            assert response.status_code == 405, method


@pytest.mark.parametrize("name", OPEN)
def test_an_open_address_shows_no_tenants_data(name: str, world: World, rows: Rows) -> None:
    for method in METHODS:
        with undone():
            response = ask(browser(None), method, address(name, world.acme, missing=True), dict(URLS[name].data))
            assert_no_leak(response, world.acme)
            assert rows_of(world.acme) == rows[world.acme.canary]
        if method not in URLS[name].methods:
            assert response.status_code in (403, 404, 405), method


# --- an operator who views an organization ----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("bare_refusals")
@pytest.mark.parametrize("name", sorted(set(URLS) - {"staff:viewing_stop", "account_logout"}))
def test_an_operator_who_views_can_write_at_no_address(name: str, world: World, rows: Rows) -> None:
    with undone():
        client = client_of(VIEWING)
        for method in set(METHODS) - {"GET"}:
            for secret in (None, world.acme.secret):
                response = ask(client, method, address(name, world.acme), body(URLS[name], world.acme), secret)
                assert response.status_code == 403, method
        assert _but_audit(rows_of(world.acme)) == _but_audit(rows[world.acme.canary])


@pytest.mark.slow
@pytest.mark.usefixtures("bare_refusals")
@pytest.mark.parametrize("name", PAGES)
def test_an_operator_who_views_reads_what_a_viewer_reads(name: str, world: World, rows: Rows) -> None:
    url = URLS[name]
    with undone():
        client = client_of(VIEWING)
        response = ask(client, "GET", address(name, world.acme), body(url, world.acme))
        assert _but_audit(rows_of(world.acme)) == _but_audit(rows[world.acme.canary])
        foreign = ask(client, "GET", address(name, world.rival), {})
    assert_no_leak(response, world.rival)
    assert_no_leak(foreign, world.rival)
    if "GET" not in url.methods:
        assert response.status_code == 405
    elif url.methods["GET"] != P.VIEW or name in DOWNLOADS:
        assert response.status_code == 403
    else:
        assert response.status_code < 400 or response.status_code == 422


def _but_audit(rows: dict[str, str]) -> dict[str, str]:
    return {label: found for label, found in rows.items() if label != "core.AuditEntry"}


# --- API --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", APIS)
def test_the_api_wants_a_key(name: str, world: World) -> None:
    url = URLS[name]
    for method in METHODS:
        with undone():
            nobody = ask(browser(None), method, address(name, world.acme), body(url, world.acme))
            session = ask(browser(world.acme.owner), method, address(name, world.acme), body(url, world.acme))
        assert (nobody.status_code, session.status_code) == (401, 401), method
        assert nobody.code == "invalid_api_key"


@pytest.mark.parametrize("name", APIS)
def test_the_api_wants_the_scope_it_names(name: str, world: World) -> None:
    url = URLS[name]
    for method in METHODS:
        scope = url.methods.get(method)
        with undone():
            full = ask(browser(None), method, address(name, world.acme), body(url, world.acme), world.acme.secret)
            if scope is None:
                assert full.status_code == 405, method
                continue
            secret = narrow_secret(world.acme, without=scope)
            narrow = ask(browser(None), method, address(name, world.acme), body(url, world.acme), secret)
        is_understood = full.status_code < 400 or full.status_code in (400, 415, 422, 429)
        assert is_understood, (method, full.text[-2000:])
        assert narrow.status_code == 403, method


# --- other tenants ----------------------------------------------------------------------------------------------------


def actors(url: Url, tenant: Tenant, roles: Iterable[str]) -> Iterator[tuple[str, Client, str | None]]:
    """Yield who asks: each of the roles in a browser, or a key with every scope."""
    if url.kind == "api":
        yield "key", browser(None), tenant.secret
    else:
        for role in roles:
            yield role, browser(tenant.people[role]), None


def roles_before(walls: str) -> Iterable[str]:
    """Return who asks: behind one wall each role; the other wall only hides more rows, from every role the same."""
    return ROLES if walls == "scoping alone" else ("owner",)


@pytest.mark.usefixtures("bare_refusals")
@pytest.mark.parametrize("name", WITH_IDS)
def test_a_foreign_id_reads_like_one_that_does_not_exist(name: str, world: World, walls: str, rows: Rows) -> None:
    """Both ways round: Acme's people with Rival's ids, and an outsider, Rival's owner, with Acme's."""
    url = URLS[name]
    ways = ((world.acme, roles_before(walls), world.rival), (world.rival, ("owner",), world.acme))
    for asking, roles, other in ways:
        with undone():
            for role, client, secret in actors(url, asking, roles):
                for method, permission in url.methods.items():
                    answers = []
                    for missing in (False, True):
                        path = address(name, other, missing=missing)
                        response = ask(client, method, path, body(url, asking), secret)
                        assert_no_leak(response, other)
                        ids = [id_of(kind, other, missing) for kind in url.ids.values()]
                        answers.append(comparable(response, *ids))
                    assert answers[0] == answers[1], (role, method)
                    allowed = role == "key" or (permission is not None and has_permission(role, permission))
                    assert answers[0][0] in ((404,) if allowed else (403, 404)), (role, method)
            assert rows_of(other) == rows[other.canary]


@pytest.mark.parametrize("role", ROLES)
def test_a_refusal_in_its_shell_shows_nothing_of_another_tenant(role: str, world: World, walls: str) -> None:
    client = browser(world.acme.people[role])
    with undone():
        answers = []
        for missing in (False, True):
            path = address("web:job_detail", world.rival, missing=missing)
            response = ask(client, "GET", path, {})
            assert_no_leak(response, world.rival)
            answers.append(comparable(response, id_of("job", world.rival, missing)))
        forbidden = ask(client, "GET", address("staff:audit", world.acme), {})

    assert answers[0] == answers[1]
    assert (answers[0][0], forbidden.status_code) == (404, 403)
    assert "Page not found" in answers[0][1] and "You don't have access" in html.unescape(forbidden.text)
    assert_no_leak(forbidden, world.rival)


@pytest.mark.parametrize("name", WITH_REFS)
def test_a_foreign_id_in_a_body_reads_like_one_that_does_not_exist(
    name: str, world: World, walls: str, rows: Rows
) -> None:
    url = URLS[name]
    with undone():
        for role, client, secret in actors(url, world.acme, roles_before(walls)):
            for method in set(url.methods) - {"GET"}:
                answers = []
                for missing in (False, True):
                    sent = body(url, world.rival, missing=missing)
                    response = ask(client, method, address(name, world.acme), sent, secret)
                    assert_no_leak(response, world.rival)
                    ids = [id_of(kind, world.rival, missing) for kind in url.refs.values()]
                    answers.append(comparable(response, *ids))
                assert answers[0] == answers[1], (role, method)
                assert 400 <= answers[0][0] < 500, (role, method)
        assert rows_of(world.rival) == rows[world.rival.canary]


@pytest.mark.parametrize("name", sorted(set(PAGES + APIS) - set(WITH_IDS)))
def test_a_list_shows_the_tenants_own_rows_only(name: str, world: World, walls: str) -> None:
    url = URLS[name]
    with undone():
        foreign = {"organization": world.rival.organization.pk, "organization_id": world.rival.organization.pk}
        for _, client, secret in actors(url, world.acme, roles_before(walls)):
            for method in set(url.methods) & {"GET"}:
                response = ask(client, method, address(name, world.acme), foreign, secret)
                assert_no_leak(response, world.rival)
