"""When a plan is due next. All times are UTC."""

import datetime
from dataclasses import dataclass

from django.utils.translation import gettext

from apps.core.errors import InvalidValue
from apps.finetuning.lifecycle import Cadence
from apps.finetuning.models import RetrainingPlan

# The largest value of each cadence. A month has at least 28 days.
_MOST = {Cadence.DAYS: 365, Cadence.WEEK: 7, Cadence.MONTH: 28}


@dataclass(frozen=True)
class Schedule:
    """`value`: the days between, the day of the week from 1 (Monday), or the day of the month."""

    cadence: Cadence
    value: int
    hour_utc: int = 0

    def check(self) -> None:
        """Raise InvalidValue for a value or an hour that does not exist."""
        most = _MOST[self.cadence]
        if not 1 <= self.value <= most:
            text = gettext("With '%(cadence)s', the value is from 1 to %(most)s.")
            raise InvalidValue(text % {"cadence": self.cadence.value, "most": most}, param="schedule.value")
        if not 0 <= self.hour_utc <= 23:
            raise InvalidValue(gettext("The hour is from 0 to 23, in UTC."), param="schedule.hour_utc")

    def next_due(self, after: datetime.datetime) -> datetime.datetime:
        """Return the first moment after `after` at which it is due; missed ones are not made up for."""
        today = after.astimezone(datetime.UTC).date()
        match self.cadence:
            case Cadence.DAYS:
                return self._at(today + datetime.timedelta(days=self.value))
            case Cadence.WEEK:
                day = today + datetime.timedelta(days=(self.value - today.isoweekday()) % 7)
                following = day + datetime.timedelta(days=7)
            case Cadence.MONTH:
                day = today.replace(day=self.value)
                following = (day.replace(day=1) + datetime.timedelta(days=32)).replace(day=self.value)
        return self._at(day) if self._at(day) > after else self._at(following)

    def most_in_a_month(self) -> int:
        """Return how often it is due in a month, at most."""
        match self.cadence:
            case Cadence.DAYS:
                return -(-31 // self.value)
            case Cadence.WEEK:
                return 5
            case Cadence.MONTH:
                return 1

    def _at(self, day: datetime.date) -> datetime.datetime:
        return datetime.datetime.combine(day, datetime.time(self.hour_utc), datetime.UTC)


def schedule_of(plan: RetrainingPlan) -> Schedule | None:
    """Return the schedule of a plan, None if it has none."""
    if plan.cadence_value is None:
        return None
    return Schedule(Cadence(plan.cadence), plan.cadence_value, plan.hour_utc)
