"""The OpenAPI document: valid, complete, and of the types that read the requests."""

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from django.conf import settings
from django.test import Client
from django.utils.module_loading import import_string
from openapi_spec_validator import OpenAPIV31SpecValidator

from apps.core.http.openapi.document import FileAnswer, Operation
from apps.interfaces.api.requests.handlers import signature_of
from apps.interfaces.api.requests.parsers import read_body
from apps.interfaces.api.schema import operations, published
from apps.interfaces.api.urls import urlpatterns
from apps.interfaces.api.views import ApiView
from tests.support.api.document import api_document

# What these calls do is said by their address alone.
WITHOUT_BODY = {
    "upload_cancel_post", "job_cancel_post", "job_pause_post", "checkpoint_serve_post", "alias_rollback_post",
    "batch_cancel_post", "model_conversion_cancel_post",
    "eval_run_cancel_post",
    "retraining_list_post",
    "project_archive_post",
    "webhook_rotate_post",
    "webhook_replay_post",
    "webhook_test_post",
    "file_restore_post",
}  # fmt: skip


# Lists that are always whole, or have pages of another kind.
WITHOUT_PAGES = {
    "audit_get": "its pages begin before a time",
    "integration_list_get": "one of each tracker",
    "job_moves_get": "the offers of each pool",
    "model_conversions_get": "one of each form",
    "model_file_list_get": "the files of one model",
    "model_list_get": "OpenAI's has no pages",
    "price_list_get": "one of each SKU",
    "quota_list_get": "one of each limit",
}


def all_operations() -> list[Operation]:
    return [one for name in settings.API_OPERATIONS for one in import_string(name)()]


def described() -> Iterator[tuple[str, dict[str, Any]]]:
    for path, methods in api_document()["paths"].items():
        for method, operation in methods.items():
            yield f"{method.upper()} {path}", operation


@pytest.mark.slow
def test_the_document_is_valid_and_served_to_everyone(client: Client, db: None) -> None:
    served = client.get("/api/v1/schema")

    OpenAPIV31SpecValidator(served.json()).validate()
    assert served.headers["Content-Type"] == "application/json"
    assert served.json()["paths"] == api_document()["paths"]


def test_the_published_document_is_current() -> None:
    """If it is not, `make openapi` writes it."""
    assert (Path(__file__).parents[2] / "docs/openapi.json").read_bytes() == published()


