"""The form that stores an organization's key of an experiment tracker."""

from django import forms

from apps.finetuning.trackers import NAMES


class TrackerForm(forms.Form):
    kind = forms.ChoiceField(label="Tracker", choices=list(NAMES.items()))
    key = forms.CharField(
        label="Key or token",
        max_length=400,
        widget=forms.PasswordInput({"autocomplete": "off"}),
        help_text="Kept encrypted, sent only to the tracker, never shown again.",
    )
    url = forms.CharField(
        label="Tracking server",
        max_length=400,
        required=False,
        help_text="Of MLflow alone, such as https://mlflow.example.com.",
    )
