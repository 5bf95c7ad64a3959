"""What tests of jobs over the API begin with: a floor with a pool and a worker, a training file, and OpenAI's SDK."""

import openai
import pytest

from tests.factories.finetuning import make_training_file
from tests.support.attempts import call, claim, metered, version  # noqa: F401 - fixtures
from tests.support.sdk import openai_client


@pytest.fixture
def file_id(floor) -> str:
    return make_training_file(floor.organization, floor.base_model).pk


@pytest.fixture
def sdk(key) -> openai.OpenAI:
    return openai_client(key)