def test_every_address_of_the_api_and_of_the_gateway_is_described() -> None:
    paths = {path for path, _ in ((one.path, one.method) for one in all_operations())}
    views = [entry.callback.view_class for entry in urlpatterns if hasattr(entry.callback, "view_class")]

    assert {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"} <= paths
    assert len(list(described())) == sum(len(view.required_scope) for view in views) + 4


@pytest.mark.parametrize(("name", "operation"), list(described()), ids=[name for name, _ in described()])
def test_a_call_says_what_it_is_for_who_may_make_it_and_how_it_is_refused(name: str, operation: dict[str, Any]) -> None:
    refused = operation["responses"]

    assert operation["summary"].endswith(".") and "Scope: `" in operation["description"]
    assert len(operation["security"][0]["apiKey"]) == 1
    for status in ("400", "401", "403", "429"):
        assert refused[status]["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/ErrorBody"}
    assert ("content" in refused.get("200", {})) == (name != "POST /v1/embeddings")


def test_every_post_beside_inference_answers_with_json_that_an_idempotency_key_repeats() -> None:
    posts = [one for one in operations() if one.method == "POST"]

    without = {one.name for one in posts if "Idempotency-Key" not in one.headers}
    assert without == {"endpoint_test_post"}  # what it returns is known after its transaction
    assert not any(isinstance(answer, FileAnswer) for one in posts for answer in one.answers)


def test_every_list_has_pages_or_says_why_not() -> None:
    schemas = api_document()["components"]["schemas"]
    answers = {
        operation["operationId"]: (operation, operation["responses"]["200"]["content"].get("application/json"))
        for name, operation in described()
        if name.startswith("GET ")
    }
    lists = {
        name: {each["name"] for each in operation["parameters"]}
        for name, (operation, answer) in answers.items()
        if answer and "has_more" in schemas[str(answer["schema"].get("$ref")).rpartition("/")[2]]["properties"]
    }

    assert {name for name, parameters in lists.items() if not {"after", "limit"} <= parameters} <= set(WITHOUT_PAGES)
    assert set(WITHOUT_PAGES) <= set(lists)


def test_a_change_where_get_answers_takes_if_match() -> None:
    for path, methods in api_document()["paths"].items():
        read = methods.get("get", {"responses": {}})
        for method, operation in methods.items():
            takes = "If-Match" in {each["name"] for each in operation["parameters"]}
            has_etag = "application/json" in read["responses"].get("200", {"content": {}})["content"]
            assert takes == ("412" in operation["responses"]), path
            assert takes == (method != "get" and has_etag and path != "/v1/chat/completions"), (method, path)


def test_every_call_that_sends_something_has_its_schema() -> None:
    sending = {one.name for one in all_operations() if one.method in ("POST", "PUT")}
    bodies = {operation["operationId"] for _, operation in described() if "requestBody" in operation}

    assert sending - bodies == WITHOUT_BODY


def test_no_view_reads_a_body_or_a_query_past_its_signature() -> None:
    for entry in urlpatterns:
        view = getattr(entry.callback, "view_class", None)
        for method in view.required_scope if view else ():
            handler = getattr(view, method.lower())
            source = inspect.getsource(handler)
            assert "query_params" not in source and "read_body" not in source and "request.POST" not in source
            assert "request.data" not in source or signature_of(handler).body is not None


@pytest.mark.parametrize("one", [one for one in all_operations() if one.body], ids=lambda one: one.name)
def test_every_body_has_an_example_that_is_accepted(one: Operation) -> None:
    read_body(one.example, one.body)


def test_a_call_with_two_answers_describes_both() -> None:
    answers = api_document()["paths"]["/v1/fine_tuning/jobs"]["post"]["responses"]["200"]["content"]

    assert [each["$ref"].rpartition("/")[2] for each in answers["application/json"]["schema"]["anyOf"]] == [
        "JobObject", "DryRunObject",
    ]  # fmt: skip


def test_generators_find_a_name_and_a_type_for_everything() -> None:
    schemas = api_document()["components"]["schemas"]
    job, asked, form = schemas["JobObject"], schemas["CreateJob"], schemas["FileForm"]

    assert [name for name in schemas if not name.isalnum() or name != schemas[name]["title"]] == []
    assert [name for name in schemas if name.lower() in schemas[name].get("properties", ())] == []  # names of variables
    assert schemas["EventObjectList"]["properties"]["data"]["items"] == {"$ref": "#/components/schemas/EventObject"}
    assert job["properties"]["object"] == {"type": "string", "const": "fine_tuning.job"}
    assert job["properties"]["delivered_as"] == {"type": "string", "enum": ["adapter", "model"]}
    assert job["properties"]["estimate"]["anyOf"][0] == {
        "title": "Estimate", "type": "object", "additionalProperties": True,
    }  # fmt: skip
    assert schemas["DeletedFile"]["properties"]["deleted"] == {"type": "boolean", "const": True}
    assert "default" not in asked["properties"]["suffix"] and asked["properties"]["dry_run"]["default"] is False
    assert form["properties"]["file"]["format"] == "binary"
    assert api_document()["paths"]["/v1/files"]["post"]["requestBody"]["required"]
    of_audit = api_document()["paths"]["/api/v1/audit"]["get"]["responses"]["200"]["content"]
    assert list(of_audit) == ["application/json", "text/csv", "application/jsonl"]  # generators read the first


@pytest.mark.slow
def test_parameters_have_the_types_that_read_them() -> None:
    of_files = api_document()["paths"]["/v1/files"]["get"]["parameters"]

    limit = next(each["schema"] for each in of_files if each["name"] == "limit")
    assert limit == {"type": "integer", "minimum": 1, "maximum": 10_000, "default": 10_000}
    assert {each["name"] for each in of_files} == {"limit", "after", "order", "purpose", "If-None-Match"}
    of_jobs = api_document()["paths"]["/v1/fine_tuning/jobs"]["get"]["parameters"]
    metadata = next(each for each in of_jobs if each["name"] == "metadata")
    assert (metadata["style"], metadata["explode"], "default" in metadata["schema"]) == ("deepObject", True, False)


@pytest.mark.slow
def test_a_signature_is_read_before_the_handler_runs() -> None:
    class Asked(msgspec.Struct):
        name: str

    class View(ApiView):
        def post(self, request: Any, body: Asked) -> dict[str, str]:
            return {"name": body.name}

    assert signature_of(View().post).body is Asked
    assert signature_of(View().post).is_body_required
