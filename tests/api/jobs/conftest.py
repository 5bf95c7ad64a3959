"""What the tests of jobs and estimates send."""

from collections.abc import Callable
from typing import Any

import pytest
from rest_framework.test import APIClient


@pytest.fixture
def post(api_client: Callable[[str], APIClient], key: str) -> Callable[..., Any]:
    """Post as the owner, expecting the status given."""

    def send(path: str, body: dict[str, object], status: int = 200) -> dict[str, Any]:
        answer = api_client(key).post(path, body, format="json")
        assert answer.status_code == status, answer.content
        return answer.json()

    return send
