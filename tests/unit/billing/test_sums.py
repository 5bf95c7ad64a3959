"""Sums made in the database are those of the lines, at the begin and the end of a period as well."""

import datetime
import random
from collections import defaultdict

import pytest

from apps.accounts.models import Organization, User
from apps.billing.models import Hold, KeyLabel, UsageSeries, VolumeRebate
from apps.billing.queries import get_spending
from apps.billing.usage.spending import Spend, stream_spending
from apps.billing.usage.storage import STORED
from apps.billing.usage.sums import (
    Group,
    forecast_month,
    stream_job_charges,
    stream_uses,
    sum_by_day,
    sum_by_group,
    sum_by_subject,
    sum_jobs,
    sum_training,
    sum_uses_by_day,
)
from apps.catalog.models import PriceRule
from apps.catalog.operations import set_price
from apps.core.database.clock import begin_of_day, db_now
from tests.factories.accounts import make_key
from tests.factories.usage import list_spending, sum_by

_DAY, _MOMENT = datetime.timedelta(days=1), datetime.timedelta(microseconds=1)
FIRST, LAST = datetime.date(2026, 2, 27), datetime.date(2026, 3, 4)
NOW = datetime.datetime(2026, 3, 4, 23, 59, tzinfo=datetime.UTC)
MODELS = ("tiny", "ft:tiny:acme:bot:01", "ft:tiny:acme:other:02")
# Prices whose halves of a nano are rounded up, and one whose product with a quantity is beyond a bigint.
PRICES = {
    "inference:input:tiny": ("tokens", 333, 1_000), "inference:output:tiny": ("tokens", 5, 10),
    "warm:tiny": ("warm_ms", 7_000_001, 3_600_000), "storage:bytes": ("byte_hours", 9_000_000_000, 730_000_000_007),
    "training:one": ("gpu_ms", 3_600_000_000, 3_600_000), "training:two": ("gpu_ms", 1_999_999_999, 3_600_000),
    "conversion:bytes": ("bytes", 11, 1_000),
}  # fmt: skip


@pytest.fixture
def prices(db: None) -> dict[str, PriceRule]:
    return {
        sku: set_price(sku=sku, unit=unit, price_nano=nano, per=per, by="system", now=db_now())
        for sku, (unit, nano, per) in PRICES.items()
    }


