"""What a job's row keeps of its request, and what queries read of it."""

import msgspec
import pytest

from apps.finetuning.models import FineTuningJob
from apps.finetuning.recipes.stored_requests import (
    Integration,
    StartFrom,
    StoredRequest,
    TrackerProject,
    stored_request,
)


def test_a_stored_request_is_read_as_it_was_written():
    request = StoredRequest(
        pool="local-cpu",
        start_from=StartFrom(version="av_1", model="ft:model:bot"),
        asked={"epochs": "auto", "target_modules": ["q_proj"]},
        integrations=(Integration(type="mlflow", mlflow=TrackerProject(project="triage", tags=("a",))),),
        exports=("gguf",),
    )

    assert stored_request(FineTuningJob(requested=msgspec.to_builtins(request))) == request


@pytest.mark.parametrize(
    "row",
    [
        {},
        {"start_from": {}, "objective": None, "evaluation": None, "exports": []},
        {"method": {"type": "supervised"}, "learning_rate_multiplier": None},
    ],
)
def test_a_job_older_than_a_field_has_its_default(row):
    assert stored_request(FineTuningJob(requested=row)) == StoredRequest()


def test_queries_find_an_open_choice_as_null_and_no_start_by_its_absence():
    stored = msgspec.to_builtins(StoredRequest(start_from=StartFrom(checkpoint="ftckpt_1")))

    assert stored["pool"] is None
    assert stored["start_from"] == {"checkpoint": "ftckpt_1"}
