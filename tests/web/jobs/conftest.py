"""What a person chose in the wizard before its method."""

import pytest

from tests.factories.finetuning import make_training_file


@pytest.fixture
def chosen(floor, organization) -> dict[str, str]:
    version = make_training_file(organization, floor.base_model)
    return {"dataset": version.pk, "model": floor.base_model.name, "method": "lora"}
