"""The drawn state machines are the ones the code obeys, and the database refuses any other move."""

import pytest
from django.db import DatabaseError, transaction

from apps.finetuning.models import FineTuningJob
from scripts.assets.states import PAGE, render


def test_the_drawing_is_current():
    assert PAGE.read_text() == render(), "run: python -m scripts.assets.states"


def test_the_database_refuses_a_move_that_is_not_drawn(floor):
    job = floor.job()

    with pytest.raises(DatabaseError), transaction.atomic():
        FineTuningJob.objects.filter(pk=job.pk).update(status="paused")
