"""Bodies that workers send wrongly: refused by field, in the words of every other API."""

import pytest
from django.test import Client

from tests.factories.finetuning import CREDENTIAL, TrainingSetup


@pytest.mark.parametrize(
    ("body", "code", "param", "words"),
    [
        (b'{"api_version": "new"}', "invalid_value", "api_version", "Use a whole number."),
        (b'{"base_models": "x"}', "invalid_value", "base_models", "Use a list of at most 1,000 items."),
        (b'{"api_version": 1', "invalid_json", None, "Send one JSON object in UTF-8."),
        (b"[" * 100_000, "invalid_json", None, "Flatten it."),
    ],
)
def test_a_bad_body_names_its_field(organization, settings, body: bytes, code: str, param: str, words: str) -> None:
    TrainingSetup(organization)
    settings.ROOT_URLCONF = "apps.config.urls_internal"

    answer = Client().post(
        "/internal/v1/claim", body, content_type="application/json", headers={"Authorization": f"Bearer {CREDENTIAL}"}
    )

    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, code, param)
    assert words in error["message"]
    assert "msgspec" not in error["message"] and "`" not in error["message"]
