"""Forms of compute: the deadline, the number of machines, and what a run may cost."""

import datetime
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from django import forms
from django.utils.translation import gettext

from apps.core.database.clock import db_now
from apps.core.errors import InvalidValue
from apps.core.messages.translation import later
from apps.core.money import usd_to_nano
from apps.estimates.machines import MAX_NODES
from apps.finetuning.quotes.obstacles import require_node_count

_DEADLINES = {  # by hours
    1: later("Within 1 hour"),
    2: later("Within 2 hours"),
    4: later("Within 4 hours"),
    8: later("Within 8 hours"),
    24: later("Within 24 hours"),
    72: later("Within 3 days"),
}


class CapForm(forms.Form):
    """The most a run may cost. An empty field means the suggested cap."""

    cap = forms.DecimalField(
        required=False,
        label=later("Spend cap"),
        max_digits=16,
        decimal_places=9,
        widget=forms.TextInput(attrs={"inputmode": "decimal", "autocomplete": "off", "class": "num"}),
    )

    def __init__(self, given: Mapping[str, str]) -> None:
        super().__init__({name: given[name] for name in self.base_fields if given.get(name)})

    def clean_cap(self) -> Decimal | None:
        cap: Decimal | None = self.cleaned_data["cap"]
        if cap is not None and cap <= 0:
            raise forms.ValidationError(gettext("The spend cap must be above zero."))
        return cap

    @property
    def cap_nano(self) -> int | None:
        """Return the cap of a checked form; return None if it is empty or wrong."""
        cap = self.cleaned_data.get("cap")
        return None if cap is None else usd_to_nano(cap)


class ComputeForm(CapForm):
    """When the adapter is needed, how many machines train it, and the most a run may cost.

    Empty fields mean any time, one machine and the suggested cap.
    """

    within = forms.TypedChoiceField(
        required=False,
        label=later("Needed within"),
        coerce=int,
        empty_value=None,
        choices=[("", later("Any time")), *_DEADLINES.items()],
        error_messages={"invalid_choice": later("Choose 1, 2, 4, 8, 24 or 72 hours.")},
    )
    needed_by = forms.CharField(
        required=False,
        label=later("Needed by"),
        widget=forms.DateTimeInput(attrs={"type": "datetime-local", "autocomplete": "off", "data-utc": ""}),
    )
    node_count = forms.IntegerField(
        label=later("Machines"),
        widget=forms.NumberInput(attrs={"inputmode": "numeric", "autocomplete": "off", "min": 1, "max": MAX_NODES}),
    )

    def __init__(self, given: Mapping[str, str]) -> None:
        moment = given.get("needed_by", "").removesuffix("Z")  # as the date input expects it
        kept = {name: given.get(name, "") for name in ("cap", "within")}
        super().__init__(kept | {"needed_by": moment, "node_count": given.get("node_count") or "1"})

    def clean_node_count(self) -> int:
        node_count: int = self.cleaned_data["node_count"]
        try:
            require_node_count(node_count)
        except InvalidValue as error:
            raise forms.ValidationError(error.message) from error
        return node_count

    def clean_needed_by(self) -> datetime.datetime | None:
        """Read a moment without a zone as UTC, because the page's script sends UTC only."""
        text = self.cleaned_data["needed_by"]
        if not text:
            return None
        try:
            moment = datetime.datetime.fromisoformat(text)
        except ValueError as error:
            raise forms.ValidationError(gettext("Enter a date and a time.")) from error
        moment = moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)
        if moment <= db_now():
            raise forms.ValidationError(gettext("This time has passed."))
        return moment

    def clean(self) -> dict[str, Any]:
        """Add the deadline: the earlier one, if both fields have one."""
        cleaned: dict[str, Any] = super().clean() or self.cleaned_data
        moment, hours = cleaned.get("needed_by"), cleaned.get("within")
        soon = db_now() + datetime.timedelta(hours=hours) if hours else None
        cleaned["deadline"] = min(moment, soon) if moment and soon else moment or soon
        return cleaned

    @property
    def nodes(self) -> int:
        """Return the number of machines of a checked form; return one if it is wrong."""
        nodes: int | None = self.cleaned_data.get("node_count")
        return nodes or 1

    @property
    def deadline(self) -> datetime.datetime | None:
        """Return the deadline of a checked form; return None if there is none or it is wrong."""
        moment: datetime.datetime | None = self.cleaned_data.get("deadline")
        return moment
