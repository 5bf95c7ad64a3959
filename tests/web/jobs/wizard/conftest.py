"""Fixtures of the wizard: what a person chose before the method, and its pages."""

from urllib.parse import urlencode

import pytest

from tests.factories.finetuning import make_training_file
from tests.support.pages import text
from tests.web.pages import WIZARD_URL


@pytest.fixture
def chosen(floor, organization) -> dict[str, str]:
    version = make_training_file(organization, floor.base_model)
    return {"dataset": version.pk, "model": floor.base_model.name, "method": "lora"}


@pytest.fixture
def page(client_for, bob):
    client = client_for(bob)

    def get(query: dict[str, str], *, status: int = 200, headers: dict[str, str] | None = None) -> str:
        answer = client.get(f"{WIZARD_URL}?{urlencode(query)}", headers=headers)
        assert answer.status_code == status
        return text(answer)

    return get
