"""Errors from every source, as the openai package reads them."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest
from django.core.exceptions import PermissionDenied as DjangoPermissionDenied
from django.http import Http404
from django.test import Client
from django.urls import path
from rest_framework import exceptions
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.test import APIClient

from apps.accounts.login.key_operations import IssuedKey
from apps.accounts.models import ApiKey, Organization
from apps.config.urls import handler404, handler500  # noqa: F401 - Django looks for them in the URL module
from apps.config.urls import urlpatterns as real_urls
from apps.core.database.idempotency import IdempotencyInProgress, IdempotencyKeyReused
from apps.core.errors import InvalidState, QuotaExceeded, RateLimited, Unavailable, UnknownParameter
from apps.interfaces.api.requests.parsers import read_body
from apps.interfaces.api.views import ApiView
from tests.support.sdk import openai_client

ApiClient = Callable[[IssuedKey | str | None], APIClient]
_raised: list[Exception] = []
CLASSES = {
    400: openai.BadRequestError,
    401: openai.AuthenticationError,
    403: openai.PermissionDeniedError,
    404: openai.NotFoundError,
    409: openai.ConflictError,
    415: openai.APIStatusError,
    422: openai.UnprocessableEntityError,
    429: openai.RateLimitError,
    500: openai.InternalServerError,
    503: openai.InternalServerError,
}


class Method(msgspec.Struct):
    type: str


class Body(msgspec.Struct):
    model: str
    method: Method | None = None


class FailingView(ApiView):
    required_scope = {"GET": "view", "POST": "view"}

    def get(self, request: Request) -> Response:
        ApiKey.objects.filter(pk=request.auth.key_id).update(name="changed")
        raise _raised[-1]

    def post(self, request: Request) -> Response:
        return Response(msgspec.to_builtins(read_body(request.data, Body)))


class EchoView(ApiView):
    required_scope = {"POST": "view"}

    def post(self, request: Request) -> Response:
        return Response({"got": request.data})


urlpatterns = [
    path("v1/failing", FailingView.as_view()),
    path("v1/echo", EchoView.as_view()),
    *real_urls,
]


@pytest.fixture(autouse=True)
def _urls(settings: Any) -> Iterator[None]:
    settings.ROOT_URLCONF = __name__
    yield
    _raised.clear()


@pytest.mark.parametrize(
    ("raised", "status", "code", "headers"),
    [
        (InvalidState("no", param="status"), 400, "invalid_state", {}),
        (exceptions.NotAuthenticated(), 401, "invalid_api_key", {}),
        (Http404(), 404, "not_found", {}),
        (DjangoPermissionDenied(), 403, "insufficient_permissions", {}),
        (QuotaExceeded("no"), 429, "insufficient_quota", {"x-should-retry": "false"}),
        (RateLimited("wait", retry_after_seconds=7), 429, "rate_limit_exceeded", {"Retry-After": "7"}),
        (Unavailable("later"), 503, "service_unavailable", {"Retry-After": "1"}),
        (exceptions.ValidationError({"hyperparameters": {"n_epochs": ["too many"]}}), 400, "invalid_value", {}),
        (exceptions.UnsupportedMediaType("text/csv"), 415, "unsupported_media_type", {}),
        (IdempotencyInProgress("wait"), 409, "idempotency_in_progress", {}),
        (IdempotencyKeyReused("no"), 422, "idempotency_key_reused", {}),
        (RuntimeError("a bug"), 500, "server_error", {}),
    ],
)
def test_a_failure_is_an_error_of_its_class_in_openais_client(
    raised: Exception, status: int, code: str, headers: dict[str, str], key: IssuedKey, api_client: ApiClient
) -> None:
    _raised.append(raised)
    client = api_client(key)
    client.raise_request_exception = False

    response = client.get("/v1/failing")
    with pytest.raises(CLASSES[status]) as caught:
        openai_client(key).get("/failing", cast_to=object)

    assert (type(caught.value), caught.value.status_code) == (CLASSES[status], status)
    assert caught.value.code == code and caught.value.type and caught.value.request_id
    assert response.status_code == status
    assert response.json()["error"]["code"] == code
    assert set(response.json()["error"]) >= {"message", "type", "param", "code"}
    assert headers.items() <= dict(response.headers).items()
    assert "Retry-After" not in response.headers or "x-should-retry" not in response.headers


def test_a_failure_undoes_what_the_view_did(key: IssuedKey, api_client: ApiClient) -> None:
    _raised.append(InvalidState("no"))

    api_client(key).get("/v1/failing")

    key.key.refresh_from_db()
    assert key.key.name == "test"


def test_a_validation_error_names_the_field(key: IssuedKey, api_client: ApiClient) -> None:
    _raised.append(exceptions.ValidationError({"hyperparameters": {"n_epochs": ["too many"]}}))

    assert api_client(key).get("/v1/failing").json()["error"]["param"] == "hyperparameters.n_epochs"


def test_a_bug_is_500_and_says_nothing_of_itself(key: IssuedKey, api_client: ApiClient) -> None:
    _raised.append(RuntimeError("secret detail"))
    client = api_client(key)
    client.raise_request_exception = False

    response = client.get("/v1/failing")

    assert response.status_code == 500
    assert response.json()["error"]["type"] == "server_error"
    assert "secret detail" not in response.content.decode()


def test_an_unknown_address_is_404_in_openais_shape(client: Client, db: None) -> None:
    response = client.post("/v1/responses", {}, content_type="application/json")

    assert response.status_code == 404
    assert response.json()["error"]["code"] == "unknown_url"


@pytest.mark.parametrize("path", ["/v1/files/", "/v1/fine_tuning/jobs/", "/v1/models/"])
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_trailing_slash_is_404_and_no_redirect_which_would_lose_the_body(
    method: str, path: str, key: IssuedKey, api_client: ApiClient
) -> None:
    response = api_client(key).generic(method, path, b"{}", content_type="application/json")

    error = response.json()["error"]
    assert (response.status_code, error["code"], error["type"]) == (404, "unknown_url", "invalid_request_error")
    assert error["message"].endswith(f"try {path[:-1]}.")


def test_a_page_that_is_not_there_is_a_page(client: Client, db: None) -> None:
    response = client.get("/nowhere")

    assert response.status_code == 404
    assert response.headers["Content-Type"].startswith("text/html")


def test_a_wrong_method_is_405(key: IssuedKey, api_client: ApiClient) -> None:
    response = api_client(key).delete("/v1/failing")

    assert response.status_code == 405
    assert response.json()["error"]["code"] == "method_not_allowed"
    assert response.headers["Allow"] == "GET, POST, HEAD"


def test_a_wrong_method_without_a_key_is_401(api_client: ApiClient) -> None:
    assert api_client(None).options("/v1/failing").status_code == 401


def test_an_empty_body_is_an_empty_object(key: IssuedKey, api_client: ApiClient) -> None:
    response = api_client(key).generic("POST", "/v1/echo", b"", content_type="application/json")

    assert response.json() == {"got": {}}


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"\xff\xfe",
        b'{"a": NaN}',
        b'{"a": 1, "a": 2}',
        b'{"a": "\\u0000"}',
        b'{"a": "\\ud800"}',
        b'{"\\u0000": 1}',
        b"[" * 100_000,
        b"[" * 200 + b"]" * 200,
        b'{"a": ' + b"9" * 5000 + b"}",
    ],
)
def test_what_is_not_plain_json_is_400(body: bytes, key: IssuedKey, api_client: ApiClient) -> None:
    response = api_client(key).generic("POST", "/v1/echo", body, content_type="application/json")

    assert response.status_code == 400
    assert response.json()["error"]["code"] == "invalid_json"


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({}, "missing_required_parameter", "model"),
        ({"model": 3}, "invalid_value", "model"),
        ({"model": "m", "method": {}}, "missing_required_parameter", "method.type"),
        ([], "invalid_value", None),
    ],
)
def test_a_bad_body_names_the_field(
    body: object, code: str, param: str | None, key: IssuedKey, api_client: ApiClient
) -> None:
    response = api_client(key).post("/v1/failing", body, format="json")

    assert response.status_code == 400
    assert (response.json()["error"]["code"], response.json()["error"]["param"]) == (code, param)


@pytest.mark.parametrize(("sent", "is_kept"), [("abc-123_DEF.9", True), ("short", False), ("bad id\twith", False)])
def test_a_harmless_request_id_is_kept(sent: str, is_kept: bool, client: Client, db: None) -> None:
    response = client.get("/v1/nothing", headers={"x-request-id": sent})

    assert (response.headers["x-request-id"] == sent) is is_kept


def test_the_schema_is_public_and_lists_the_api(client: Client, organization: Organization) -> None:
    schema = client.get("/api/v1/schema").json()

    assert schema["openapi"].startswith("3.")
    assert "/api/v1/me" in schema["paths"]


@pytest.mark.parametrize(
    "path", ["/v1/fine_tuning/jobs/%00", "/v1/models/%00", "/v1/files?purpose=%00", "/v1/files?%00=1", "/v1/%00"]
)
def test_nul_in_an_address_is_refused(path: str, api_client: Any, key: IssuedKey) -> None:
    response = api_client(key).get(path)

    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("path", ["/jobs/%00", "/adapters?page=%00", "/objects/%00"])
def test_nul_in_an_address_is_refused_to_people_too(path: str, client_for: Any, alice: Any, organization: Any) -> None:
    assert client_for(alice).get(path).status_code == 400


def test_an_unknown_field_is_named_with_those_that_are_taken() -> None:
    class Asked(msgspec.Struct, forbid_unknown_fields=True):
        mapping: dict[str, str] = {}
        rest: int = 0

    with pytest.raises(UnknownParameter) as refused:
        read_body({"format": "chat"}, Asked)

    assert refused.value.param == "format"
    assert refused.value.message == "Unknown parameter: 'format'. This call takes mapping, rest."


def test_what_openai_has_and_anneal_does_not_is_not_offered(client: Client) -> None:
    """Every first part of an address in the newest package is served here, or refused as not offered."""
    folder = Path(openai.__file__).parent / "resources"
    parts = {part for file in folder.rglob("*.py") for part in re.findall(r'"/([a-z_]+)[/"?{]', file.read_text())}

    answers = {part: client.get(f"/v1/{part}/x/y/z") for part in parts}
    refused = {part for part, answer in answers.items() if answer.json()["error"]["code"] == "not_offered"}

    assert len(parts) > 20 and {"agents", "vaults", "realtime"} <= refused
    assert parts - refused == {
        "batches", "chat", "completions", "embeddings", "evals", "files", "fine_tuning", "models", "uploads",
        "webhook_endpoints", "webhook_event_types",
    }  # fmt: skip
