"""Requests to an address of URLS in the names of a tenant's people, and checks of their answers."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from asgiref.sync import async_to_sync
from django.conf import settings
from django.core.files.uploadedfile import SimpleUploadedFile
from django.test import Client
from django.test.client import ClientHandler
from django.urls import reverse

from apps.accounts.models import User
from tests.guards.makers.tenants import Tenant, World
from tests.guards.urls import URLS
from tests.guards.urls.kinds import Url
from tests.guards.world import MAKERS, SHARED

_HANDLER = ClientHandler(enforce_csrf_checks=False)  # one for all: each loads every middleware
SESSIONS: dict[str, str] = {}  # the session cookie of each user of the world, and of an operator who views Acme
VIEWING = "viewing"


def sign_in(*users: User) -> None:
    for user in users:
        client = Client()
        client.force_login(user, backend=settings.AUTHENTICATION_BACKENDS[0])
        SESSIONS[user.pk] = client.cookies[settings.SESSION_COOKIE_NAME].value


def view_acme(world: World) -> None:
    client = browser(None)
    client.force_login(world.operator, backend=settings.AUTHENTICATION_BACKENDS[0])
    assert client.post(reverse("staff:organization_view", args=[world.acme.organization.pk])).status_code == 302
    SESSIONS[VIEWING] = client.cookies[settings.SESSION_COOKIE_NAME].value


def address(name: str, tenant: Tenant, *, missing: bool = False) -> str:
    return reverse(
        name, kwargs={part: id_of(kind, tenant, missing) for part, kind in URLS[name].ids.items()} or _free(name)
    )


def _free(name: str) -> dict[str, str]:
    """Return the parts of an address that name no object."""
    return {
        "signed_object": {"key": "org/x/files/y"},
        "api_unknown": {"rest": "v1/nothing"},
        "api_unknown_v1": {"rest": "nothing"},
        "api_without_v1": {"rest": "completions"},
    }.get(name, {})


def id_of(kind: str, tenant: Tenant, missing: bool) -> str:
    found = tenant.ids[kind] if kind in MAKERS else SHARED[kind](tenant.installation)
    return found[:-6] + "zzzzzz" if missing else found


def body(url: Url, tenant: Tenant, *, missing: bool = False) -> dict[str, Any]:
    return dict(url.data) | {member: id_of(kind, tenant, missing) for member, kind in url.refs.items()}


def browser(user: User | None) -> Client:
    return client_of(user and user.pk)


def client_of(session: str | None) -> Client:
    client = Client()  # raises what a view does not handle: a test sees the cause of a 500
    client.handler = _HANDLER
    if session is not None:
        client.cookies[settings.SESSION_COOKIE_NAME] = SESSIONS[session]
    return client


@dataclass(frozen=True)
class Answer:
    status_code: int
    headers: Mapping[str, str]
    text: str = field(repr=False)

    @property
    def code(self) -> str:
        return json.loads(self.text)["error"]["code"]


def ask(client: Client, method: str, path: str, data: dict[str, Any], secret: str | None = None) -> Answer:
    response = _send(client, method, path, data, {"authorization": f"Bearer {secret}"} if secret else {})
    assert_strict_policy(response.headers)
    try:
        return Answer(response.status_code, dict(response.headers), _read(response).decode(errors="replace"))
    finally:
        for close in response._resource_closers:  # response.close() would end the request, and with it the connection
            close()


def assert_strict_policy(headers: Mapping[str, str]) -> None:
    """Every answer, refusals and redirects too, forbids inline code and framing, and loads from here alone."""
    policy = dict(part.strip().split(" ", 1) for part in headers.get("Content-Security-Policy", "").split(";") if part)
    none = ("default-src", "base-uri", "frame-ancestors")
    assert {name: policy.get(name) for name in none} == dict.fromkeys(none, "'none'")
    assert (policy.get("script-src"), policy.get("style-src")) == ("'self'", "'self'")


def _send(client: Client, method: str, path: str, data: dict[str, Any], headers: dict[str, str]) -> Any:
    if method == "GET":
        return client.get(path, data, headers=headers)
    form = {name: SimpleUploadedFile(name, value) for name, value in data.items() if isinstance(value, bytes)}
    if form and method == "POST":
        return client.post(path, form, headers=headers)
    if form:
        return client.generic(method, path, headers=headers)
    if path.startswith(("/v1", "/api")):
        return client.generic(method, path, json.dumps(data), content_type="application/json", headers=headers)
    return (
        client.post(path, data, headers=headers) if method == "POST" else client.generic(method, path, headers=headers)
    )


def _read(response: Any) -> bytes:
    if not response.streaming:
        return response.content
    if response.headers["Content-Type"].startswith("text/event-stream"):
        return b""  # does not end; what it may send was decided before it began
    return async_to_sync(_read_async)(response) if response.is_async else b"".join(response)


async def _read_async(response: Any) -> bytes:
    return b"".join([chunk async for chunk in response])


def comparable(response: Answer, *ids: str) -> tuple[int, str]:
    """Return status and body without what differs between any two answers: ids asked for, request id, CSRF token."""
    text = response.text
    for identifier in ids:
        text = text.replace(identifier, "<id>")
    text = re.sub(r"req_[0-9a-z]{26}", "<request>", text)
    return response.status_code, re.sub(r"(X-CSRFToken\": \"|csrfmiddlewaretoken\" value=\")\w+", r"\1<csrf>", text)


def tables_of(response: Answer) -> list[str]:
    """Return the names of the tables of a page that are also files, which differ."""
    names = re.findall(r'data-csv="([^"]+)"', response.text)
    assert len(names) == len(set(names)), names
    return names


def assert_no_leak(response: Answer, other: Tenant) -> None:
    assert other.canary not in response.text
    assert other.canary not in str(response.headers)
    assert response.status_code < 500
