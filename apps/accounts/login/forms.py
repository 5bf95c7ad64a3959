"""Forms for allauth's pages with our own fields and rules."""

from collections.abc import Mapping

from allauth.account import forms as allauth_forms
from allauth.account.adapter import get_adapter
from allauth.core import context
from allauth.mfa.base import forms as mfa_forms
from allauth.mfa.totp import forms as totp_forms
from django import forms
from django.contrib.auth.hashers import make_password
from django.http import HttpRequest, HttpResponse

from apps.accounts.login.browser_tokens import revoke_browser_tokens
from apps.accounts.login.key_operations import revoke_keys_of
from apps.accounts.login.person_audit import record_for_person
from apps.accounts.members.memberships import lock_memberships_of
from apps.accounts.models import User
from apps.accounts.operations import create_organization
from apps.core.database.clock import db_now
from apps.core.database.tenancy import system, tenant
from apps.core.messages.translation import later

# Set while a person who followed an invitation signs up: they join an organization and do not found one.
SESSION_INVITATION = "invitation_token"

# The sign-in page has a link of its own for a forgotten password.
_HELP_ON_PASSWORDS = {"password1": later("At least 10 characters. Avoid common passwords."), "password": ""}


class PlainFields:
    """Labels instead of placeholders, which vanish on typing, and one sentence on passwords instead of a list."""

    fields: dict[str, forms.Field]
    focused: str | None = None
    attributes: Mapping[str, object] = {}  # of the focused field

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        for field in self.fields.values():
            field.widget.attrs.pop("placeholder", None)
        for name, help_text in _HELP_ON_PASSWORDS.items():
            if name in self.fields:
                self.fields[name].help_text = help_text
        if self.focused is not None:
            self.fields[self.focused].widget.attrs |= {"autofocus": True, **self.attributes}


class LoginForm(PlainFields, allauth_forms.LoginForm):
    focused = "login"


class ReauthenticateForm(PlainFields, allauth_forms.ReauthenticateForm):
    focused = "password"


class SecondFactorForm(PlainFields, mfa_forms.AuthenticateForm):
    focused, attributes = "code", {"inputmode": "numeric"}


class SecondFactorAgainForm(PlainFields, mfa_forms.ReauthenticateForm):
    focused, attributes = "code", {"inputmode": "numeric"}


class ActivateTotpForm(PlainFields, totp_forms.ActivateTOTPForm):
    pass


class ChangePasswordForm(PlainFields, allauth_forms.ChangePasswordForm):
    revoke_keys = forms.BooleanField(
        required=False,
        label=later("Revoke my API keys too"),
        help_text=later(
            "Choose this if another person may know your password. You are signed out elsewhere in any case."
        ),
    )

    def save(self) -> None:
        """Change the password and, if requested, revoke the person's keys, in one transaction."""
        with system():
            super().save()
            _end_access(self.user, with_keys=self.cleaned_data["revoke_keys"], action="person.password_changed")


class ResetPasswordForm(PlainFields, allauth_forms.ResetPasswordForm):
    def save(self, request: HttpRequest, **kwargs: object) -> str:
        """Queue the same message for known and unknown addresses, so that answer and duration reveal nothing."""
        email: str = self.cleaned_data["email"]
        get_adapter().queue_password_reset(user=self.users[0] if self.users else None, email=email)
        return email


class ResetPasswordKeyForm(PlainFields, allauth_forms.ResetPasswordKeyForm):
    keep_keys = forms.BooleanField(
        required=False,
        label=later("Keep my API keys"),
        help_text=later("Your keys are revoked otherwise, in case another person changed the password."),
    )

    def save(self) -> None:
        """Set the password and revoke the person's keys unless they asked to keep them, in one transaction."""
        with system():
            super().save()
            _end_access(self.user, with_keys=not self.cleaned_data["keep_keys"], action="person.password_reset")


def _end_access(user: object, *, with_keys: bool, action: str) -> None:
    """Revoke the person's browser tokens, and their keys `with_keys`, because their password is a new one."""
    assert isinstance(user, User)
    lock_memberships_of(user=user)  # before the keys, as elsewhere
    revoke_browser_tokens(user=user, now=db_now())
    revoked = revoke_keys_of(user=user, now=db_now()) if with_keys else 0
    record_for_person(user=user, action=action, keys_revoked=revoked)


class SignUpForm(PlainFields, allauth_forms.SignupForm):
    """Creates a person and, unless an invitation brought them, an organization for them."""

    name = forms.CharField(max_length=120, required=False, label=later("Your name"))
    organization = forms.CharField(
        max_length=80,
        required=False,
        label=later("Organization"),
        help_text=later("You can invite others to it later."),
    )

    field_order = ["name", "email", "password1", "organization"]
    focused, attributes = "name", {"autocomplete": "name"}

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self.fields["organization"].widget.attrs["autocomplete"] = "organization"
        if SESSION_INVITATION in context.request.session:
            del self.fields["organization"]

    def clean_name(self) -> str:
        return " ".join(self.cleaned_data["name"].split())

    def try_save(self, request: HttpRequest) -> tuple[User | None, HttpResponse | None]:
        """Create the account. If the address has one, do the same work, give the same answer, and mail its owner."""
        if self.account_already_exists:
            make_password(self.cleaned_data["password1"])
        return super().try_save(request)

    def save(self, request: HttpRequest) -> User:
        """Create the person and the organization in one transaction."""
        if not get_adapter().is_email_verified(request, self.cleaned_data["email"]):
            get_adapter().unstash_verified_email(request)  # an invitation to another address does not verify this one
        with tenant():
            user: User = super().save(request)
            user.name = self.cleaned_data["name"]
            user.save(update_fields=["name"])
            if "organization" in self.fields:
                name = self.cleaned_data["organization"].strip()
                owner = user.name or user.email.partition("@")[0]
                create_organization(name=name or f"{owner}'s organization", owner=user, now=db_now())
        return user
