"""An organization's GPU-seconds of a month."""

import datetime

from apps.contracts import runs as wire
from apps.finetuning.models import Run
from apps.finetuning.usage import quotas


def test_an_attempt_across_the_months_end_counts_in_each_month_as_long_as_it_held_its_gpus_there(
    floor, organization, claim
):
    job = floor.job()
    claim().start().finish(wire.Stopped(reason="preempted", step=0, training_seconds=0.0))
    midnight = datetime.datetime(2026, 12, 1, tzinfo=datetime.UTC)
    before, after = midnight - datetime.timedelta(seconds=30), midnight + datetime.timedelta(seconds=90)
    Run.objects.filter(job=job, leased_at__isnull=False).update(leased_at=before, finished_at=after)

    used = {
        now.month: sum(quotas.used_gpu_seconds(organizations=[organization.pk], now=now).values())
        for now in (midnight - datetime.timedelta(seconds=10), after, after + datetime.timedelta(days=31))
    }

    assert used == {11: 20, 12: 90, 1: 0}
