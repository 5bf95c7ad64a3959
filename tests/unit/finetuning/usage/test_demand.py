"""What an organization uses, now and in the last 30 days."""

import datetime

from apps.billing.models import StorageSample, UsageSeries
from apps.catalog.operations import set_price
from apps.contracts import runs as wire
from apps.contracts.failures import FailureCode
from apps.core.database.clock import db_now
from apps.finetuning.models import FineTuningJob, Run
from apps.finetuning.usage.demand import get_demand

DAY = datetime.timedelta(days=1)
HOUR = datetime.timedelta(hours=1)


def test_gpus_and_jobs_count_at_their_peak_and_only_what_lies_in_the_window(floor, organization, claim):
    now = db_now()
    spans = [(now - 9 * DAY, now - 9 * DAY + 2 * HOUR), (now - 9 * DAY + HOUR, now - 8 * DAY), (now - 50 * DAY,) * 2]
    for begin, end in spans:
        job = floor.job()
        claim().start().finish(wire.Failed(code=FailureCode.OUT_OF_MEMORY, message="x"))
        Run.objects.filter(job=job).update(leased_at=begin, finished_at=end)
        FineTuningJob.objects.filter(pk=job.pk).update(created_at=begin, finished_at=end)
    floor.job()

    demand = get_demand(organization=organization, now=now)

    assert (demand.gpus, demand.most_gpus) == (0, 2)
    assert (demand.jobs, demand.most_jobs) == (1, 2)
    assert demand.gpu_seconds == 25 * 3600


def test_storage_requests_and_tokens_come_from_what_is_metered(organization, rival):
    now = db_now()
    StorageSample.objects.create(organization=organization, hour_at=now - DAY, bytes=700)
    StorageSample.objects.create(organization=organization, hour_at=now - 40 * DAY, bytes=9_000)
    for way, tokens in (("input", 10), ("output", 5)):
        sku = f"inference:{way}:m"
        price = set_price(sku=sku, unit="tokens", price_nano=1, per=1, by="system", now=now)
        for owner, days in ((organization, 1), (organization, 2), (organization, 60), (rival, 1)):
            UsageSeries.objects.create(
                organization=owner, sku=sku, price_rule=price, subject="m", day=(now - days * DAY).date(),
                quantity=tokens * days, request_count=days,
            )  # fmt: skip

    demand = get_demand(organization=organization, now=now)

    assert (demand.storage_bytes, demand.most_storage_bytes) == (0, 700)
    assert (demand.requests, demand.most_requests_of_day) == (3, 2)
    assert (demand.tokens, demand.most_tokens_of_day) == (45, 30)
