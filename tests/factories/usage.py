"""Records of metered requests, and what an organization spent."""

import datetime
from collections import defaultdict
from collections.abc import Callable, Iterable
from itertools import count
from typing import TypeVar

import msgspec

from apps.accounts.models import Organization
from apps.batches.completions.records import CompletionRecord
from apps.billing.usage.metering import UsageRecord
from apps.billing.usage.spending import Spend, stream_spending
from apps.interfaces.gateway.metering.spool import Start

_numbers = count(1)
Key = TypeVar("Key")


def make_record(**fields) -> UsageRecord:
    values = {
        "id": f"use_{next(_numbers)}",
        "organization_id": "org_1",
        "key_id": "key_1",
        "model_name": "tiny",
        "adapter_version_id": "",
        "slice_id": "hold_1",
        "input_price_id": "price_1",
        "output_price_id": "price_2",
        "input_tokens": 3,
        "cached_input_tokens": 0,
        "output_tokens": 4,
        "finish": "stop",
        "latency_ms": 1,
        "first_token_ms": None,
        "occurred_at": datetime.datetime(2026, 11, 3, tzinfo=datetime.UTC),
    }
    return UsageRecord(**(values | fields))


def make_start(record: UsageRecord) -> Start:
    return Start(
        id=record.id, organization_id="org_1", key_id="key_1", model_name="tiny", slice_id="hold_1",
        worst_case_nano=9, at=1_762_000_000.0,
    )  # fmt: skip


def make_completion(**fields) -> CompletionRecord:
    values = {
        "id": f"chatcmpl-{next(_numbers)}",
        "organization_id": "org_1",
        "key_id": "key_1",
        "request_id": "req_1",
        "model_name": "tiny",
        "created": 1_762_000_000,
        "metadata": {},
        "request": msgspec.Raw(b'{"messages":[]}'),
        "answer": msgspec.Raw(b'{"choices":[],"usage":{}}'),
    }
    return CompletionRecord(**(values | fields))


def list_spending(*, organization: Organization | str, first: datetime.date, last: datetime.date) -> list[Spend]:
    """Return every line between these UTC days, both included, ordered by day."""
    return list(stream_spending(organization=organization, first=first, last=last))


def sum_by(lines: Iterable[Spend], key: Callable[[Spend], Key]) -> dict[Key, int]:
    """Return the nano spent under each key, largest first."""
    sums: dict[Key, int] = defaultdict(int)
    for line in lines:
        sums[key(line)] += line.cost_nano
    return dict(sorted(sums.items(), key=lambda item: -item[1]))
