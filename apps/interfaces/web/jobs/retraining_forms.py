"""The form of a retraining plan: the job to repeat, when, the rows to compare on, and what it may cost."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import ROUND_CEILING, Decimal
from typing import Any

from django import forms
from django.db.models import QuerySet
from django.http import QueryDict
from django.utils.dates import WEEKDAYS
from django.utils.translation import gettext, ngettext

from apps.accounts.models import Organization
from apps.core.http.forms import LARGEST_INTEGER
from apps.core.messages.translation import later
from apps.core.money import LARGEST_USD, nano_to_usd, usd_decimal, usd_to_nano
from apps.datasets.queries import list_datasets
from apps.finetuning.jobs.retraining.plans import EXACT, PlanRequest, list_repeatable, request_of
from apps.finetuning.jobs.retraining.schedules import Schedule, schedule_of
from apps.finetuning.lifecycle import Cadence
from apps.finetuning.models import FineTuningJob, RetrainingPlan
from apps.interfaces.web.evals.criteria_forms import CriteriaForms, criteria_in, values_of
from apps.interfaces.web.evals.models_offered import list_models, name_of_alias
from apps.serving.aliases import list_aliases
from apps.serving.models import Alias

_MOST = 200  # that a list to choose from holds, besides what the plan names
_DAYS = (1, 2, 3, 7, 14, 30)
_FIRST_SCHEDULE, _FIRST_HOUR = "week-1", 3
_ANY_NUMBER = forms.NumberInput(attrs={"step": "any"})
_Choices = list[tuple[str, Any]]


class PlanForm(forms.Form):
    """A new plan, or the changes of `plan`. If `job` may be repeated, its values fill in a new plan.

    Without `data`, values in `query`, the address, replace those of the plan or job.

    A checked form, whose `criteria` are valid as well, has `asked`, the request of the domain, and `fingerprint`, which
    names its values. With `is_changed` the number or kinds of criteria changed, and nothing is checked.
    """

    name = forms.CharField(max_length=80, label=later("Name"))
    source_job = forms.ChoiceField(
        label=later("Repeats"),
        help_text=later("A fine-tune that succeeded. Its model, method, settings and pool are used again."),
    )
    dataset = forms.ChoiceField(label=later("Trains on"), help_text=later("The newest version that is ready."))
    schedule = forms.ChoiceField(required=False, label=later("On a schedule"))
    hour_utc = forms.TypedChoiceField(
        coerce=int, choices=[(hour, f"{hour:02}:00 UTC") for hour in range(24)], label=later("At")
    )
    min_new_rows = forms.IntegerField(
        required=False,
        min_value=1,
        max_value=LARGEST_INTEGER,
        label=later("When the dataset has grown"),
        help_text=later("By how many rows. Give this, a schedule, or both."),
    )
    held_out = forms.ChoiceField(
        label=later("Compares on"),
        help_text=later("Held-out rows that both models answer. They are not trained on."),
    )
    min_gain_points = forms.FloatField(
        min_value=0,
        max_value=100,
        label=later("Must pass more by"),
        help_text=later("With 0, any gain is enough if it is certain."),
        widget=_ANY_NUMBER,
    )
    regression = forms.ChoiceField(
        required=False, label=later("Must not get worse on"), help_text=later("Rows of another dataset.")
    )
    max_loss_points = forms.FloatField(
        required=False,
        min_value=0,
        max_value=100,
        label=later("May lose at most"),
        widget=_ANY_NUMBER,
    )
    alias = forms.ChoiceField(
        label=later("Alias"), help_text=later("The name of the model in production. A better model takes it over.")
    )
    max_usd = forms.DecimalField(
        label=later("Costs at most"),
        min_value=Decimal("0.01"),
        max_value=LARGEST_USD,
        max_digits=19,
        decimal_places=9,
        widget=_ANY_NUMBER,
        help_text=later("Each retraining, its comparisons included."),
    )

    def __init__(
        self,
        data: QueryDict | None = None,
        *,
        organization: Organization,
        query: QueryDict,
        plan: RetrainingPlan | None = None,
        job: FineTuningJob | None = None,
    ) -> None:
        self.plan = plan
        known = list_aliases(organization=organization)
        initial = (_values_of(plan) if plan else _first_values(job, known)) | query.dict()
        criteria = [values_of(one) for one in (request_of(plan).testing_criteria if plan else (EXACT,))]
        self.criteria = CriteriaForms(
            data,
            models=list_models(organization=organization),
            initial=criteria_in(query, otherwise=criteria),
            is_pairwise_offered=False,
        )
        self.is_changed = data is not None and self.criteria.is_changed_by(data)
        initial |= data.dict() if data is not None and self.is_changed else {}
        super().__init__(None if self.is_changed else data, initial=initial)
        sent = data or QueryDict()
        given = {name: str(sent.get(name) or initial.get(name) or "") for name in self.fields}
        self._offer(["source_job"], given, list_repeatable(organization=organization), _name_of_job)
        self._offer(["dataset", "held_out", "regression"], given, list_datasets(organization=organization), str)
        self._offer(["alias"], given, known, name_of_alias)
        self._set_choices("schedule", _schedules(given["schedule"]))

    def _offer(
        self, names: Sequence[str], given: Mapping[str, str], rows: QuerySet[Any], label: Callable[[Any], str]
    ) -> None:
        """Offer the first objects in these fields, and those that are already chosen."""
        found = {row.pk: row for row in rows[:_MOST]}
        missing = {given[name] for name in names if "\x00" not in given[name]} - {"", *found}
        if missing and len(found) == _MOST:
            found |= {row.pk: row for row in rows.filter(pk__in=missing)}
        for name in names:
            empty = gettext("Choose one") if self.fields[name].required else gettext("None")
            self._set_choices(name, [("", empty), *((pk, label(row)) for pk, row in found.items())])

    def _set_choices(self, name: str, choices: _Choices) -> None:
        self.fields[name].choices = choices  # type: ignore[attr-defined]

    def clean(self) -> dict[str, Any]:
        """Require a start condition, and a bound for the rows that must not get worse."""
        cleaned: dict[str, Any] = super().clean() or self.cleaned_data
        if not cleaned.get("schedule") and cleaned.get("min_new_rows") is None and "min_new_rows" not in self.errors:
            self.add_error("schedule", gettext("Choose a schedule, a number of new rows, or both."))
        is_bounded = cleaned.get("max_loss_points") is not None
        if bool(cleaned.get("regression")) != is_bounded and not {"regression", "max_loss_points"} & {*self.errors}:
            field = "regression" if is_bounded else "max_loss_points"
            self.add_error(field, gettext("Give both: the rows, and how many points may be lost."))
        return cleaned

    @property
    def asked(self) -> PlanRequest:
        data = self.cleaned_data
        return PlanRequest(
            name=data["name"],
            source_job=data["source_job"],
            dataset=data["dataset"],
            alias=data["alias"],
            max_nano=usd_to_nano(data["max_usd"]),
            held_out=data["held_out"],
            regression=data["regression"] or None,
            max_loss_points=data["max_loss_points"],
            min_gain_points=data["min_gain_points"],
            schedule=_read_schedule(data["schedule"], data["hour_utc"]),
            min_new_rows=data["min_new_rows"],
            testing_criteria=self.criteria.criteria,
            is_enabled=self.plan.is_enabled if self.plan else True,
        )

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(repr(self.asked).encode()).hexdigest()


def schedule_words(schedule: Schedule) -> str:
    """Return the days of a schedule in words, without the hour."""
    match schedule.cadence:
        case Cadence.DAYS:
            return ngettext("Every day", "Every %(days)s days", schedule.value) % {"days": schedule.value}
        case Cadence.WEEK:
            return gettext("Every %(weekday)s") % {"weekday": WEEKDAYS[schedule.value - 1]}
        case Cadence.MONTH:
            return gettext("On day %(day)s of each month") % {"day": schedule.value}


def _schedules(chosen: str) -> _Choices:
    """Return the choices of a schedule in groups, including the one already chosen."""
    days = {*_DAYS, *_days_of(chosen)}
    groups = {
        gettext("By days"): [Schedule(Cadence.DAYS, value) for value in sorted(days)],
        gettext("By week"): [Schedule(Cadence.WEEK, value) for value in range(1, 8)],
        gettext("By month"): [Schedule(Cadence.MONTH, value) for value in range(1, 29)],
    }
    offered = [(group, [(_key_of(each), schedule_words(each)) for each in all_]) for group, all_ in groups.items()]
    return [("", gettext("No schedule")), *offered]


def _days_of(chosen: str) -> Iterator[int]:
    cadence, _, value = chosen.partition("-")
    if cadence == Cadence.DAYS and value.isascii() and value.isdecimal() and 1 <= len(value) <= 3:
        yield from {int(value)} & {*range(1, 366)}


def _key_of(schedule: Schedule) -> str:
    return f"{schedule.cadence.value}-{schedule.value}"


def _read_schedule(key: str, hour_utc: int) -> Schedule | None:
    if not key:
        return None
    cadence, _, value = key.partition("-")
    return Schedule(Cadence(cadence), int(value), hour_utc)


def _values_of(plan: RetrainingPlan) -> dict[str, object]:
    asked, schedule = request_of(plan), schedule_of(plan)
    return {
        "name": asked.name,
        "source_job": asked.source_job,
        "dataset": asked.dataset,
        "schedule": _key_of(schedule) if schedule else "",
        "hour_utc": schedule.hour_utc if schedule else _FIRST_HOUR,
        "min_new_rows": asked.min_new_rows,
        "held_out": asked.held_out,
        "min_gain_points": f"{asked.min_gain_points:g}",
        "regression": asked.regression,
        "max_loss_points": asked.max_loss_points,
        "alias": asked.alias,
        "max_usd": usd_decimal(asked.max_nano),
    }


def _first_values(job: FineTuningJob | None, aliases: QuerySet[Alias]) -> dict[str, object]:
    """Return the first values of a new plan.

    Its limit is twice the job's maximum, which leaves as much for the comparisons.
    """
    values: dict[str, object] = {"schedule": _FIRST_SCHEDULE, "hour_utc": _FIRST_HOUR, "min_gain_points": 0}
    if job is None or job.adapter_version is None:
        return values
    alias = aliases.filter(adapter=job.adapter_version.adapter_id).first()
    limit = nano_to_usd(2 * (job.spend_cap_nano or job.cost_nano)).quantize(Decimal("0.01"), ROUND_CEILING)
    return values | {
        "name": job.suffix,
        "source_job": job.pk,
        "dataset": job.training_file.dataset_id,
        "held_out": job.validation_file.dataset_id if job.validation_file else "",
        "alias": alias.pk if alias else "",
        "max_usd": limit,
    }


def _name_of_job(job: FineTuningJob) -> str:
    return f"{job.suffix or job.pk}, {job.base_model.display_name}, {job.created_at:%Y-%m-%d}"
