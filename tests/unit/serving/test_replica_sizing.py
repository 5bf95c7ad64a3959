"""`manage.py sizereplicas`: a recorded day, replayed on more replicas."""

import datetime
import random
from io import StringIO

import pytest
from django.core.management import CommandError, call_command

from apps.billing.models import UsageEvent
from apps.core.database.clock import db_now
from apps.serving.models import Replica
from tests.factories.serving import make_replica, make_served_model

STEP_MS, SECONDS = 20, 600


@pytest.fixture
def replica(db: None) -> Replica:
    return make_replica(make_served_model("small", "unix:///elsewhere", is_priced=False), "unix:///nowhere")


def record(organization, replica: Replica, *, count: int, answered: bool = True) -> None:
    """Record requests of the last ten minutes, as a replica without a queue answers them."""
    chance, now = random.Random(1), db_now()
    events = []
    for number in range(count):
        prompt, output = chance.randint(20, 400), chance.randint(5, 60)
        first = STEP_MS + prompt // 20 + 5
        latency = first + STEP_MS * (output - 1)
        ended = now - datetime.timedelta(seconds=chance.uniform(0, SECONDS))
        events.append(
            UsageEvent(
                organization=organization, id=f"use_{replica.pk}_{number}", key_id="key_1", model_name="small",
                input_tokens=prompt + 10, cached_input_tokens=10, output_tokens=output, finish="stop",
                latency_ms=latency, first_token_ms=first if answered else None, occurred_at=ended,
                replica_id=replica.pk, engine_input_tokens=prompt + 10, engine_output_tokens=output,
                body_sha256="0" * 64,
            )
        )  # fmt: skip
    UsageEvent.objects.bulk_create(events)


def size(*arguments: str) -> str:
    said = StringIO()
    call_command("sizereplicas", "small", *arguments, stdout=said)
    return said.getvalue()


def test_it_recommends_the_first_number_of_replicas_that_reaches_the_target(organization, replica):
    record(organization, replica, count=300)

    said = size("--first-token-ms", "70")

    assert said.startswith("300 requests on 1 replica: 95 % of first tokens within 44 ms.")
    assert said.splitlines()[-1] == "Recommended for 70 ms: 1 replica."


def test_a_target_below_the_engines_own_speed_is_not_reached(organization, replica):
    record(organization, replica, count=300)

    with pytest.raises(CommandError, match=r"^The target of 5 ms is not reached with 2 replicas\.$"):
        size("--first-token-ms", "5", "--most", "2")


def test_only_answers_of_the_model_on_the_day_count(organization, replica):
    record(organization, replica, count=60, answered=False)
    record(organization, make_replica(make_served_model("other", "unix:///a", is_priced=False), "unix:///b"), count=60)

    with pytest.raises(CommandError, match="0 requests were recorded, and 50 are needed"):
        size()
    with pytest.raises(CommandError, match="There is no base model tiny"):
        call_command("sizereplicas", "tiny")
    with pytest.raises(CommandError, match="0 requests were recorded"):
        size("--day", "2020-01-01")
