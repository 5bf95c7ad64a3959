"""What was spent in a period, by day, by model or job, or by key, member, project or label."""

import datetime
from typing import Annotated, Literal, TypedDict

import msgspec
from msgspec import Meta
from rest_framework.request import Request

from apps.accounts.models import Organization
from apps.accounts.roles import Permission
from apps.billing.invoices.profiles import get_profile
from apps.billing.usage.sums import Group, GroupSums, sum_by_day, sum_by_group, sum_by_subject
from apps.core.database.clock import db_now
from apps.core.errors import InvalidValue
from apps.core.money import usd_decimal
from apps.interfaces.api.views import ApiView

_MOST_DAYS = 366
_USUAL = datetime.timedelta(days=29)  # from the first day to the last
_FIRST_DAY = datetime.date(1, 1, 1)
_NO_OTHERS = GroupSums(largest={}, others=0, others_nano=0)
GroupBy = Literal["day", "subject", "key", "member", "project", "label"]


class CostsQuery(msgspec.Struct):
    first: Annotated[datetime.date, Meta(description="The first UTC day; by default of the last 30.")] | None = None
    last: Annotated[datetime.date, Meta(description="The last UTC day, included; by default today.")] | None = None
    group_by: GroupBy = "day"
    label: Annotated[str, Meta(max_length=64, description="A label's name; else the profile's.")] | None = None
    limit: Annotated[int, Meta(ge=1, le=1000, description="Of the most expensive groups; days are all.")] = 100


class CostObject(TypedDict):
    """`kind` is set for days and subjects: `training`, `inference`, `warm`, `storage`, `conversion` or `rebate`.

    `group` is the day, model, job, conversion, key, member, project or value of the label; null for costs without one.
    """

    object: Literal["cost"]
    kind: str | None
    group: str | None
    cost_usd: str


class CostsObject(TypedDict):
    """The groups add up to `total_usd` with `others_usd`, which is that of the `others`, a number of groups."""

    object: Literal["costs"]
    first: str
    last: str
    group_by: str
    data: list[CostObject]
    others: int
    others_usd: str
    total_usd: str


class Costs(ApiView):
    required_scope = {"GET": Permission.VIEW}

    def get(self, request: Request, query: CostsQuery) -> CostsObject:
        """Return what was spent in a period, by group, the most expensive first; days in order.

        Requests and storage count on the day of use, with usage that is not charged yet, and jobs and conversions on
        the day that they were settled. `subject` is the model, job, conversion or storage, and leaves out rebates.
        A rebate counts in every period that has a day of its month; `day` has it only on the first day of that month.
        """
        first, last = _period(query, today=db_now().astimezone(datetime.UTC).date())
        data, others = _groups(self.organization, query, first, last)
        return {
            "object": "costs",
            "first": first.isoformat(),
            "last": last.isoformat(),
            "group_by": query.group_by,
            "data": [
                {"object": "cost", "kind": kind, "group": group or None, "cost_usd": usd_decimal(nano)}
                for kind, group, nano in data
            ],
            "others": others.others,
            "others_usd": usd_decimal(others.others_nano),
            "total_usd": usd_decimal(sum(nano for _, _, nano in data) + others.others_nano),
        }


def _period(query: CostsQuery, *, today: datetime.date) -> tuple[datetime.date, datetime.date]:
    last = query.last or today
    first = query.first or max(last, _FIRST_DAY + _USUAL) - _USUAL
    if first > last:
        raise InvalidValue("'first' must not be after 'last'. Send an earlier day.", param="first")
    if (last - first).days >= _MOST_DAYS:
        raise InvalidValue(f"A period has at most {_MOST_DAYS} days. Send a later 'first'.", param="first")
    return first, last


def _groups(
    organization: Organization, query: CostsQuery, first: datetime.date, last: datetime.date
) -> tuple[list[tuple[str | None, str, int]], GroupSums]:
    """Return the kind, group and nano of each cost that is named, and the sums with those that are not."""
    if query.group_by == "day":
        costs = sum_by_day(organization=organization, first=first, last=last)
        return [(each.kind, each.day.isoformat(), each.cost_nano) for each in costs], _NO_OTHERS
    if query.group_by == "subject":
        sums = sum_by_subject(organization=organization, first=first, last=last, most=query.limit)
        parts = [(name.partition(" "), nano) for name, nano in sums.largest.items()]
        return [(kind, subject, nano) for (kind, _, subject), nano in parts], sums
    sums = sum_by_group(
        organization=organization,
        first=first,
        last=last,
        group=Group(query.group_by),
        label=query.label or get_profile(organization=organization).chargeback_label,
        most=query.limit,
    )
    return [(None, name, nano) for name, nano in sums.largest.items()], sums
