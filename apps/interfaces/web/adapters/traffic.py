"""The requests to a version and their cost, for its page."""

import datetime
from dataclasses import dataclass

from apps.adapters.models import AdapterVersion
from apps.billing.queries import list_usage
from apps.core.database.clock import db_now
from apps.core.money import rated
from apps.serving.ready_replicas import answering

TRAFFIC_DAYS = 30


@dataclass(frozen=True)
class Traffic:
    """The requests of the last days. `cost_nano` includes usage that is not charged yet."""

    days: int
    requests: int
    input_tokens: int
    output_tokens: int
    warm_hours: float
    cost_nano: int
    replicas: int


def traffic_of(version: AdapterVersion) -> Traffic:
    since = (db_now() - datetime.timedelta(days=TRAFFIC_DAYS)).date()
    series = list(list_usage(organization=version.organization_id, since=since).filter(subject=version.model_name))

    def total(kind: str) -> int:
        return sum(line.quantity for line in series if line.sku.startswith(kind))

    return Traffic(
        days=TRAFFIC_DAYS,
        requests=sum(line.request_count for line in series if line.sku.startswith("inference:input:")),
        input_tokens=total("inference:input:"),
        output_tokens=total("inference:output:"),
        warm_hours=total("warm:") / 3_600_000,
        cost_nano=sum(
            rated(quantity=line.quantity, price_nano=line.price_rule.price_nano, per=line.price_rule.per)
            for line in series
        ),
        replicas=answering().filter(adapter_version=version).count(),
    )
