"""Forms of allauth's pages that ask for more than allauth does."""

from typing import Any

from allauth.account import forms as allauth_forms
from django import forms
from django.http import HttpRequest

from apps.accounts.models import User
from apps.accounts.operations import create_organization
from apps.core.clock import db_now
from apps.core.tenancy import tenant

# Set while somebody who followed an invitation signs up: they come to join, not to found.
SESSION_INVITATION = "invitation_token"


_HELP_ON_PASSWORDS = "At least 10 characters, and not one of the common ones."


class PlainFields:
    """Labels instead of placeholders, which vanish when one types, and one sentence on passwords instead of a list."""

    fields: dict[str, forms.Field]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for field in self.fields.values():
            field.widget.attrs.pop("placeholder", None)
        if "password1" in self.fields:
            self.fields["password1"].help_text = _HELP_ON_PASSWORDS


class LoginForm(PlainFields, allauth_forms.LoginForm):
    pass


class ChangePasswordForm(PlainFields, allauth_forms.ChangePasswordForm):
    pass


class ResetPasswordForm(PlainFields, allauth_forms.ResetPasswordForm):
    pass


class ResetPasswordKeyForm(PlainFields, allauth_forms.ResetPasswordKeyForm):
    pass


class SignUpForm(PlainFields, allauth_forms.SignupForm):
    """Sign-up makes a person and, unless an invitation brought them, an organization of their own."""

    name = forms.CharField(max_length=120, required=False, label="Your name")
    organization = forms.CharField(
        max_length=80, required=False, label="Organization", help_text="You can invite others to it later."
    )

    field_order = ["name", "email", "password1", "organization"]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fields["name"].widget.attrs["autocomplete"] = "name"
        self.fields["organization"].widget.attrs["autocomplete"] = "organization"

    def save(self, request: HttpRequest) -> User:
        """Create person and organization together or not at all."""
        name = self.cleaned_data["organization"].strip()
        with tenant():
            user: User = super().save(request)
            user.name = self.cleaned_data["name"].strip()
            user.save(update_fields=["name"])
            if name or SESSION_INVITATION not in request.session:
                create_organization(name=name or _default_name(user), owner=user, now=db_now())
        return user


def _default_name(user: User) -> str:
    owner = user.name or user.email.partition("@")[0]
    return f"{owner}'s organization"
