"""Forms of the dataset pages."""

from django import forms


class UploadForm(forms.Form):
    """One file with an optional name. The default is the file's own name; an existing name makes its next version."""

    name = forms.CharField(
        required=False,
        max_length=120,
        label="Name",
        help_text="Left empty: the file's name. The same name again adds a version.",
        widget=forms.TextInput(attrs={"autocomplete": "off"}),
    )
    file = forms.FileField(label="File", allow_empty_file=True, max_length=1000)
