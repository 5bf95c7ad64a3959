"""The period that a page shows: a preset in the address (`days`), or the first and last day (`first`, `last`)."""

import datetime
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from django import forms
from django.http import QueryDict
from django.utils.formats import date_format
from django.utils.http import urlencode
from django.utils.translation import gettext

from apps.core.database.clock import begin_of_day
from apps.core.messages.translation import later

_DAY = datetime.timedelta(days=1)
_HOUR = datetime.timedelta(hours=1)
_MOST_HOURLY = 7 * _DAY


class PeriodForm(forms.Form):
    """The first and the last UTC day."""

    first = forms.DateField(
        label=later("From"),
        input_formats=["%Y-%m-%d"],
        widget=forms.DateInput(format="%Y-%m-%d", attrs={"type": "date"}),
        error_messages={"required": later("Choose the first day."), "invalid": later("Write the day as 2026-11-03.")},
    )
    last = forms.DateField(
        label=later("To"),
        input_formats=["%Y-%m-%d"],
        widget=forms.DateInput(format="%Y-%m-%d", attrs={"type": "date"}),
        error_messages={"required": later("Choose the last day."), "invalid": later("Write the day as 2026-11-03.")},
    )

    def __init__(self, data: QueryDict | None, *, today: datetime.date, most_days: int, **options: Any) -> None:
        super().__init__(data, **options)
        self._today, self._most_days = today, most_days

    def clean(self) -> dict[str, Any]:
        cleaned: dict[str, Any] = super().clean() or self.cleaned_data
        first, last = cleaned.get("first"), cleaned.get("last")
        if last and last > self._today:
            self.add_error("last", gettext("Choose %(today)s or an earlier day.") % {"today": self._today})
        elif first and last and first > last:
            self.add_error("last", gettext("Choose a day that is not before the first one."))
        elif first and last and (last - first).days >= self._most_days:
            self.add_error("first", gettext("Choose at most %(most_days)s days.") % {"most_days": self._most_days})
        return cleaned


@dataclass(frozen=True, kw_only=True)
class Period:
    """Whole UTC days, or the last 24 hours. `since` is included, `until` is not."""

    since: datetime.datetime
    until: datetime.datetime
    words: str
    asked: dict[str, str]  # the period as an address has it
    presets: tuple[tuple[str, str, bool], ...]  # query, words, whether it is shown
    form: PeriodForm

    @property
    def first(self) -> datetime.date:
        return self.since.date()

    @property
    def last(self) -> datetime.date:
        return (self.until - _HOUR).date()

    @property
    def step(self) -> Literal["hour", "day"]:
        """Return the step of charts: hours up to a week, days beyond it."""
        return "hour" if self.until - self.since <= _MOST_HOURLY else "day"

    @property
    def step_word(self) -> str:
        return gettext("hour") if self.step == "hour" else gettext("day")

    def query(self, **more: str) -> str:
        """Return the query of an address that shows this period."""
        return urlencode({name: value for name, value in (self.asked | more).items() if value})


def period_of(
    asked: QueryDict, *, now: datetime.datetime, presets: Mapping[int, str], most_days: int, **more: str
) -> Period:
    """Return the period of an address, or 30 days if it names none or an impossible one.

    For an impossible period, the form has the error. A preset of 1 day is the last 24 hours. `more` stays in the
    addresses of the presets.
    """
    now = now.astimezone(datetime.UTC)
    tomorrow = now.replace(hour=0, minute=0, second=0, microsecond=0) + _DAY
    is_custom = "first" in asked or "last" in asked
    form = PeriodForm(asked if is_custom else None, today=now.date(), most_days=most_days)
    days = int(asked.get("days", "")) if asked.get("days", "") in map(str, presets) else 30
    if is_custom and form.is_valid():
        first, last = form.cleaned_data["first"], form.cleaned_data["last"]
        since = begin_of_day(first)
        until = begin_of_day(last) + _DAY
        day = gettext("j M Y")
        query, words = (
            {"first": str(first), "last": str(last)},
            gettext("%(first)s to %(last)s") % {"first": date_format(first, day), "last": date_format(last, day)},
        )
        days = 0
    else:
        until = tomorrow if days > 1 else now.replace(minute=0, second=0, microsecond=0) + _HOUR
        since = until - days * _DAY
        query, words = {"days": str(days)}, presets[days]
    form.initial = {"first": since.date(), "last": (until - _HOUR).date()}
    links = tuple(
        (urlencode({"days": each} | {name: value for name, value in more.items() if value}), text, each == days)
        for each, text in presets.items()
    )
    return Period(since=since, until=until, words=words, asked=query, presets=links, form=form)
