"""The official SDK, speaking to the application in this process, inside the test's own transaction.

Each answer must be one that the OpenAPI document has.
"""

import json

import httpx
import openai
from django.test import Client
from openai.types.fine_tuning import FineTuningJob

from apps.accounts.login.key_operations import IssuedKey
from tests.support.api.document import check_answer


class InProcess(httpx.BaseTransport):
    """Carries an HTTP request to Django's test client, and its response back."""

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        headers = {name: value for name, value in request.headers.items() if name != "content-type"}
        response = Client(raise_request_exception=False).generic(
            request.method,
            request.url.raw_path.decode(),
            request.read(),
            content_type=request.headers.get("content-type", "application/octet-stream"),
            headers=headers,
        )
        body = b"".join(response) if response.streaming else response.content
        check_answer(request.method, request.url.path, response.status_code, response.headers["Content-Type"], body)
        return httpx.Response(response.status_code, headers=dict(response.items()), content=body)


def openai_client(key: IssuedKey | str, **options: object) -> openai.OpenAI:
    secret = key.secret if isinstance(key, IssuedKey) else key
    return openai.OpenAI(
        api_key=secret,
        base_url="http://testserver/v1",
        http_client=httpx.Client(transport=InProcess()),
        # Each answer must have the fields and values of the SDK's own types.
        **({"max_retries": 0, "_strict_response_validation": True} | options),
    )


def extended_client(key: IssuedKey | str) -> openai.OpenAI:
    """Return a client for answers with values that the SDK's types lack.

    Only Anneal has ORPO, dry runs, pauses and graders of pairs. OpenAI documents the others: the purpose `evals`,
    `"error": null` of a run, and stored messages of users.
    """
    return openai_client(key, _strict_response_validation=False)


def create(sdk: openai.OpenAI, file_id: str, **fields: object) -> FineTuningJob:
    """Create a job of the demo model as client code does."""
    return sdk.fine_tuning.jobs.create(**({"model": "anneal-demo", "training_file": file_id} | fields))


class Answers(httpx.BaseTransport):
    """Gives prepared answers in turn."""

    def __init__(self, *answers: httpx.Response | Exception) -> None:
        self.left = list(answers)
        self.bodies: list[object] = []

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        self.bodies.append(json.loads(request.read() or b"null"))
        answer = self.left.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer
