"""The form that chooses the experiment trackers to which a job reports."""

from collections.abc import Collection, Mapping, Sequence

import msgspec
from django import forms
from django.utils.translation import gettext

from apps.core.messages.translation import later
from apps.finetuning.recipes.stored_requests import Integration, StoredRequest


class TrackingForm(forms.Form):
    """A project for each tracker whose key is stored. If a field is empty, the job does not report to that tracker."""

    wandb = forms.CharField(required=False, max_length=128, label=later("W&B project"))
    mlflow = forms.CharField(required=False, max_length=128, label=later("MLflow experiment"))

    def __init__(
        self, given: Mapping[str, str], *, stored: Collection[str], of_source: Sequence[Integration] = ()
    ) -> None:
        """Create the form. `of_source` are the trackers of the job that is repeated: their other details are kept."""
        self._kept = {each.type: msgspec.to_builtins(each.project) for each in of_source}
        super().__init__({name: given.get(name, "") for name in self.base_fields})
        for kind in [kind for kind in self.fields if kind not in stored]:
            del self.fields[kind]
        for field in self.fields.values():
            field.help_text = gettext("Leave empty to skip this tracker.")
            field.widget.attrs |= {"autocomplete": "off", "spellcheck": "false"}

    @property
    def integrations(self) -> list[dict[str, object]]:
        """Return the API's field for a checked form."""
        chosen = ((kind, self.cleaned_data.get(kind, "")) for kind in self.fields)
        return [
            {"type": kind, kind: self._kept.get(kind, {}) | {"project": project}} for kind, project in chosen if project
        ]


def trackers_given(requested: StoredRequest) -> dict[str, str]:
    """Return the form values that reproduce a job's trackers."""
    return {each.type: each.project.project for each in requested.integrations}