@pytest.fixture
def spent(organization: Organization, alice: User, bob: User, rival: Organization, prices: dict[str, PriceRule]) -> str:
    """Make usage and charges of nine days around the period, and return the organization's id."""
    chance = random.Random(15)
    made = [make_key(organization, creator, scopes=frozenset({"inference"})).key.pk for creator in (alice, bob)]
    keys = [*made, "key_gone", ""]
    for key_id, value in zip(keys, ("red", "blue"), strict=False):
        KeyLabel.objects.create(organization=organization, key_id=key_id, name="2026", value=value)
        KeyLabel.objects.create(organization=organization, key_id=key_id, name="other", value="green")
    days = [FIRST + (number - 2) * _DAY for number in range(9)]
    series, holds = [], []
    for owner, day in [*((organization, day) for day in days), (rival, FIRST)]:
        for sku, price in prices.items():
            if sku.startswith(("training", "conversion")):
                # Settled at the first and the last moment of a day, and between.
                for at in (begin_of_day(day), begin_of_day(day) + _DAY - _MOMENT, begin_of_day(day) + 0.4 * _DAY):
                    captured = chance.randrange(1, 10**10)
                    holds.append(
                        Hold(
                            organization=owner, purpose="job", status="closed", closed_at=at, amount_nano=captured,
                            captured_nano=captured, refunded_nano=chance.choice([0, 0, captured // 3, captured]),
                            source=f"ftjob-{chance.randrange(30)}", key_id=chance.choice(keys),
                            member_id=chance.choice([alice.pk, bob.pk, ""]), price_rule=chance.choice([price, None]),
                            labels=chance.choice([{}, {"2026": "red"}, {"other": "blue", "2026": "pink"}]),
                        )
                    )  # fmt: skip
                continue
            for key_id in keys:
                series.append(
                    UsageSeries(
                        organization=owner, sku=sku, price_rule=price, day=day, key_id=key_id,
                        subject=STORED if sku == "storage:bytes" else chance.choice(MODELS),
                        quantity=chance.randrange(10**12), request_count=chance.randrange(1, 100),
                    )
                )  # fmt: skip
    UsageSeries.objects.bulk_create(series)
    Hold.objects.bulk_create(holds)
    Hold.objects.create(organization=organization, purpose="job", source="ftjob-open", amount_nano=5, captured_nano=5)
    Hold.objects.create(
        organization=organization, purpose="inference", source="gateway", amount_nano=5, captured_nano=5,
        status="closed", closed_at=begin_of_day(FIRST),
    )  # fmt: skip
    for month, nano in ((datetime.date(2026, 1, 1), 7), (datetime.date(2026, 2, 1), 11), (LAST.replace(day=1), 13)):
        VolumeRebate.objects.create(
            organization=organization, price_rule=prices["storage:bytes"], month=month, posted_nano=nano
        )
    return organization.pk


def lines(organization_id: str, first: datetime.date = FIRST, last: datetime.date = LAST) -> list[Spend]:
    return list_spending(organization=organization_id, first=first, last=last)


def test_lines_are_read_in_order_while_they_are_used(spent: str, monkeypatch) -> None:
    made = []
    init = Spend.__init__
    monkeypatch.setattr(Spend, "__init__", lambda self, **of: made.append(self) or init(self, **of))

    stream = stream_spending(organization=spent, first=FIRST, last=LAST)
    read = [next(stream), next(stream)]
    assert len(made) < 8
    read += stream

    assert len(read) > 20
    assert read == sorted(read, key=lambda line: (line.day, line.kind, line.subject))


@pytest.mark.parametrize(("first", "last"), [(FIRST, LAST), (LAST, LAST), (LAST + 30 * _DAY, LAST + 40 * _DAY)])
def test_each_sum_is_that_of_the_lines(spent: str, first: datetime.date, last: datetime.date) -> None:
    whole = lines(spent, first, last)
    days = {"organization": spent, "first": first, "last": last}
    metered = [line for line in whole if line.kind in ("inference", "warm", "storage")]
    training = [line for line in whole if line.kind == "training"]
    converted = [line for line in whole if line.kind == "conversion"]

    uses, sums = list(stream_uses(**days)), sum_jobs(**days)

    assert {use.subject: use.cost_nano for use in uses} == sum_by(metered, lambda line: line.subject)
    assert uses == sorted(uses, key=lambda use: -use.cost_nano) and list(stream_uses(**days, most=2)) == uses[:2]
    assert sum(day.requests for day in sum_uses_by_day(**days, subjects=[])) == sum(use.requests for use in uses)
    inputs = [line for line in metered if line.sku.startswith("inference:input:")]
    outputs = [line for line in metered if line.sku.startswith("inference:output:")]
    assert sum(use.requests for use in uses) == sum(line.requests for line in inputs)
    assert sum(use.input_tokens for use in uses) == sum(line.quantity for line in inputs)
    assert sum(use.output_tokens for use in uses) == sum(line.quantity for line in outputs)
    assert (sums.jobs, sums.conversions) == (len({line.subject for line in training}), len(converted))
    assert sums.training_nano == sum(line.cost_nano for line in training)
    assert sums.conversion_nano == sum(line.cost_nano for line in converted)
    groups = {Group.KEY: lambda line: line.key_id, Group.MEMBER: lambda line: line.member_id,
              Group.LABEL: lambda line: line.labels.get("2026", "")}  # fmt: skip
    for group, key in groups.items():
        expected = sum_by(whole, key)
        assert sum_by_group(**days, group=group, label="2026", most=99).largest == expected, group
        largest = sum_by_group(**days, group=group, label="2026", most=2)
        assert list(largest.largest.items()) == list(expected.items())[:2]
        assert (largest.others, largest.total_nano) == (max(len(expected) - 2, 0), sum(expected.values()))
    subjects = sum_by((line for line in whole if line.kind != "rebate"), lambda line: f"{line.kind} {line.subject}")
    assert sum_by_subject(**days, most=99).largest == subjects


def test_the_sums_of_days_and_hours_are_those_of_the_lines(spent: str) -> None:
    days = {"organization": spent, "first": FIRST, "last": LAST}
    training = [line for line in lines(spent) if line.kind == "training"]
    metered = [line for line in lines(spent) if line.kind in ("inference", "warm", "storage")]
    shown = (MODELS[0], STORED)
    by_day: dict[tuple[datetime.date, str], int] = defaultdict(int)
    for line in metered:
        by_day[line.day, line.subject if line.subject in shown else ""] += line.cost_nano

    found = {at.date(): nano for at, nano in sum_training(**days, step="day").items()}
    assert found == sum_by(training, lambda line: line.day)
    settled = {hold.pk: hold.closed_at for hold in Hold.objects.exclude(closed_at=None)}
    hours = sum_training(**days, step="hour")
    assert hours == sum_by(training, lambda line: settled[line.reference].replace(minute=0, second=0, microsecond=0))
    assert {at.hour for at in hours} == {0, 9, 23}
    found_uses = sum_uses_by_day(**days, subjects=shown)
    assert {(each.day, each.subject): each.cost_nano for each in found_uses} == by_day


def test_each_day_of_the_period_has_one_sum_of_each_kind(spent: str, prices: dict[str, PriceRule]) -> None:
    month = LAST.replace(day=1)
    VolumeRebate.objects.create(organization_id=spent, price_rule=prices["warm:tiny"], month=month, posted_nano=5)

    found = sum_by_day(organization=spent, first=FIRST, last=LAST)

    within = [line for line in lines(spent) if line.day >= FIRST]
    assert {(each.day, each.kind): each.cost_nano for each in found} == sum_by(
        within, lambda line: (line.day, line.kind)
    )
    assert [each.cost_nano for each in found if each.kind == "rebate"] == [-18]


def test_the_charges_of_jobs_are_those_of_their_lines_the_last_one_first(spent: str) -> None:
    training = [line for line in lines(spent) if line.kind == "training"]

    charges = list(stream_job_charges(organization=spent, first=FIRST, last=LAST))

    for charge in charges:
        own = [line for line in training if line.subject == charge.job_id]
        assert charge.day == max(line.day for line in own)
        assert charge.gpu_ms == sum(line.quantity for line in own)
        assert charge.cost_nano == sum(line.cost_nano for line in own)
    assert {charge.job_id for charge in charges} == {line.subject for line in training}
    assert [charge.day for charge in charges] == sorted((charge.day for charge in charges), reverse=True)
    assert list(stream_job_charges(organization=spent, first=FIRST, last=LAST, most=2)) == charges[:2]


def test_the_forecast_is_that_of_the_lines_of_the_month_and_of_the_last_seven_days(spent: str) -> None:
    month = LAST.replace(day=1)
    week = lines(spent, LAST - 6 * _DAY)
    of_month = sum(line.cost_nano for line in week if line.day >= month)
    recent = sum(line.cost_nano for line in week if line.kind != "rebate")

    forecast = forecast_month(organization=spent, now=NOW)

    assert (forecast.month, forecast.spent_nano) == (month, of_month)
    assert forecast.expected_nano == of_month + recent * 27 // 7


def test_the_spending_of_a_month_begins_with_its_first_moment(spent: str) -> None:
    month = LAST.replace(day=1)
    charged = [line for line in lines(spent, month, month + 40 * _DAY) if line.kind in ("training", "conversion")]

    found = get_spending(organization=spent, since=month)

    assert found.training_nano == sum(line.cost_nano for line in charged)
    assert found.training_nano < get_spending(organization=spent).training_nano


def test_the_time_zone_in_which_the_time_is_given_changes_no_sum(spent: str) -> None:
    east = datetime.timezone(datetime.timedelta(hours=14))

    assert forecast_month(organization=spent, now=NOW.astimezone(east)) == forecast_month(organization=spent, now=NOW)
