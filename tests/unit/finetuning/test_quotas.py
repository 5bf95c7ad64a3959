"""An organization's GPU-seconds of a month."""

import datetime

from apps.contracts import runs as wire
from apps.finetuning import quotas
from apps.finetuning.models import Checkpoint, FineTuningJob


def test_a_job_across_the_months_end_counts_in_each_month_what_it_trained_there(floor, organization, claim):
    job = floor.job()
    attempt = claim()
    attempt.start()
    attempt.checkpoint(step=2, seconds=4.0)
    attempt.checkpoint(step=4, seconds=9.0)
    attempt.finish(wire.Stopped(reason="preempted", step=4, training_seconds=9.0))
    FineTuningJob.objects.filter(pk=job.pk).update(billed_gpu_ms=9_000)
    november = datetime.datetime(2026, 11, 30, 23, 59, tzinfo=datetime.UTC)
    december = november + datetime.timedelta(minutes=2)
    for step, saved_at in ((2, november), (4, december)):
        Checkpoint.objects.filter(job=job, step=step).update(created_at=saved_at)

    used = {
        now.month: quotas.used_gpu_seconds(organization=organization, now=now)
        for now in (november, december, december + datetime.timedelta(days=31))
    }

    assert used == {11: 9, 12: 5, 1: 0}
