"""Workers of each release finish their runs against the present API, and read what it answers."""

import copy
from typing import Any

import msgspec
import pytest

from apps.contracts import worker_api as wire
from tests.unit.contracts.released_contracts import (
    SENT_BY_WORKERS,
    SENT_TO_WORKERS,
    Reading,
    Schema,
    read_released,
    schemas_now,
)

RELEASED = read_released()


@pytest.fixture
def now() -> Any:
    return copy.deepcopy(schemas_now())


@pytest.mark.parametrize("release", RELEASED)
def test_the_api_understands_a_released_worker(now: Schema, release: str):
    reading = Reading(reader=now, writer=RELEASED[release])

    assert {kind.__name__: reading.problems(kind.__name__) for kind in SENT_BY_WORKERS} == {
        kind.__name__: [] for kind in SENT_BY_WORKERS
    }


@pytest.mark.parametrize("release", RELEASED)
def test_a_released_worker_understands_the_api(now: Schema, release: str):
    reading = Reading(reader=RELEASED[release], writer=now)

    assert {kind.__name__: reading.problems(kind.__name__) for kind in SENT_TO_WORKERS} == {
        kind.__name__: [] for kind in SENT_TO_WORKERS
    }


def test_every_message_of_the_worker_api_is_compared(now: Schema):
    defined = {name for name, kind in vars(wire).items() if isinstance(kind, type) and issubclass(kind, msgspec.Struct)}

    assert defined - {"Struct"} <= now.keys()


BREAKING = {
    "a new field that is required": (
        lambda now: now["EnrollRequest"]["required"].append("serial_number"),
        "EnrollRequest.serial_number is not sent",
    ),
    "a narrower number": (
        lambda now: now["StepCompleted"]["properties"]["step"].update(maximum=100),
        "EventsRequest.events[].step has another maximum",
    ),
    "another type": (
        lambda now: now["ProbeReport"]["properties"]["base_model_id"].update(type="integer"),
        "ProbeReport.base_model_id is string, not integer",
    ),
    "a value that is refused": (
        lambda now: now["FailureCode"]["enum"].remove("worker_lost"),
        "may be 'worker_lost'",
    ),
}


@pytest.mark.parametrize(("change", "complaint"), BREAKING.values(), ids=BREAKING)
def test_a_change_that_breaks_released_workers_is_found(now: Any, change: Any, complaint: str):
    released = schemas_now()
    change(now)
    reading = Reading(reader=now, writer=released)

    assert complaint in " ".join(problem for kind in SENT_BY_WORKERS for problem in reading.problems(kind.__name__))


def test_an_answer_that_lacks_a_field_is_found(now: Any):
    released = schemas_now()
    del now["RunSpec"]["properties"]["job_id"]

    assert Reading(reader=released, writer=now).problems("ClaimResponse") == ["ClaimResponse.spec.job_id is not sent"]


def test_a_new_field_with_a_default_breaks_nothing(now: Any):
    released = schemas_now()
    now["ClaimRequest"]["properties"]["zone"] = {"type": "string", "default": ""}

    assert Reading(reader=now, writer=released).problems("ClaimRequest") == []
    assert Reading(reader=released, writer=now).problems("ClaimRequest") == []
