"""Lists of jobs ask the database as often for many queued jobs as for one."""

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext

from apps.finetuning.models import Worker


@pytest.fixture
def asked(client_for, alice, key):
    """Return the statements that a list takes, and its answer."""
    browser, program = client_for(alice), Client(headers={"Authorization": f"Bearer {key.secret}"})

    def ask(path):
        client = program if path.startswith("/v1") else browser
        client.get(path)  # what a process keeps is asked for once
        with CaptureQueriesContext(connection) as captured:
            answer = client.get(path)
        assert answer.status_code == 200
        return len(captured), answer

    return ask


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/v1/fine_tuning/jobs", "/jobs"])
def test_more_queued_jobs_take_no_more_statements(path, asked, floor, claim):
    Worker.objects.filter(pk=floor.worker.pk).update(gpus=floor.worker.gpus[:1])
    floor.job()
    claim().start()
    floor.job()
    few, _ = asked(path)
    jobs = [floor.job().pk for _ in range(4)]

    many, answer = asked(path)

    assert many == few
    if path == "/jobs":
        assert all(job in answer.content.decode() for job in jobs)
    else:
        waits = [(job["queue_position"], job["waiting_for"]) for job in answer.json()["data"]]
        assert waits == [(place, "capacity") for place in (5, 4, 3, 2, 1)] + [(None, None)]
